"""`kit bench ab`: two arms, booted in turn (A-B-A, or more), all else proven equal, and one verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from exl3kit import recipes
from exl3kit.bench import campaign, comparison, differences, engagement, plans, statistics, summaries, targets
from exl3kit.bench.comparison import Boot, Comparison
from exl3kit.errors import ExitCode, KitError

if TYPE_CHECKING:
    from pathlib import Path

    from exl3kit.bench.records import Campaign, Recorder
    from exl3kit.bench.targets import Target
    from exl3kit.nodes import Node
    from exl3kit.progress import Progress
    from exl3kit.recipe import Recipe

Opener = Callable[[str], AbstractContextManager["Target"]]


@dataclass(frozen=True)
class Question:
    """What a campaign asks.

    boots: how many, odd; they alternate and begin and end with A. count: observations of a rung in each boot. named:
    the paths of the environment that the two arms are meant to differ in. tiers: the tier that each arm claims.
    """

    rungs: Sequence[int] = ()
    count: int = plans.LEAST
    boots: int = 3
    least: int = plans.LEAST
    max_cv: float = 0.15
    level: float = statistics.LEVEL
    named: Sequence[str] = ()
    tiers: Mapping[str, str] = field(default_factory=dict)

    @property
    def order(self) -> str:
        """The arms of the boots. Raises `KitError` for a number of boots that does not end with A."""
        if self.boots < 3 or self.boots % 2 == 0:
            raise KitError(f"{self.boots} boots cannot begin and end with A", where="--boots", next_step="3, 5, 7, ...")
        return ("AB" * self.boots)[: self.boots]

    def as_json(self) -> dict[str, Any]:
        return {"boots": self.boots, "count": self.count, "max_cv": self.max_cv, "level": self.level,
                "named": list(self.named), "tiers": dict(self.tiers)}  # fmt: skip


def run(question: Question, opener: Opener, recorder: Recorder, progress: Progress) -> Comparison:
    """Boot, observe and record every arm in turn; what they say is recorded too.

    Raises `KitError` when an arm does not boot.
    """
    records: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    for number, arm in enumerate(question.order):
        progress.tell(f"boot {number + 1} of {question.boots}: {arm}")
        with opener(arm) as target:
            records.append(observe_boot(number, arm, target, question, recorder, progress))
        recorder.write("boot", records[-1][0])
    found = conclude(records, question.as_json())
    recorder.write("result", found.as_json())
    return found


def observe_boot(
    number: int, arm: str, target: Target, question: Question, recorder: Recorder, progress: Progress
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One boot's record and observations."""
    rungs = plans.ladder(target.max_model_len, question.rungs)
    steps = plans.prefill(rungs, question.count, campaign.salt(), question.least)
    with target.boot(number, arm) as boot:
        seen = campaign.observe(target, steps, recorder, progress, number, f"observe {arm}")
    return boot, seen


def conclude(
    records: Sequence[tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]], settings: Mapping[str, Any]
) -> Comparison:
    """The verdict on boots and their observations. Pure: `settings` are those of the campaign's head record."""
    faults: list[str] = []
    boots: list[Boot] = []
    for boot, observations in records:
        pairs = summaries.judged(observations)
        where = f"boot {boot['number']} ({boot['arm']}): "
        found = summaries.faults(pairs, max_cv=float(settings["max_cv"]))
        tier = settings.get("tiers", {}).get(boot["arm"], "auto")
        found += engagement.faults(boot.get("before") or (), boot.get("after") or (), tier)
        faults += [where + fault for fault in found]
        boots.append(Boot(str(boot["arm"]), summaries.rates_by_rung(pairs)))
    faults += unequal([boot for boot, _ in records], settings.get("named", ()))
    return comparison.compare(boots, faults, level=float(settings["level"]))


def read_again(found: Campaign) -> Comparison:
    """The verdict on a campaign's file."""
    return conclude([(boot, found.of_boot(boot["number"])) for boot in found.boots], found.head)


def unequal(boots: Sequence[Mapping[str, Any]], named: Sequence[str]) -> list[str]:
    """What differs between the boots' environments and should not."""
    first, told = boots[0], []
    for boot in boots[1:]:
        allowed = set(named) if boot["arm"] != first["arm"] else set[str]()
        found = differences.between(first["environment"], boot["environment"])
        other = {path: values for path, values in found.items() if path not in allowed}
        told += [f"boot {boot['number']} ({boot['arm']}) differs from the first in {line}" for line in
                 differences.told(other)]  # fmt: skip
    return told


def refusal(found: Comparison, where: str, folder: Path) -> KitError | None:
    """The error (benchmark) of a campaign that proves nothing, or None; no effect is a result like another."""
    if found.verdict != comparison.INVALID:
        return None
    return campaign.refusal(campaign.Outcome([], found.faults, folder), where)


# With the kit's own deployments ---------------------------------------------------------------------------------------


@contextmanager
def booted(recipe: Recipe, nodes: Sequence[Node], progress: Progress) -> Iterator[Target]:
    """A recipe brought up for one boot, and taken down after it."""
    from exl3kit import containers, serve

    standing = containers.find(nodes, recipe.name)
    if standing:
        raise KitError(
            f"{recipe.name} stands on the nodes already",
            where=", ".join(sorted({one.node.name for one in standing})),
            why="a campaign boots its arms itself",
            next_step=f"`kit down {recipes.said(recipe)}` first",
            code=ExitCode.PREFLIGHT,
        )
    serving = serve.up(recipe, nodes, progress)
    try:
        yield targets.deployed(recipe, containers.find(nodes, recipe.name))
    finally:
        containers.take_down(nodes, serving.deployment.name)


def named_differences(a: Recipe, b: Recipe, nodes: Sequence[Node]) -> dict[str, tuple[Any, Any]]:
    """What two recipes differ in once they are ranks: the paths of `Target.environment`, with both values."""
    from exl3kit import serve

    def planned(recipe: Recipe) -> dict[str, Any]:
        deployment = serve.survey(recipe, nodes).plan("generation")
        ranks = [
            {
                "argv": targets.options(rank.argv),
                "env": {name: value for name, value in rank.env.items() if name not in targets.OURS},
                "stamp": deployment.stamp,
                "image": deployment.image,
                "mounts": [[targets.homeless(rank.model_dir), "/model"]],
            }
            for rank in deployment.ranks
        ]
        return {"max_model_len": recipe.serve.max_model_len, "model": recipe.served_name, "ranks": ranks}

    return differences.between(planned(a), planned(b))
