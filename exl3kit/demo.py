"""The demo: both demo models, each on two ranks of one engine, asked what they were trained to answer.

It proves the path from recipe to answer: format, decoder, plugin, sharding, image, engine, network, server. The models
are one megabyte of frozen random trellis, so it proves nothing about quality.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from exl3kit import asking, containers, ports, proving, recipes, serve
from exl3kit.errors import ExitCode, KitError

if TYPE_CHECKING:
    from exl3kit.nodes import Node
    from exl3kit.progress import Progress
    from exl3kit.recipe import Recipe
    from exl3kit.serve import Serving

TWO_RANKS = ("parallel.nodes=2", "parallel.tensor=2")
MODELS: Mapping[str, tuple[str, Sequence[str]]] = {"dense": ("demo-tp2", ()), "moe": ("demo-moe", TWO_RANKS)}
QUESTIONS = "questions.json"  # beside the weights: [{question, answer}]
LONGEST = 100  # tokens; the longest trained answer has 40
PORTS_TRIED = 50


@dataclass(frozen=True)
class Told:
    """One question, what was answered, and whether that is the trained answer to the letter."""

    model: str
    question: str
    answer: str
    exact: bool
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """What the demo has seen. `ranks` are the receipts, each with its `model` and `node`."""

    answers: list[Told]
    ranks: list[dict[str, Any]]
    stamp: str
    urls: dict[str, str]  # of what was kept

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens per second, one request at a time, over every answer."""
        return sum(told.tokens for told in self.answers) / sum(told.seconds for told in self.answers)

    @property
    def exact(self) -> int:
        return sum(told.exact for told in self.answers)


def run(node: Node, progress: Progress, *, keep: bool) -> Outcome:
    """Serve both models one after the other and ask each its questions; what was started is taken down unless `keep`.

    Raises `KitError` (verification) when a receipt does not add up; what the answers are worth `failure` says.
    """
    answers: list[Told] = []
    ranks: list[dict[str, Any]] = []
    urls: dict[str, str] = {}
    stamp = ""
    for model, (reference, sets) in MODELS.items():
        progress.begin_part(f"the {model} model, on two ranks")
        recipe = on_free_port(recipes.load(reference, sets), node)
        with served(recipe, node, progress, keep=keep) as serving:
            with progress.stage("questions") as stage:
                told = list(questioned(model, recipe, serving))
                stage.conclude(f"{sum(one.exact for one in told)} of {len(told)} answers exact")
            answers += told
            ranks += [{**receipt, "model": model} for receipt in serving.receipts]
            stamp = serving.deployment.stamp
            if keep:
                urls[model] = serving.url
    return Outcome(answers, ranks, stamp, urls)


@contextmanager
def served(recipe: Recipe, node: Node, progress: Progress, *, keep: bool) -> Iterator[Serving]:
    """A served recipe, taken down at the end: when it was to be kept or served before, only after a failure."""
    serving = serve.up(recipe, [node], progress, serve.Terms(verb="demo"))
    with serve.removed_on_failure([node], serving.deployment):
        yield serving
    if not serving.started:
        progress.tell(f"{recipe.name} served before the demo, and goes on: `kit down {recipe.name}` ends it")
    elif not keep:
        with progress.stage("stop the ranks"):
            containers.take_down([node], serving.deployment.name, volumes=True)


def questioned(model: str, recipe: Recipe, serving: Serving) -> Iterator[Told]:
    """Every trained question put to the served model, in the order of its file."""
    assert recipe.model.path is not None
    for pair in json.loads((recipe.model.path / QUESTIONS).read_text(encoding="utf-8")):
        answer = asking.complete(serving.head, recipe.served_name, pair["question"], LONGEST, wait_s=10)
        refusal = answer.refusal()
        if refusal is not None:
            raise proving.no_service(serving.standing, f"no answer to {pair['question']!r}", refusal)
        yield Told(model, pair["question"], answer.text, answer.text == pair["answer"], answer.tokens, answer.seconds)


def on_free_port(recipe: Recipe, node: Node) -> Recipe:
    """The recipe on its own port, or on the next one that nothing else has: a demo should not fail on that."""
    taken = ports.listening(node)
    first = recipe.serve.port
    for port in range(first, first + PORTS_TRIED):
        if port not in taken or ports.deployment_on(node, port) == recipe.name:
            return recipe.model_copy(update={"serve": recipe.serve.model_copy(update={"port": port})})
    raise node.error(
        f"none of the ports {first} to {first + PORTS_TRIED - 1} is free",
        next_step="stop what listens on one of them",
        code=ExitCode.PREFLIGHT,
    )


def failure(outcome: Outcome) -> KitError | None:
    """None when every answer is the trained one, to the letter; else the error (verification) to end with."""
    wrong = [told for told in outcome.answers if not told.exact]
    if not wrong:
        return None
    return KitError(
        f"{len(wrong)} of {len(outcome.answers)} answers are not the trained ones",
        where=f"model {wrong[0].model}",
        why=f"{wrong[0].question!r} was answered {wrong[0].answer!r}",
        next_step="report it with the output of `kit demo --json`: the path is broken, whatever the server says",
        code=ExitCode.VERIFICATION,
    )
