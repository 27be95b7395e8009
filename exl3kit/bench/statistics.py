"""What observations say about an effect. Pure; the boot is the unit, since what differs between boots (placement of
memory, clocks, heat, other work) is the same for all observations within one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, median, stdev


def variation(values: Sequence[float]) -> float:
    """Coefficient of variation: sample standard deviation over mean; 0 for a single value."""
    return stdev(values) / abs(fmean(values)) if len(values) > 1 else 0.0


def separated(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether every value of one side is beyond every value of the other."""
    return max(a) < min(b) or max(b) < min(a)


@dataclass(frozen=True)
class Effect:
    """How B differs from A, in ratios of rates: 1.2 is 20% faster.

    low, high: confidence interval. drift: last boot of A over its first. level: 1 - confidence.
    """

    ratio: float
    low: float
    high: float
    drift: float
    level: float
    boots: tuple[int, int]

    @property
    def excludes_one(self) -> bool:
        return not self.low <= 1 <= self.high

    @property
    def beyond_drift(self) -> bool:
        """Whether the effect is larger than what A changed by itself between its first and its last boot."""
        return abs(math.log(self.ratio)) > abs(math.log(self.drift))


LEVEL = 0.02
"""Probability of a false claim. Not the customary 5%: boots in turn are not quite independent (what else runs on a
machine stays for a while), and on a crowded machine 5 of 40 campaigns without an effect claimed one."""


def effect(a: Sequence[float], b: Sequence[float], *, level: float = LEVEL) -> Effect:
    """B's effect from one rate per boot, boots of each arm in their order.

    Student's t with pooled variance on the logarithms of the rates, so the interval is about the ratio of (geometric)
    means. Two boots of one arm and one of the other are the least: one degree of freedom, and t is 31.8 at 2%.

    Raises `ValueError` for fewer boots or a rate that is not positive and finite.
    """
    if len(a) + len(b) < 3 or not a or not b:
        raise ValueError("an effect needs three boots, at least one of each arm")
    if not all(math.isfinite(rate) and rate > 0 for rate in (*a, *b)):
        raise ValueError("a rate must be a positive number")
    logs_a, logs_b = [math.log(rate) for rate in a], [math.log(rate) for rate in b]
    freedom = len(a) + len(b) - 2
    spread = sum((x - fmean(logs)) ** 2 for logs in (logs_a, logs_b) for x in logs) / freedom
    margin = student_quantile(1 - level / 2, freedom) * math.sqrt(spread * (1 / len(a) + 1 / len(b)))
    centre = fmean(logs_b) - fmean(logs_a)
    return Effect(
        ratio=math.exp(centre),
        low=math.exp(centre - margin),
        high=math.exp(centre + margin),
        drift=a[-1] / a[0],
        level=level,
        boots=(len(a), len(b)),
    )


def boot_rate(rungs: Sequence[Sequence[float]]) -> float:
    """One figure of a boot: the geometric mean over its rungs of the median of each rung's observations."""
    return math.exp(fmean(math.log(median(rates)) for rates in rungs))


# Student's t ----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def student_quantile(p: float, freedom: int) -> float:
    """The value that a t-distributed number stays below with probability `p`, 0.5 <= p < 1, by bisection."""
    if not 0.5 <= p < 1 or freedom < 1:
        raise ValueError("p must be in [0.5, 1) and freedom at least 1")
    low, high = 0.0, 1.0
    while student_below(high, freedom) < p:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student_below(middle, freedom) < p else (low, middle)
    return (low + high) / 2


def student_below(t: float, freedom: int) -> float:
    """P(T < t) for t >= 0: (1 + I(x; 1/2, freedom/2))/2 with x = t²/(freedom + t²), which is exact for small t too."""
    return (1 + incomplete_beta(t * t / (freedom + t * t), 0.5, freedom / 2)) / 2


def incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I(x; a, b), by its continued fraction (Lentz's method)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast on the other side
        return 1 - incomplete_beta(1 - x, b, a)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )  # fmt: skip
    tiny = 1e-300
    c, d = 1.0, 1 - (a + b) * x / (a + 1)
    d = 1 / (d if abs(d) > tiny else tiny)
    value = d
    for m in range(1, 300):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        step = 1.0
        for term in (even, odd):
            d = 1 / _away(1 + term * d, tiny)
            c = _away(1 + term / c, tiny)
            step = c * d
            value *= step
        if abs(step - 1) < 1e-15:
            break
    return front * value / a


def _away(value: float, tiny: float) -> float:
    return value if abs(value) > tiny else tiny
