"""The live view of running stages on a terminal: a line each, with bytes, rate, time left and time spent."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from exl3kit.progress import clock, megabytes

if TYPE_CHECKING:
    from rich.console import RenderableType

    from exl3kit.progress import Progress, Stage

WIDE, MEDIUM = 100, 60  # columns from which there is room for a bar and a note, and for bytes and a rate
BAR = 20  # columns of it; it and the spinner are ASCII, which every terminal and locale shows
SPINNER = "|/-\\"


class View:
    """What runs, renewed four times a second until it is stopped."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._live = Live(
            get_renderable=self.render, console=progress.console, transient=True, refresh_per_second=4,
            vertical_overflow="crop",
        )  # fmt: skip

    def start(self) -> None:
        """Begin to draw."""
        self._live.start()

    def stop(self) -> None:
        """Take it off the screen."""
        self._live.stop()

    def render(self) -> RenderableType:
        """The view as it stands, for the terminal's width."""
        progress = self._progress
        width = progress.console.width
        table = Table.grid(padding=(0, 1), expand=False)
        for stage in list(progress.active):
            table.add_row(*cells(stage, width))
        total = f"total {clock(progress.total_seconds)}"
        if progress.last.wall is not None:
            total += f", last time {clock(progress.last.wall)}"
        if len(progress.active) > 1 or progress.timings:
            rest = max(len(table.columns) - 2, 0)
            table.add_row("", Text(total, style="dim", no_wrap=True), *[""] * rest)
        return table


def cells(stage: Stage, width: int) -> list[RenderableType]:
    """The cells of a stage's line: fewer where there is little room."""
    spinner = SPINNER[int(time.monotonic() * 4) % len(SPINNER)]
    name = escape(stage.name) if width >= MEDIUM else escape(stage.name[: max(width - 14, 8)])
    spent = clock(stage.seconds)
    if width < MEDIUM:
        percent = f" {100 * stage.done // stage.total}%" if stage.total and stage.done <= stage.total else ""
        return [spinner, name, spent + percent]
    rate, left = stage.rate, stage.seconds_left
    figures = [stage.amount(), f"{megabytes(int(rate))}/s" if rate else "", f"ETA {clock(left)}" if left else ""]
    if left is None and stage.last:
        figures.append(f"last {clock(stage.last)}")
    told = Text("  ".join(part for part in figures if part), no_wrap=True, overflow="ellipsis")
    if width < WIDE:
        return [spinner, name, Text(spent, no_wrap=True), told]
    bar = ""
    if stage.total:
        full = min(BAR * stage.done // stage.total, BAR)
        bar = f"{'#' * full}{'.' * (BAR - full)}"
    return [
        spinner,
        name,
        Text(spent, no_wrap=True),
        Text(bar),
        told,
        Text(stage.note, no_wrap=True, overflow="ellipsis"),
    ]
