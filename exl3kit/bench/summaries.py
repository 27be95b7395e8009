"""From judged observations to figures with their spread, and to the reasons why a campaign proves nothing. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from exl3kit.bench import gate, metrics, plans
from exl3kit.bench.gate import Verdict
from exl3kit.bench.metrics import Missing, Scrape
from exl3kit.bench.statistics import variation

Judged = tuple[Mapping[str, Any], Verdict]


@dataclass(frozen=True)
class Row:
    """One rung of a ladder, one kind of decode, or one number of streams.

    rate: median in tokens per second; low and high: slowest and fastest; cv: coefficient of variation. ttft: median in
    seconds; overhead: the part of it that a request without any computing takes; acceptance: tokens per draft step.
    """

    name: str
    count: int
    rate: float
    low: float
    high: float
    cv: float
    ttft: float
    overhead: float
    acceptance: float | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def judged(observations: Iterable[Mapping[str, Any]]) -> list[Judged]:
    """Every observation with the gate's verdict on it."""
    return [(one, gate.judge(one)) for one in observations]


def is_sample(observation: Mapping[str, Any]) -> bool:
    """Whether a step was meant to count: no warm-up, no planted fault."""
    step = observation["step"]
    return not step.get("warmup") and not step.get("planted")


def rung_of(observation: Mapping[str, Any]) -> str:
    step = observation["step"]
    return str(step["tokens"]) if step["kind"] == "prefill" else str(step["kind"])


def rate_of(observation: Mapping[str, Any], verdict: Verdict) -> float | None:
    """The rate that a step of this kind is about, tokens per second."""
    return verdict.prefill if observation["step"]["kind"] == "prefill" else verdict.decode


def rates_by_rung(pairs: Sequence[Judged]) -> dict[str, list[float]]:
    """Rates of the samples that count, by rung, in the order of their first appearance."""
    found: dict[str, list[float]] = {}
    for one, verdict in pairs:
        rate = rate_of(one, verdict)
        if is_sample(one) and verdict.counts and rate is not None:
            found.setdefault(rung_of(one), []).append(rate)
    return found


def rows(pairs: Sequence[Judged]) -> list[Row]:
    """One row per rung, from the samples that count."""
    told = []
    for name, rates in rates_by_rung(pairs).items():
        mine = [(one, v) for one, v in pairs if is_sample(one) and v.counts and rung_of(one) == name]
        accepted = [v.acceptance for _, v in mine if v.acceptance is not None]
        told.append(
            Row(
                name=name,
                count=len(rates),
                rate=median(rates),
                low=min(rates),
                high=max(rates),
                cv=variation(rates),
                ttft=median(v.ttft or 0.0 for _, v in mine),
                overhead=median(float(one["round_trip"]) for one, _ in mine),
                acceptance=median(accepted) if accepted else None,
            )
        )
    return told


# Why a campaign proves nothing ----------------------------------------------------------------------------------------


def faults(pairs: Sequence[Judged], *, max_cv: float) -> list[str]:
    """Reasons why these observations of one boot are no campaign, as sentences without a full stop."""
    return [*refused(pairs), *too_few(pairs), *unsteady(pairs, max_cv), *unproven(pairs)]


def refused(pairs: Sequence[Judged]) -> list[str]:
    """Samples that the gate does not let count."""
    return [
        f"observation {number} ({rung_of(one)}) does not count: {'; '.join(verdict.reasons)}"
        for number, (one, verdict) in enumerate(pairs)
        if is_sample(one) and not verdict.counts
    ]


def too_few(pairs: Sequence[Judged]) -> list[str]:
    """Rungs with fewer samples that count than their plan calls the least."""
    found = rates_by_rung(pairs)
    wanted = {rung_of(one): int(one["step"].get("least", plans.LEAST)) for one, _ in pairs if is_sample(one)}
    if not wanted:
        return ["it holds no sample"]
    return [
        f"{name} has {len(found.get(name, []))} observations that count, and {least} are the least"
        for name, least in wanted.items()
        if len(found.get(name, [])) < least
    ]


def unsteady(pairs: Sequence[Judged], max_cv: float) -> list[str]:
    return [
        f"{row.name} varies by {row.cv:.1%} within one boot, and {max_cv:.0%} is the most (--max-cv)"
        for row in rows(pairs)
        if row.cv > max_cv
    ]


def unproven(pairs: Sequence[Judged]) -> list[str]:
    """Whether the deliberate cache hit was refused for being one; a server without a prefix cache cannot make one."""
    planted = [(one, verdict) for one, verdict in pairs if one["step"].get("planted")]
    told = []
    for one, verdict in planted:
        if not verdict.counts:
            if not any("cache" in reason for reason in verdict.reasons):
                told.append(f"the planted cache hit was refused for another reason: {'; '.join(verdict.reasons)}")
        elif has_prefix_cache(one):
            told.append("the planted cache hit was not refused, so the gate proves nothing here")
    return told


def has_prefix_cache(observation: Mapping[str, Any]) -> bool:
    """False only where the server itself says that it has none, or where no whole block could be hit."""
    try:
        scrape = Scrape(observation["before"])
        if scrape.label(metrics.CACHE, "enable_prefix_caching") == "False":
            return False
        block = scrape.label(metrics.CACHE, "block_size")
        return not (block and block.isdecimal() and int(observation["step"]["tokens"]) <= int(block))
    except (Missing, KeyError):
        return True


def by(observations: Iterable[Mapping[str, Any]], key: Callable[[Mapping[str, Any]], Any]) -> dict[Any, list[Any]]:
    """Observations in groups, each in its order."""
    groups: dict[Any, list[Any]] = {}
    for one in observations:
        groups.setdefault(key(one), []).append(one)
    return groups
