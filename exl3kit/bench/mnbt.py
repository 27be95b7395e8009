"""`kit bench mnbt`: which `max_num_batched_tokens` suits a deployment. Measured, because reports of one value's gain
did not hold on the next machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from exl3kit.bench import campaign, gate, metrics, plans, selftest, summaries
from exl3kit.bench.metrics import Scrape

if TYPE_CHECKING:
    from exl3kit.bench.targets import Target
    from exl3kit.recipe import Recipe

ENOUGH = 0.97  # of the best throughput: gains of 2 to 3% were paid for with 8% on shorter prompts in the field


@dataclass(frozen=True)
class Setting:
    """What one value gave.

    rate: cold prefill of the longest prompt, tokens/s. short: seconds to the first token of a short prompt on an idle
    server; beside: the same while long prompts are computed. pool: tokens that the KV cache holds.
    """

    value: int
    rate: float
    short: float
    beside: float | None
    pool: int | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def recommend(settings: Sequence[Setting]) -> tuple[Setting, str]:
    """The smallest value that gives `ENOUGH` of the best throughput: it leaves short prompts and the KV cache the most.

    Raises `ValueError` for no settings.
    """
    best = max(settings, key=lambda one: one.rate)
    chosen = min((one for one in settings if one.rate >= ENOUGH * best.rate), key=lambda one: one.value)
    if chosen is best:
        return chosen, f"{chosen.value} gives the most, and no smaller value gives {ENOUGH:.0%} of it"
    return (
        chosen,
        f"{chosen.value} gives {chosen.rate / best.rate:.1%} of what {best.value} gives, with less to wait for",
    )


def steps(rungs: Sequence[int], count: int, least: int) -> list[plans.Step]:
    return plans.prefill(rungs, count, campaign.salt(), least)


def setting(
    value: int, observations: Sequence[Mapping[str, Any]], beside: Sequence[float], pool: int | None
) -> Setting:
    """One value's figures, from the observations of its boot that count."""
    by_rung = {row.name: row for row in summaries.rows(summaries.judged(observations))}
    shortest, longest = min(by_rung, key=int), max(by_rung, key=int)
    return Setting(value, by_rung[longest].rate, by_rung[shortest].ttft, median(beside) if beside else None, pool)


def beside_long(target: Target, short: int, longest: int, count: int) -> list[float]:
    """Seconds to the first token of short prompts while another client's long prompts are computed.

    These rows are not cold observations (somebody else's requests are the point), so the gate is not asked.
    """
    with selftest.somebody_else(target, tokens=longest, answer=1):
        seen = selftest.seen(target, plans.prefill([short], count, campaign.salt()))
    return [found.ttft for one in seen if summaries.is_sample(one) and (found := gate.judge(one)).ttft is not None]


def pool_of(target: Target) -> int | None:
    """Tokens that the KV cache holds, from the server's own account."""
    scrape = Scrape(str(target.facts["metrics"]))
    blocks, size = (scrape.label(metrics.CACHE, key) for key in ("num_gpu_blocks", "block_size"))
    return int(blocks) * int(size) if blocks and size and blocks.isdecimal() and size.isdecimal() else None


def with_value(recipe: Recipe, value: int) -> Recipe:
    serve = recipe.serve.model_copy(update={"max_num_batched_tokens": value})
    return recipe.model_copy(update={"serve": serve})
