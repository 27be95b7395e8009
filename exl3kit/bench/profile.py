"""`kit bench profile`: the torch profiler around one cold prefill and one decode, added up by part of the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exl3kit.bench import attribution, campaign, gate, places
from exl3kit.bench.plans import WORDS, Step
from exl3kit.errors import ExitCode, KitError

if TYPE_CHECKING:
    from exl3kit.bench.attribution import Share
    from exl3kit.bench.targets import Target
    from exl3kit.recipe import Recipe

SOURCE = Path(__file__).with_name("tracer.py")
FOLDER = "/tmp/exl3-profile"  # in the container's tmpfs
CONFIG = f'{{"profiler": "torch", "torch_profiler_dir": "{FOLDER}", "torch_profiler_with_stack": false}}'


def refuse_without_gpu(recipe: Recipe) -> None:
    """On a CPU there is nothing to attribute: the plugin's layers are plain matrix products there."""
    if recipe.image.on_cpu:
        raise KitError(
            "there is no GPU whose time could be attributed",
            where=recipe.name,
            why="its image is for CPUs, where the layers are dequantised at load and are plain products",
            next_step="name a recipe whose image.arch has a GPU's compute capability",
            code=ExitCode.PREFLIGHT,
        )


def profiling(recipe: Recipe) -> Recipe:
    """The recipe with the profiler at hand; it costs nothing until it is started."""
    serve = recipe.serve.model_copy(update={"args": [*recipe.serve.args, "--profiler-config", CONFIG]})
    return recipe.model_copy(update={"serve": serve})


def steps(max_model_len: int, tokens: int) -> dict[str, list[Step]]:
    """A warm-up outside the profile comes first; then what is profiled, by its name."""
    salt = campaign.salt()
    longest = min(tokens, max_model_len - 1)
    prefill: Step = {"kind": "prefill", "salt": salt, "tokens": longest, "max_tokens": 1}
    decode: Step = {"kind": "prose", "salt": f"{salt}d", "words": WORDS["prose"], "max_tokens": 64}
    return {"prefill": [prefill], "decode": [decode]}


def profiled(target: Target, wanted: Sequence[Step]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The observations made under the profiler, and what the traces add up to (the rank that was busiest).

    Raises `KitError` (benchmark) for an observation that does not count, or traces without a kernel.
    """
    job = {"do": "profile", "model": target.model, "text": campaign.text(), "steps": list(wanted)}
    seen = list(target.place.run(job))
    reasons = [reason for one in seen for reason in gate.judge(one).reasons]
    traces = [trace for trace in added_up(target) if trace["busy"] > 0]
    if reasons or not traces:
        why = reasons[0] if reasons else "the profiler's traces hold no kernel"
        raise KitError("the profile does not count", where=target.place.name, why=why, code=ExitCode.BENCHMARK)
    return seen, max(traces, key=lambda trace: trace["busy"])


def added_up(target: Target) -> Iterator[dict[str, Any]]:
    argv = ["python3", "-c", SOURCE.read_text(encoding="utf-8"), FOLDER]
    for stdout, _ in places.stream(target.standing[0], argv):
        if stdout is not None:
            yield places.answered(target.place.name, stdout)


def shares(seen: Sequence[dict[str, Any]], trace: dict[str, Any]) -> list[Share]:
    """The profile by part; the tokens are those that were computed (prefill) or generated (decode)."""
    verdicts = [(one["step"]["kind"], gate.judge(one)) for one in seen]
    tokens = sum(int((v.computed if kind == "prefill" else v.generated) or 0) for kind, v in verdicts)
    return attribution.shares(trace["kernels"], trace["span"], trace["busy"], tokens)
