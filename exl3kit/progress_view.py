"""The live view of running stages on a terminal: a line each, with bytes, rate, time left and time spent."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.live import Live
from rich.table import Table
from rich.text import Text

from exl3kit.progress import clock, megabytes

if TYPE_CHECKING:
    from rich.console import RenderableType

    from exl3kit.progress import Progress, Stage

WIDE, MEDIUM = 100, 60  # columns from which there is room for a bar and a rate (beyond it for a note), and for bytes
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
            table.add_row("", cut(total, width - 3), *[""] * rest, style="dim")
        return table


def cells(stage: Stage, width: int) -> list[RenderableType]:
    """The cells of a stage's line: fewer where there is less room."""
    spinner = SPINNER[int(time.monotonic() * 4) % len(SPINNER)]
    spent = clock(stage.seconds)
    if width < MEDIUM:
        percent = f" {100 * stage.done // stage.total}%" if stage.total and stage.done <= stage.total else ""
        return [spinner, cut(stage.name, width - 14), cut(spent + percent, 10)]
    rate, left = stage.rate, stage.seconds_left
    figures = [stage.amount(), f"ETA {clock(left)}" if left else f"last {clock(stage.last)}" if stage.last else ""]
    if width < WIDE:
        return [spinner, cut(stage.name, min(width - 46, 30)), spent, Text("  ".join(filter(None, figures)))]
    figures.insert(1, f"{megabytes(int(rate))}/s" if rate else "")
    full = min(BAR * stage.done // stage.total, BAR) if stage.total else 0
    bar = Text(f"{'#' * full}{'.' * (BAR - full)}" if stage.total else "")
    told = Text("  ".join(filter(None, figures)))
    return [spinner, cut(stage.name, 24), spent, bar, told, cut(stage.note, width - WIDE)]


def cut(text: str, most: int) -> Text:
    """The text in at most `most` columns, in ASCII where it is cut."""
    if len(text) > most:
        text = f"{text[: max(most - 3, 0)]}..."[: max(most, 0)]
    return Text(text, no_wrap=True)
