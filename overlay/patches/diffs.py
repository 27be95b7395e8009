"""Unified diffs, applied with zero fuzz: every line of a hunk must be there, at one place of the function it names."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_HEADER = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class DiffError(Exception):
    """A diff that is malformed or does not fit; one sentence."""


@dataclass
class Hunk:
    """Lines to find and lines to put in their place, without line ends; `line` is where the diff was made, from 1."""

    line: int
    old: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)


@dataclass
class FileDiff:
    """The hunks of one file, named by its path below site-packages."""

    path: str
    hunks: list[Hunk] = field(default_factory=list)


def parse(text: str) -> list[FileDiff]:
    """Read a unified diff.

    Raises
    ------
    DiffError: a line that belongs to no hunk, or a hunk whose header counts other lines than it has.
    """
    files: list[FileDiff] = []
    counted: tuple[int, int] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        match = _HEADER.match(line)
        if line.startswith("--- "):
            _close(files, counted)
            counted = None
            files.append(FileDiff(line[4:].split("\t")[0].removeprefix("a/")))
        elif line.startswith("+++ ") and counted is None:
            continue
        elif match and files:
            _close(files, counted)
            counted = (int(match[2] or 1), int(match[4] or 1))
            files[-1].hunks.append(Hunk(int(match[1])))
        elif counted is not None and line[:1] in (" ", "-", "+", ""):
            hunk = files[-1].hunks[-1]
            if line[:1] != "+":
                hunk.old.append(line[1:])
            if line[:1] != "-":
                hunk.new.append(line[1:])
        elif line:
            raise DiffError(f"line {number} belongs to no hunk: {line[:60]}")
    _close(files, counted)
    if not any(file.hunks for file in files):
        raise DiffError("holds no hunk")
    return files


def _close(files: list[FileDiff], counted: tuple[int, int] | None) -> None:
    if counted is None:
        return
    hunk = files[-1].hunks[-1]
    if (len(hunk.old), len(hunk.new)) != counted:
        found = f"{len(hunk.old)} old and {len(hunk.new)} new lines"
        raise DiffError(f"the hunk at line {hunk.line} of {files[-1].path} has {found}, its header says {counted}")


def place(lines: list[str], hunk: Hunk, begin: int, end: int) -> int:
    """The index in `lines` where the hunk fits, searched in lines[begin:end].

    Raises
    ------
    DiffError: it fits nowhere there, or at more than one place.
    """
    size = len(hunk.old)
    places = [at for at in range(begin, end - size + 1) if lines[at : at + size] == hunk.old]
    if len(places) != 1:
        raise DiffError(f"the hunk made at line {hunk.line} fits at {len(places) or 'no'} place(s) of its function")
    return places[0]
