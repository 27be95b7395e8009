"""Tables that never cut what they hold: as wide as they must be in a pipe, one value a line on a narrow screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult

ANY_WIDTH = 100_000


class Sheet:
    """A table to be printed by rich; texts are shown as they are, without markup.

    Parameters
    ----------
    columns: their heads; those in `right` stand flush right.
    """

    def __init__(self, *columns: str, right: tuple[str, ...] = ()) -> None:
        self._columns = columns
        self._right = right
        self._rows: list[list[Text]] = []

    def add_row(self, *cells: str | Text) -> None:
        """Add a row with as many cells as there are columns, or fewer."""
        self._rows.append([cell if isinstance(cell, Text) else Text(cell) for cell in cells])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = self._table()
        widest = options.update(max_width=ANY_WIDTH)
        needed = Measurement.get(console, widest, table)
        if not console.is_terminal:
            yield from console.render(table, options.update(width=needed.maximum))
        elif needed.minimum <= options.max_width:
            yield table
        else:
            yield self._stacked()

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for column in self._columns:
            justify: JustifyMethod = "right" if column in self._right else "left"
            table.add_column(Text(column), justify=justify)
        for row in self._rows:
            table.add_row(*row)
        return table

    def _stacked(self) -> Table:
        """Each row as a head, its first cell, and a line for every other one."""
        grid = Table.grid(padding=(0, 1))
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        for row in self._rows:
            grid.add_row(Text(self._columns[0]), row[0], style="bold")
            for column, cell in zip(self._columns[1:], row[1:], strict=False):
                grid.add_row(Text(f"  {column}", style="dim"), cell)
        return grid
