"""What an A-B-A campaign says, from the records of its boots. Pure, so that a report, a test with resampled data and
the campaign itself draw the same conclusion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

from exl3kit.bench import statistics
from exl3kit.bench.statistics import Effect

EFFECT, NONE, INVALID = "effect", "no effect shown", "invalid"


@dataclass(frozen=True)
class Boot:
    """One boot: its arm, and the rates of the observations that count, by rung."""

    arm: str
    rates: Mapping[str, Sequence[float]]

    @property
    def rate(self) -> float:
        """One figure per boot, see `statistics.boot_rate`."""
        return statistics.boot_rate(list(self.rates.values()))


@dataclass(frozen=True)
class Rung:
    """One rung over all boots; described, not claimed: the claim of a campaign is one, about all rungs together.

    medians: of each boot, in order. cv_a, cv_b: the largest variation within a boot. separated: whether every single
    observation of one arm is beyond every one of the other.
    """

    name: str
    medians: list[float]
    a: float
    b: float
    cv_a: float
    cv_b: float
    separated: bool
    effect: Effect


@dataclass(frozen=True)
class Comparison:
    """`verdict` is `effect`, `no effect shown` or `invalid`; `why` says what it rests on."""

    verdict: str
    why: str
    effect: Effect | None = None
    rungs: list[Rung] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "valid": self.verdict != INVALID}


def compare(boots: Sequence[Boot], faults: Sequence[str] = (), *, level: float = statistics.LEVEL) -> Comparison:
    """The verdict on a campaign whose observations and environments gave `faults`.

    An effect is claimed when the confidence interval over boots excludes none and the effect is larger than A's own
    drift. Whether boots overlap is reported and decides nothing: the interval holds the level alone, and on boots that
    spread by 3.3% complete separation hid a real 10% in 3 of 10 campaigns. One claim per campaign, about the geometric
    mean over the rungs, so that a false claim has the probability `level` at most, however many rungs there are.
    """
    found = list(faults) + list(_faults_of(boots))
    if found:
        return Comparison(INVALID, found[0], faults=found)
    a, b = ([boot for boot in boots if boot.arm == arm] for arm in "AB")
    rates_a, rates_b = [boot.rate for boot in a], [boot.rate for boot in b]
    whole = statistics.effect(rates_a, rates_b, level=level)
    rungs = [_rung(name, boots, level) for name in boots[0].rates]
    apart = statistics.separated(rates_a, rates_b)
    if whole.excludes_one and whole.beyond_drift:
        overlap = "no boots overlap" if apart else "some boots overlap"
        why = f"over {len(a)} + {len(b)} boots the interval excludes no effect, {overlap}, and A drifted less"
        return Comparison(EFFECT, why, whole, rungs)
    missing = [
        word
        for held, word in (
            (whole.excludes_one, "the interval over boots includes no effect"),
            (whole.beyond_drift, "A drifted more than that by itself"),
        )
        if not held
    ]
    return Comparison(NONE, "; ".join(missing), whole, rungs)


def _rung(name: str, boots: Sequence[Boot], level: float) -> Rung:
    sides = {arm: [boot.rates[name] for boot in boots if boot.arm == arm] for arm in "AB"}
    medians = {arm: [median(rates) for rates in side] for arm, side in sides.items()}
    return Rung(
        name=name,
        medians=[median(boot.rates[name]) for boot in boots],
        a=fmean(medians["A"]),
        b=fmean(medians["B"]),
        cv_a=max(statistics.variation(rates) for rates in sides["A"]),
        cv_b=max(statistics.variation(rates) for rates in sides["B"]),
        separated=statistics.separated(*([rate for rates in sides[arm] for rate in rates] for arm in "AB")),
        effect=statistics.effect(medians["A"], medians["B"], level=level),
    )


def _faults_of(boots: Sequence[Boot]) -> list[str]:
    order = "".join(boot.arm for boot in boots)
    if len(order) < 3 or order[0] != "A" or order[-1] != "A" or set(order) != {"A", "B"}:
        return [f"the boots were {order or 'none'}, and a campaign begins and ends with A and has B between"]
    told = []
    for number, boot in enumerate(boots):
        if list(boot.rates) != list(boots[0].rates) or not boot.rates:
            told.append(f"boot {number} has other rungs than the first")
    return told
