"""A campaign on a server that runs: a plan observed, every observation recorded, and what they say."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exl3kit.bench import plans, summaries
from exl3kit.bench.records import Recorder
from exl3kit.errors import ExitCode, KitError

if TYPE_CHECKING:
    from exl3kit.bench.plans import Step
    from exl3kit.bench.summaries import Row
    from exl3kit.bench.targets import Target
    from exl3kit.progress import Progress

TEXT = Path(__file__).with_name("declaration.txt")  # of 1776: nobody's copyright, and never to change


@dataclass(frozen=True)
class Outcome:
    """What a campaign found: a row per rung, and why it proves nothing (empty when it does)."""

    rows: list[Row]
    faults: list[str]
    folder: Path
    extra: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        told = {"rows": [row.as_json() for row in self.rows], "faults": self.faults, "valid": not self.faults}
        return {**told, **self.extra, "receipts": str(self.folder)}


def salt() -> str:
    """A beginning that no prompt before it had: every campaign's prompts are new to every cache."""
    return secrets.token_hex(6)


def observe(
    target: Target,
    steps: Sequence[Step],
    recorder: Recorder,
    progress: Progress,
    boot: int = 0,
    name: str = "observe",
) -> list[dict[str, Any]]:
    """Carry a plan out, one step after the other; every observation is on disk before the next begins."""
    job = {"do": "observe", "model": target.model, "text": text(), "steps": list(steps)}
    seen = []
    with progress.stage(name) as stage:
        for number, one in enumerate(target.place.run(job), 1):
            seen.append({**one, "boot": boot})
            recorder.write("observation", seen[-1])
            stage.say(f"{number} of {len(steps)}")
        stage.conclude(f"{len(seen)} observations")
    if len(seen) != len(steps):
        raise KitError(f"{len(seen)} of {len(steps)} observations came", where=target.place.name,
                       why="the observer ended early", code=ExitCode.BENCHMARK)  # fmt: skip
    return seen


def text() -> str:
    return TEXT.read_text(encoding="utf-8")


def run(target: Target, steps: Sequence[Step], recorder: Recorder, progress: Progress, *, max_cv: float) -> Outcome:
    """One boot's campaign: its observations, and what they are worth."""
    with target.boot(0, "A") as boot:
        pairs = summaries.judged(observe(target, steps, recorder, progress))
    recorder.write("boot", boot)
    outcome = Outcome(summaries.rows(pairs), summaries.faults(pairs, max_cv=max_cv), recorder.folder)
    recorder.write("result", outcome.as_json())
    return outcome


def prefill(target: Target, rungs: Sequence[int], count: int, least: int) -> list[Step]:
    return plans.prefill(plans.ladder(target.max_model_len, rungs), count, salt(), least)


def decode(target: Target, count: int, tokens: int, streams: Sequence[int], least: int) -> list[Step]:
    """One answer at a time, then several at once; ends with a planted hit, as every campaign."""
    length, key = target.max_model_len, salt()
    steps = plans.decode(length, count, key, tokens, least)
    steps += plans.streams(length, target.max_num_seqs, key, streams, least)
    return steps + plans.hit(length, key)


def refusal(outcome: Outcome, where: str) -> KitError | None:
    """The error (benchmark) of a campaign that proves nothing, or None."""
    if not outcome.faults:
        return None
    return KitError(
        outcome.faults[0] + (f", and {len(outcome.faults) - 1} more" if len(outcome.faults) > 1 else ""),
        where=where,
        why="a figure that the gate does not let count is no figure",
        next_step=f"`kit bench report {outcome.folder}` shows every observation",
        code=ExitCode.BENCHMARK,
    )
