"""`kit bench load`: throughput and latency by requests at once, with vLLM's own load generator inside the image.

The generator that every vLLM user knows makes the load; what is added is the account: the server must have finished
exactly the requests that were sent, with no preemption told away, and have been idle before.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exl3kit.bench import campaign, metrics, places
from exl3kit.bench.metrics import Missing, Scrape, Window
from exl3kit.errors import ExitCode, KitError

if TYPE_CHECKING:
    from exl3kit.bench.records import Recorder
    from exl3kit.bench.targets import Target
    from exl3kit.progress import Progress

SOURCE = Path(__file__).with_name("loader.py")
WARMUPS = 1


@dataclass(frozen=True)
class Load:
    """prompt, answer: tokens of each request. per_stream: requests of a level for each of its streams."""

    levels: Sequence[int]
    prompt: int = 512
    answer: int = 128
    per_stream: int = 8
    seed: int = 0

    def requests(self, level: int) -> int:
        return max(8, self.per_stream * level)


def argv(load: Load, level: int, model: str, url: str, tokenizer: str) -> list[str]:
    """`vllm bench serve` for one level: random prompts of one length, another seed for each level."""
    return [
        "vllm", "bench", "serve", "--backend", "openai", "--base-url", url, "--model", model, "--tokenizer", tokenizer,
        "--dataset-name", "random", "--random-input-len", str(load.prompt), "--random-output-len", str(load.answer),
        "--num-prompts", str(load.requests(level)), "--max-concurrency", str(level), "--num-warmups", str(WARMUPS),
        "--ignore-eos", "--temperature", "0", "--seed", str(load.seed + level), "--disable-tqdm",
        "--ready-check-timeout-sec", "0",
    ]  # fmt: skip


def run(target: Target, load: Load, recorder: Recorder, progress: Progress) -> tuple[list[dict[str, Any]], list[str]]:
    """Every level, and what makes them worthless. Raises `KitError` when the generator does not run."""
    if not target.standing or target.recipe is None:
        raise KitError("a load is made inside the image", where=target.place.name,
                       why="the generator is the image's own vLLM", next_step="name a recipe that is up",
                       code=ExitCode.USAGE)  # fmt: skip
    from exl3kit.deployment import MODEL_DIR

    head, url = target.standing[0], f"http://127.0.0.1:{target.recipe.serve.port}"
    levels, faults = [], []
    for level in load.levels:
        with progress.stage(f"{level} at once") as stage:
            before = scrape(target)
            job = {"argv": [argv(load, level, target.model, url, MODEL_DIR)]}
            told = next(generated(head, job, target.place.name))
            row = {"level": level, "requests": load.requests(level), "told": told, "before": before}
            row["after"] = scrape(target)
            stage.conclude(f"{told['output_throughput']:.0f} tokens/s")
        recorder.write("level", row)
        levels.append(row)
        faults += [f"{level} at once: {fault}" for fault in faults_of(row)]
    return levels, faults


def generated(head: Any, job: Mapping[str, Any], name: str) -> Iterator[dict[str, Any]]:
    argv_there = ["python3", "-c", SOURCE.read_text(encoding="utf-8"), json.dumps(job)]
    for stdout, _ in places.stream(head, argv_there):
        if stdout is not None:
            yield places.answered(name, stdout)


def scrape(target: Target) -> str:
    return str(next(iter(target.place.run({"do": "facts"})))["metrics"])


def faults_of(row: Mapping[str, Any]) -> list[str]:
    """Why a level proves nothing. Pure."""
    told, sent = row["told"], int(row["requests"])
    faults = []
    if told.get("failed") or told.get("completed") != sent:
        faults.append(f"{told.get('completed')} of {sent} requests were completed, {told.get('failed')} failed")
    try:
        window = Window(row["before"], row["after"])
        ended = window.delta(metrics.FINISHED)
        if ended != sent + WARMUPS:
            faults.append(f"the server ended {ended:g} requests, and {sent + WARMUPS} were sent: a foreign request")
        faults += [f"{word} before it: the engine was not idle" for word in busy(window.before)]
    except Missing as error:
        faults.append(str(error))
    return faults


def busy(scrape: Scrape) -> list[str]:
    counts = {"running": scrape.total(metrics.RUNNING), "waiting": scrape.total(metrics.WAITING)}
    return [f"{count:g} requests were {word}" for word, count in counts.items() if count]


def hits(row: Mapping[str, Any]) -> float:
    """Prompt tokens of a level that came from the prefix cache: not a fault of a load, but told."""
    return Window(row["before"], row["after"]).delta(metrics.HITS)


HEADS = ("at once", "requests", "tokens/s", "requests/s", "TTFT ms", "p99", "per token ms", "p99", "cached")


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """One level as text under `HEADS`."""
    told = row["told"]
    times = (told[key] for key in ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms"))
    rates = (f"{told['output_throughput']:,.0f}", f"{told['request_throughput']:.2f}")
    return (str(row["level"]), str(row["requests"]), *rates, *(f"{time:,.1f}" for time in times), f"{hits(row):g}")


def refusal(faults: Sequence[str], folder: Path, where: str) -> KitError | None:
    """The error (benchmark) of a load that proves nothing, or None."""
    return campaign.refusal(campaign.Outcome([], list(faults), folder), where)
