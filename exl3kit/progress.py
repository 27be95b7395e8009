"""Stages of a long verb: what runs, for how long, how much has moved; at the end seconds per stage.

A terminal gets moving lines, everything else plain ones: one when a stage starts, one when it ends, and a heartbeat
when a stage has said nothing for a while, so that a log never looks dead. Stages may run side by side in threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as LiveDisplay
    from rich.progress import TaskID

HEARTBEAT = 10.0  # seconds of silence after which a plain log says that a stage still runs


@dataclass
class Stage:
    """One running stage. `total` and `done` are bytes; `note` is what it does just now."""

    name: str
    total: int | None = None
    done: int = 0
    note: str = ""
    outcome: str = ""
    started: float = field(default_factory=time.monotonic)
    last_moved: float = 0.0
    last_said: float = field(default_factory=time.monotonic)

    def advance(self, count: int) -> None:
        """Count `count` bytes as moved."""
        self.done += count
        self.last_moved = time.monotonic()

    def say(self, note: str) -> None:
        """What the stage does just now: shown beside it, not kept."""
        self.note = note

    def conclude(self, outcome: str) -> None:
        """What came of it, kept in the stage's last line and in the summary."""
        self.outcome = outcome

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def moved(self) -> str:
        """Bytes and rate so far, such as `120 of 421 MB, 35 MB/s`; empty when the stage counts no bytes."""
        if not self.done:
            return ""
        of = f" of {megabytes(self.total)}" if self.total and self.total > self.done else ""
        moving = self.last_moved - self.started  # a stage may work on for long after the last byte
        rate = f", {megabytes(int(self.done / moving))}/s" if moving > 1 else ""
        return f"{megabytes(self.done)}{of}{rate}"


@dataclass(frozen=True)
class Timing:
    """A finished stage as the summary lists it; `depth` 1 is a step inside the stage before it."""

    name: str
    seconds: float
    outcome: str = ""
    depth: int = 0


def megabytes(count: int) -> str:
    """Bytes for people, decimal as disks and networks are sold: `12 MB`, `2.06 GB`."""
    if count >= 1_000_000_000:
        return f"{count / 1e9:.2f} GB"
    return f"{count / 1e6:.0f} MB" if count >= 1_000_000 else f"{count / 1e3:.0f} kB"


class Progress:
    """The reporter of one verb, used by every thread of it.

    Parameters
    ----------
    console: where people read; stderr when stdout carries JSON (`output.console(as_json=...)`).
    heartbeat: seconds of silence after which a plain log says that a stage still runs.
    """

    def __init__(self, console: Console, *, heartbeat: float = HEARTBEAT) -> None:
        self.console = console
        self.timings: list[Timing] = []
        self._heartbeat = heartbeat
        self._active: list[Stage] = []
        self._lock = threading.RLock()
        self._started = time.monotonic()
        self._live: LiveDisplay | None = None
        self._tasks: dict[int, TaskID] = {}
        self._watch: threading.Thread | None = None

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds per top-level stage, for `--json`; a stage that ran twice is summed."""
        sums: dict[str, float] = {}
        for timing in self.timings:
            if timing.depth == 0:
                sums[timing.name] = round(sums.get(timing.name, 0.0) + timing.seconds, 2)
        return sums

    @property
    def total_seconds(self) -> float:
        """Seconds since this reporter was made."""
        return time.monotonic() - self._started

    @contextmanager
    def stage(self, name: str, *, total: int | None = None) -> Iterator[Stage]:
        """Time one stage; it is reported as failed when the body raises."""
        stage = Stage(name, total)
        self._begin(stage)
        try:
            yield stage
        except BaseException:
            self._end(stage, failed=True)
            raise
        self._end(stage, failed=False)

    def step(self, name: str, seconds: float, outcome: str = "") -> None:
        """Report a finished step inside a running stage, such as one instruction of a build."""
        self._record(Timing(name, seconds, outcome, depth=1))
        self._print("[dim]    ", name, f" {seconds:.1f} s", f" ({outcome})" if outcome else "")

    def skip(self, name: str, why: str) -> None:
        """Report a stage that had nothing to do."""
        self._record(Timing(name, 0.0, why))
        self._print("[dim]=[/] ", f"{name}: {why}")

    def tell(self, text: str) -> None:
        """One plain line between the stages."""
        self._print("  ", text)

    def summary(self) -> None:
        """Seconds per stage, names aligned, the wall clock last."""
        timings = [*self.timings, Timing("wall clock", self.total_seconds)]
        width = max(len(timing.name) + 2 * timing.depth for timing in timings)
        for timing in timings:
            name = "  " * timing.depth + timing.name
            self._print("", f"{name:<{width}} {timing.seconds:>7.1f} s  {timing.outcome}".rstrip())

    # -- display ------------------------------------------------------------------------------------------------------

    def _begin(self, stage: Stage) -> None:
        with self._lock:
            self._active.append(stage)
            if self.console.is_terminal:
                self._show(stage)
            else:
                self._print("[dim]>[/] ", stage.name)
            if self._watch is None:
                self._watch = threading.Thread(target=self._watch_stages, name="progress", daemon=True)
                self._watch.start()

    def _end(self, stage: Stage, *, failed: bool) -> None:
        with self._lock:
            self._active.remove(stage)
            if self._live is not None:
                self._live.remove_task(self._tasks.pop(id(stage)))
                if not self._active:
                    self._live.stop()
                    self._live = None
            said = ", ".join(part for part in (stage.outcome, stage.moved()) if part)
            self._record(Timing(stage.name, stage.seconds, "failed" if failed else said))
            mark = "[red]x[/] " if failed else "[green]+[/] "
            self._print(mark, f"{stage.name} {stage.seconds:.1f} s", f" ({said})" if said else "")

    def _show(self, stage: Stage) -> None:
        from rich.progress import Progress as LiveDisplay
        from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

        if self._live is None:
            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
                TextColumn("{task.fields[said]}"),
            )
            self._live = LiveDisplay(*columns, console=self.console, transient=True)
            self._live.start()
        self._tasks[id(stage)] = self._live.add_task(stage.name, total=None, said="")

    def _watch_stages(self) -> None:
        while True:
            time.sleep(0.2 if self._live is not None else min(1.0, self._heartbeat / 4))
            with self._lock:
                if not self._active:
                    self._watch = None
                    return
                for stage in self._active:
                    self._refresh(stage)

    def _refresh(self, stage: Stage) -> None:
        said = ", ".join(part for part in (stage.moved(), stage.note) if part)
        if self._live is not None:
            self._live.update(self._tasks[id(stage)], said=said[:100])
        elif time.monotonic() - stage.last_said >= self._heartbeat:
            stage.last_said = time.monotonic()
            self._print("[dim].[/] ", f"{stage.name} {stage.seconds:.0f} s", f": {said}" if said else "")

    def _record(self, timing: Timing) -> None:
        with self._lock:
            self.timings.append(timing)

    def _print(self, mark: str, *parts: str) -> None:
        from rich.markup import escape

        self.console.print(mark + "".join(escape(part) for part in parts), emoji=False)
