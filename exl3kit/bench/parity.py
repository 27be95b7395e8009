"""Parity: how far two ways of computing one model differ, next to how far one way differs from itself.

Every position is given the same text before it (teacher forcing), and the whole next-token distribution is compared: a
check of the likeliest token alone would miss most faults. Prefill and decode are looked at apart: decode runs other
kernels, and a check of prefill proves nothing about it.
"""

from __future__ import annotations

import base64
import math
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

from exl3kit.bench import campaign, plans
from exl3kit.errors import ExitCode, KitError

if TYPE_CHECKING:
    from exl3kit.bench.targets import Target
    from exl3kit.progress import Progress
    from exl3kit.recipe import Recipe

LIMIT_FLOAT32, LIMIT_HALF = 1e-6, 1e-3  # nats; other summation orders of one formula stay below these
ENTRIES = 4_000_000  # log-probabilities of one answer: 70 bytes of JSON each
CONTEXTS = 64
SAME, DIFFERENT, INVALID = "same", "different", "invalid"

Key = tuple[str, int, int]  # kind, prompt, position


@dataclass(frozen=True)
class Question:
    """tokens: of the text that is given. window: tokens of one prompt. decode: steps after each of the two prompts."""

    tokens: int = 1024
    window: int = 200
    decode: int = 64
    limit: float = LIMIT_FLOAT32

    def settings(self) -> dict[str, Any]:
        return asdict(self)

    def job(self, steps: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        """What the observer is asked."""
        return {
            "do": "score", "text": campaign.text(), "tokens": self.tokens, "window": self.window, "entries": ENTRIES,
            "contexts": CONTEXTS, "prompts": list(plans.WORDS.values()), "count": self.decode, "steps": dict(steps),
        }  # fmt: skip


@dataclass
class Scores:
    """What one boot said: distributions by kind and position (natural logarithms), log-likelihoods by position."""

    distributions: dict[Key, array[float]] = field(default_factory=dict)
    likelihoods: dict[int, float] = field(default_factory=dict)
    steps: dict[str, list[int]] = field(default_factory=dict)
    vocabulary: dict[str, Any] = field(default_factory=dict)


def score(target: Target, question: Question, progress: Progress, name: str, along: Scores | None = None) -> Scores:
    """Ask a server for its distributions; decode follows the steps that `along` chose, if given."""
    scores = Scores(steps=dict(along.steps) if along else {})
    job = {**question.job(scores.steps), "model": target.model}
    with progress.stage(name) as stage:
        for row in target.place.run(job):
            take(scores, row)
        kinds = [key[0] for key in scores.distributions]
        stage.conclude(f"{kinds.count('prefill')} positions, {kinds.count('decode')} decode steps")
    return scores


def take(scores: Scores, row: Mapping[str, Any]) -> None:
    """Add one row of the observer."""
    if row["kind"] == "vocabulary":
        scores.vocabulary = dict(row)
    elif row["kind"] == "steps":
        scores.steps[str(row["prompt"])] = list(row["tokens"])
    else:
        if "logprob" in row:
            scores.likelihoods[row["at"]] = row["logprob"]
        if "all" in row:
            place = row["at"] if row["kind"] == "prefill" else row["step"]
            scores.distributions[row["kind"], row.get("prompt", 0), place] = unpacked(row["all"])


def unpacked(text: str) -> array[float]:
    values = array("f", base64.b64decode(text))
    if sys.byteorder == "big":
        values.byteswap()
    return values


# Comparing ------------------------------------------------------------------------------------------------------------


def divergence(p: Sequence[float], q: Sequence[float]) -> float:
    """KLD(P‖Q) in nats of two distributions given as log-probabilities, both normalised anew in double precision.

    Raises `ValueError` when they are of different length or one holds what is no number.
    """
    if len(p) != len(q) or not p:
        raise ValueError(f"distributions over {len(p)} and {len(q)} tokens cannot be compared")
    weights = [math.exp(value) for value in p]
    total_p, total_q = sum(weights), sum(math.exp(value) for value in q)
    if not (math.isfinite(total_p) and math.isfinite(total_q) and total_p > 0 and total_q > 0):
        raise ValueError("a distribution holds what is no number")
    shift = math.log(total_q) - math.log(total_p)
    return max(0.0, sum(w * (a - b) for w, a, b in zip(weights, p, q, strict=True)) / total_p + shift)


@dataclass(frozen=True)
class Difference:
    """Two runs over one kind of position. mean, largest: KLD in nats. agreement: share of positions whose likeliest
    token is the same. likelihood: mean log-likelihood per token of either run (None for decode: nothing is given)."""

    kind: str
    positions: int
    mean: float
    largest: float
    at: int
    agreement: float
    likelihood: tuple[float, float] | None = None


def differences(a: Scores, b: Scores) -> list[Difference]:
    """Prefill, then decode. Raises `ValueError` for distributions that cannot be compared."""
    return [found for kind in ("prefill", "decode") if (found := _difference(kind, a, b)) is not None]


def _difference(kind: str, a: Scores, b: Scores) -> Difference | None:
    keys = [key for key in a.distributions if key[0] == kind and key in b.distributions]
    if not keys:
        return None
    klds = [divergence(a.distributions[key], b.distributions[key]) for key in keys]
    same = [likeliest(a.distributions[key]) == likeliest(b.distributions[key]) for key in keys]
    worst = max(range(len(keys)), key=klds.__getitem__)
    both = [place for place in a.likelihoods if place in b.likelihoods] if kind == "prefill" else []
    likelihood = (fmean(a.likelihoods[p] for p in both), fmean(b.likelihoods[p] for p in both)) if both else None
    return Difference(kind, len(keys), fmean(klds), klds[worst], keys[worst][2], fmean(same), likelihood)


def positions(reference: Scores, control: Scores, other: Scores) -> Iterator[dict[str, Any]]:
    """Every position that was compared, for the receipts: KLD of the control and of the other arm."""
    for key, distribution in reference.distributions.items():
        row: dict[str, Any] = {"kind": key[0], "prompt": key[1], "at": key[2]}
        for name, scores in (("control", control), ("other", other)):
            if key in scores.distributions:
                row[name] = divergence(distribution, scores.distributions[key])
        yield row


def likeliest(distribution: Sequence[float]) -> int:
    return max(range(len(distribution)), key=distribution.__getitem__)


@dataclass(frozen=True)
class Parity:
    """`same`, `different` or `invalid`, with what it rests on; `control` is the first arm against itself."""

    verdict: str
    sentences: list[str]
    control: list[Difference]
    other: list[Difference]
    limit: float

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "valid": self.verdict != INVALID}


def judge(reference: Scores, control: Scores, other: Scores, question: Question, faults: Sequence[str] = ()) -> Parity:
    """What the difference of `other` means next to the control's; `faults` are those of the boots. Pure."""
    try:
        alone, apart = differences(reference, control), differences(reference, other)
    except ValueError as error:
        return Parity(INVALID, [str(error)], [], [], question.limit)
    problems = [*faults, *_gaps(reference, alone, "control"), *_gaps(reference, apart, "other arm", kinds=("prefill",))]
    problems += _restless(alone, question.limit)
    if problems:
        return Parity(INVALID, problems, alone, apart, question.limit)
    own = {found.kind: found for found in alone}
    # a decode step is lost where the arm chose another token: too many of them are a difference, not a gap
    sentences = _gaps(reference, apart, "other arm", kinds=("decode",))
    verdict = DIFFERENT if sentences else SAME
    for found in apart:
        beyond = found.mean > question.limit
        verdict = DIFFERENT if beyond else verdict
        size = f"{found.kind}: mean KLD {found.mean:.3g} nats over {found.positions} positions"
        bound = f"{'above' if beyond else 'within'} the limit of {question.limit:g}"
        sentences.append(f"{size}, {_times(found.mean, own[found.kind].mean)}, {bound}")
    return Parity(verdict, sentences, alone, apart, question.limit)


def _times(mean: float, control: float) -> str:
    if control > 0:
        return f"{mean / control:.3g} times the control's {control:.3g}"
    return "and the control repeats itself bit for bit" if mean else "as the control, which repeats itself bit for bit"


def _gaps(
    reference: Scores, found: Sequence[Difference], name: str, kinds: Sequence[str] = ("prefill", "decode")
) -> list[str]:
    """Kinds of which less than half of the reference's positions can be compared."""
    had = {one.kind: one.positions for one in found}
    wanted = {kind: sum(key[0] == kind for key in reference.distributions) for kind in kinds}
    return [
        f"only {had.get(kind, 0)} of {count} {kind} positions can be compared with those of the {name}"
        for kind, count in wanted.items()
        if count == 0 or had.get(kind, 0) < count / 2
    ]


def _restless(alone: Sequence[Difference], limit: float) -> list[str]:
    return [
        f"the control differs from itself in {one.kind} by {one.mean:.3g} nats, more than the limit of {limit:g}, "
        "so nothing can be said of another arm"
        for one in alone
        if one.mean > limit
    ]


# With the kit's own deployments ---------------------------------------------------------------------------------------


def scoring(recipe: Recipe) -> Recipe:
    """The recipe, serving whole distributions."""
    if "--max-logprobs" in recipe.serve.args:
        return recipe
    serve = recipe.serve.model_copy(update={"args": [*recipe.serve.args, "--max-logprobs", "-1"]})
    return recipe.model_copy(update={"serve": serve})


def limit_for(*recipes: Recipe) -> float:
    """What rounding alone may do: one order of summation or another, in the coarsest type of the arms."""
    return LIMIT_FLOAT32 if all(recipe.serve.dtype == "float32" for recipe in recipes) else LIMIT_HALF


def refusal(found: Parity, where: str) -> KitError | None:
    """The error of arms that differ (verification) or of a measurement that proves nothing (benchmark), or None."""
    if found.verdict == SAME:
        return None
    if found.verdict == INVALID:
        return KitError(found.sentences[0], where=where, why="so the arms cannot be compared", code=ExitCode.BENCHMARK)
    return KitError(
        "the two arms are not the same model",
        where=where,
        why="; ".join(found.sentences),
        next_step="`python -m exl3_vllm.selfcheck` in the image compares the tiers on one layer",
        code=ExitCode.VERIFICATION,
    )
