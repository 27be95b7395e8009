"""Stages of a long verb: what runs, for how long, how much has moved; at the end seconds per stage, now and last time.

A terminal gets a live view of what runs (`exl3kit.progress_view`), everything else plain lines: one when a stage
starts, one when it ends, and a heartbeat when a stage has said nothing for a while, so that a log never looks dead.
Stages may run side by side in threads. Whatever is shown also goes to the run's log, and every note of a stage.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from exl3kit import timings
from exl3kit.timings import Times

if TYPE_CHECKING:
    from rich.console import Console

    from exl3kit.progress_view import View

log = logging.getLogger(__name__)

HEARTBEAT = 20.0  # seconds of silence after which a plain log says that a stage still runs
WINDOW = 20.0  # seconds over which the rate of a running stage is taken: a slow start is soon forgotten
WORTH_TELLING = 5.0  # seconds that a stage took last time, for these to be an outlook
LEAST_RATE = 2.0  # seconds that bytes must have moved before a rate means anything


@dataclass
class Stage:
    """One running stage. `total` and `done` are bytes; `note` is what it does just now; `last` seconds last time."""

    name: str
    total: int | None = None
    last: float | None = None
    done: int = 0
    note: str = ""
    outcome: str = ""
    started: float = field(default_factory=time.monotonic)
    last_moved: float = 0.0
    last_said: float = field(default_factory=time.monotonic)
    _points: deque[tuple[float, int]] = field(default_factory=deque)

    def advance(self, count: int) -> None:
        """Count `count` bytes as moved."""
        self.done += count
        self.last_moved = now = time.monotonic()
        if not self._points or now - self._points[-1][0] > 0.2:
            self._points.append((now, self.done))
            while now - self._points[0][0] > WINDOW and len(self._points) > 2:
                self._points.popleft()

    def restart(self, total: int) -> None:
        """Count from nothing again: what was moved has to be moved once more."""
        self.total, self.done = total, 0
        self._points.clear()

    def say(self, note: str) -> None:
        """What the stage does just now: shown beside it, and kept in the run's log alone."""
        if note != self.note:
            log.debug("  %s: %s", self.name, note)
        self.note = note

    def conclude(self, outcome: str) -> None:
        """What came of it, kept in the stage's last line and in the summary."""
        self.outcome = outcome

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    @property
    def rate(self) -> float | None:
        """Bytes per second of late, or None while there is nothing to say, and when the last byte has moved."""
        if self.total and self.done >= self.total:
            return None
        points = list(self._points)
        now = time.monotonic()
        if not points or now - self.started < LEAST_RATE or now - points[0][0] < LEAST_RATE:
            return None
        return (self.done - points[0][1]) / (now - points[0][0])

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the last byte at the rate of late, or None when that is not known."""
        rate = self.rate
        if not self.total or not rate:
            return None
        return (self.total - self.done) / rate

    def amount(self) -> str:
        """Bytes so far, such as `120 MB of 421 MB`; empty when the stage counts none."""
        if not self.done:
            return ""
        return megabytes(self.done) + (f" of {megabytes(self.total)}" if self.total and self.total > self.done else "")

    def moved(self) -> str:
        """Bytes, and their rate on average, such as `421 MB, 35 MB/s`; empty when the stage counts none."""
        moving = self.last_moved - self.started  # a stage may work on for long after the last byte
        rate = f", {megabytes(int(self.done / moving))}/s" if self.done and moving > 1 else ""
        return self.amount() + rate

    def standing(self) -> str:
        """How it stands, for a plain line: bytes, rate of late, time left, and what it does."""
        rate, left = self.rate, self.seconds_left
        parts = [self.amount(), f"{megabytes(int(rate))}/s" if rate else "", f"ETA {clock(left)}" if left else ""]
        if self.last and left is None:
            parts.append(f"last time {clock(self.last)}")
        return ", ".join(part for part in (*parts, self.note) if part)


@dataclass(frozen=True)
class Timing:
    """A finished stage as the summary lists it; `depth` 1 is a step inside the stage before it.

    `part`: of the run, where its stages come once for each part; the summary says it above them.
    """

    name: str
    seconds: float
    outcome: str = ""
    depth: int = 0
    part: str = ""


def megabytes(count: int) -> str:
    """Bytes for people, decimal as disks and networks are sold: `12 MB`, `2.06 GB`."""
    if count >= 1_000_000_000:
        return f"{count / 1e9:.2f} GB"
    return f"{count / 1e6:.0f} MB" if count >= 1_000_000 else f"{count / 1e3:.0f} kB"


def clock(seconds: float) -> str:
    """Seconds for people: `7 s`, `2:05`, `1:02:05`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return (
        f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"
        if whole >= 3600
        else f"{whole // 60}:{whole % 60:02d}"
    )


class Progress:
    """The reporter of one verb, used by every thread of it.

    Parameters
    ----------
    console: where people read; stderr when stdout carries JSON (`output.console(as_json=...)`).
    heartbeat: seconds of silence after which a plain log says that a stage still runs.
    run: what the seconds are compared with, and kept for; nothing when left out.
    """

    def __init__(self, console: Console, *, heartbeat: float = HEARTBEAT, run: timings.Run | None = None) -> None:
        self.console = console
        self.timings: list[Timing] = []
        self.last = timings.recall(run) if run is not None else Times()
        self.active: list[Stage] = []
        self._run = run
        self._heartbeat = heartbeat
        self._part = ""
        self._lock = threading.RLock()
        self._started = time.monotonic()
        self._view: View | None = None
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
        with self._lock:
            before = [row.name for row in self.timings if row.depth == 0] + [one.name for one in self.active]
        last = self.last.stages.get(turn_of(name, before.count(name)), 0.0)
        stage = Stage(name, total, last if last >= WORTH_TELLING else None)
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

    def begin_part(self, name: str) -> None:
        """Say that what follows, until the next part, is of this one; the summary says so above its stages."""
        self._part = name
        self.tell(name)

    def summary(self) -> None:
        """Seconds per stage and of the last such run, the wall clock last; keeps them for the next one.

        Nothing is printed where at most one stage ran: its own line says it all.
        """
        total = self.total_seconds
        if len(self.timings) > 1:
            for line in self._table([*self.timings, Timing("wall clock", total)]):
                self._print("", line)
        if self._run is not None:
            turns = {turn: round(row.seconds, 2) for turn, row in _turns(self.timings) if turn}
            timings.remember(self._run, Times(turns, round(total, 2)))

    def _table(self, rows: list[Timing]) -> Iterator[str]:
        """The summary's lines: names aligned and, on a narrow terminal, cut, and there without what came of each."""
        last = {**self.last.stages, "wall clock": self.last.wall}
        figures = 10 + (15 if self.last.wall is not None else 0)
        width = max(len(row.name) + 2 * row.depth for row in rows)
        room = self.console.width - figures if self.console.is_terminal else width
        part = ""
        for turn, row in _turns(rows):
            if row.part and row.part != part:
                yield f"{row.part}:"
            part = row.part
            name = "  " * row.depth + row.name
            if len(name) > room:
                name = f"{name[: max(room - 3, 8)]}..."
            before = last.get(turn)
            compared = f" {f'(last {before:.1f} s)':<14}" if before is not None else " " * (figures - 10)
            outcome = row.outcome if room >= width + 10 or not self.console.is_terminal else ""
            yield f"{name:<{min(width, max(room, 11))}} {row.seconds:>7.1f} s{compared}  {outcome}".rstrip()

    # -- display ------------------------------------------------------------------------------------------------------

    def _begin(self, stage: Stage) -> None:
        with self._lock:
            self.active.append(stage)
            log.info("> %s", stage.name)
            if is_live(self.console):
                self._show()
                return
            self._line("[dim]>[/] ", stage.name)
            if self._watch is None:
                self._watch = threading.Thread(target=self._watch_stages, name="progress", daemon=True)
                self._watch.start()

    def _show(self) -> None:
        from exl3kit.progress_view import View

        if self._view is None:
            self._view = View(self)
            self._view.start()

    def _end(self, stage: Stage, *, failed: bool) -> None:
        with self._lock:
            self.active.remove(stage)
            if self._view is not None and not self.active:
                self._view.stop()
                self._view = None
            said = ", ".join(part for part in (stage.outcome, stage.moved()) if part)
            self._record(Timing(stage.name, stage.seconds, "failed" if failed else said))
            mark = "[red]x[/] " if failed else "[green]+[/] "
            self._print(mark, f"{stage.name} {stage.seconds:.1f} s", f" ({said})" if said else "")

    def _watch_stages(self) -> None:
        """The heartbeats of a plain log."""
        while True:
            time.sleep(min(1.0, self._heartbeat / 4))
            with self._lock:
                if not self.active:
                    self._watch = None
                    return
                for stage in self.active:
                    if time.monotonic() - stage.last_said >= self._heartbeat:
                        stage.last_said = time.monotonic()
                        said = stage.standing()
                        self._print("[dim].[/] ", f"{stage.name} {stage.seconds:.0f} s", f": {said}" if said else "")

    def _record(self, timing: Timing) -> None:
        with self._lock:
            self.timings.append(replace(timing, part=self._part))

    def _print(self, mark: str, *parts: str) -> None:
        from rich.text import Text

        log.info("%s", Text.from_markup(mark).plain + "".join(parts))
        self._line(mark, *parts)

    def _line(self, mark: str, *parts: str) -> None:
        from rich.markup import escape

        self.console.print(mark + "".join(escape(part) for part in parts), emoji=False)


def turn_of(name: str, before: int) -> str:
    """What a stage is called among the times of a run in which `before` others of its name came first."""
    return f"{name} ({before + 1})" if before else name


def _turns(rows: Sequence[Timing]) -> Iterator[tuple[str, Timing]]:
    """Each row with what it is called among the times of a run; nothing for a step, which is not compared."""
    seen: Counter[str] = Counter()
    for row in rows:
        yield turn_of(row.name, seen[row.name]) if row.depth == 0 else "", row
        seen[row.name] += row.depth == 0


def is_live(console: Console) -> bool:
    """Whether lines can be renewed in place there: on a terminal with a cursor, not in a pipe with colours."""
    return console.is_interactive and not console.is_dumb_terminal and console.file.isatty()
