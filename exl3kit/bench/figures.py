"""`kit bench figures`: figures in documents are drawn from receipts, and a document that says otherwise fails.

A block in a Markdown file names its receipts, and what lies between its marks is written by the kit:

    <!-- figures: docs/receipts/NAME -->
    ...
    <!-- end of figures -->
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from exl3kit import paths
from exl3kit.bench import records, report
from exl3kit.errors import ExitCode, KitError
from exl3kit.words import counted

BLOCK = re.compile(r"(<!-- figures: (?P<folder>\S+) -->\n)(?P<body>.*?)(<!-- end of figures -->)", re.DOTALL)


@dataclass(frozen=True)
class Stale:
    """A block that does not say what its receipts say."""

    file: Path
    line: int
    folder: str


def documents() -> list[Path]:
    """Every Markdown file that may hold figures."""
    return [paths.REPO / "README.md", *sorted((paths.REPO / "docs").glob("*.md"))]


def drawn(folder: Path) -> str:
    """What a block must say: verdict, then the tables of the report, as Markdown.

    Raises `KitError` (benchmark) for receipts that prove nothing: no document may quote them.
    """
    campaign = records.read(folder)
    view = report.look(campaign)
    if not view.valid:
        raise KitError("these receipts prove nothing, so no document may quote them", where=str(folder),
                       why=view.lines[0] if view.lines else None, code=ExitCode.BENCHMARK)  # fmt: skip
    lines = [f"{view.title}, {report.day(campaign)}: **{view.verdict}**.", ""]
    lines += [line[0].upper() + line[1:] + "." for line in view.lines] + ([""] if view.lines else [])
    for table in view.tables:
        if any(table["heads"]):
            lines += [*markdown(table["heads"], table["rows"]), ""]
    return "\n".join(lines)


def markdown(heads: Sequence[object], rows: Iterable[Sequence[object]]) -> list[str]:
    """A table of one row per line."""
    rule = ["---", *["---:"] * (len(heads) - 1)]
    return [f"| {' | '.join(map(str, cells))} |" for cells in (heads, rule, *rows)]


def stale(files: Iterable[Path]) -> Iterator[Stale]:
    """Blocks that differ from their receipts, by file and line."""
    for file in files:
        text = file.read_text(encoding="utf-8")
        for block in BLOCK.finditer(text):
            if block["body"] != drawn(paths.REPO / block["folder"]):
                yield Stale(file, text.count("\n", 0, block.start()) + 1, block["folder"])


def write(files: Iterable[Path]) -> list[Path]:
    """Draw every block anew; gives the files that changed."""
    changed = []
    for file in files:
        text = file.read_text(encoding="utf-8")
        new = BLOCK.sub(lambda block: block[1] + drawn(paths.REPO / block["folder"]) + block[4], text)
        if new != text:
            file.write_text(new, encoding="utf-8")
            changed.append(file)
    return changed


def refusal(found: Sequence[Stale]) -> KitError | None:
    """The error (benchmark) of documents that say what no receipt says, or None."""
    if not found:
        return None
    first = found[0]
    return KitError(
        f"not what its receipts say: {counted(len(found), 'block')} of figures",
        where=f"{paths.shown(first.file)}:{first.line}",
        why=f"drawn from {first.folder} they read otherwise",
        next_step="`kit bench figures --write`, and look at what changed",
        code=ExitCode.BENCHMARK,
    )
