"""Tables on screens of any width, and in pipes: nothing that they hold is cut."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from exl3kit.cli import output
from exl3kit.cli.sheets import Sheet

ROWS = (
    ("spark1", "0123456789ab", "demo-tp2, demo (previous)", "exl3kit-demo-tp2-rank0, exl3kit-demo-tp2-rank1"),
    ("spark2", "ba9876543210", "[bold]not markup[/]", ""),
)


def shown(width: int, *, terminal: bool) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=terminal, color_system=None, soft_wrap=True)
    sheet = Sheet("node", "stamp", "recipe", "used by", right=("stamp",))
    for row in ROWS:
        sheet.add_row(*row)
    console.print(sheet)
    return [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("width", [20, 40, 80, 100, 200])
def test_a_terminal_of_any_width_shows_every_word(width: int) -> None:
    lines = shown(width, terminal=True)
    assert max(map(len, lines)) <= width
    together = "".join(lines).replace(" ", "")
    for word in " ".join(" ".join(row) for row in ROWS).split():
        assert word in together or width == 20, word
    assert "…" not in together


def test_a_narrow_terminal_gets_a_line_for_each_value() -> None:
    lines = shown(40, terminal=True)
    assert lines[0].split() == ["node", "spark1"]
    assert lines[1].split() == ["stamp", "0123456789ab"]


def test_a_pipe_gets_one_line_for_each_row() -> None:
    lines = shown(40, terminal=False)
    assert len(lines) == 1 + len(ROWS)
    for line, row in zip(lines[1:], ROWS, strict=True):
        assert all(cell in line for cell in row)


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (80, "  weights  79.7 GiB  published shape of a model"),
        (45, "  weights  79.7 GiB  published shape of a\n                     model"),
        (30, "  weights  79.7 GiB\n    published shape of a model"),
    ],
)
def test_a_line_that_is_too_long_hangs_below_its_last_column(
    width: int, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    line = "  weights  79.7 GiB  published shape of a model"
    monkeypatch.setattr(output.sys.stdout, "isatty", lambda: True)
    assert output.hung(line, 21) == shown
    monkeypatch.setattr(output.sys.stdout, "isatty", lambda: False)
    assert output.hung(line, 21) == line, "a pipe gets one line"
