"""What is wrong with a recipe and where: faults with file, line and column, and the one error that carries them all."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from exl3kit.errors import KitError

Key = str | int

MOST_FAULTS = 50


@dataclass(frozen=True, order=True)
class Place:
    """Where a value was written: a file (line and column count from 1), or an argument such as `--set` (line 0)."""

    source: str
    line: int
    column: int

    def __str__(self) -> str:
        source = printable(self.source)
        return f"{source}:{self.line}:{self.column}" if self.line else f"{source} (column {self.column})"


@dataclass(frozen=True)
class Fault:
    """One thing wrong with the data: the keys that lead to it, a sentence, and how to put it right."""

    path: tuple[Key, ...]
    what: str
    hint: str | None = None


@dataclass(frozen=True)
class LocatedFault:
    """A fault and the place that an editor can jump to."""

    place: Place
    what: str
    hint: str | None = None

    def __post_init__(self) -> None:
        # Words of the file stand in the sentence, and a terminal must not obey what they may hold.
        object.__setattr__(self, "what", printable(self.what))
        object.__setattr__(self, "hint", printable(self.hint) if self.hint else None)

    def __str__(self) -> str:
        return f"{self.place}: {self.what}" + (f" ({self.hint})" if self.hint else "")

    def as_json(self) -> dict[str, object]:
        fields = {
            "where": str(self.place),
            "file": self.place.source,
            "line": self.place.line or None,
            "column": self.place.column,
            "what": self.what,
            "next": self.hint,
        }
        return {name: value for name, value in fields.items() if value is not None}


class RecipeError(KitError):
    """A recipe that is refused, with the faults that were found in it, sorted by place.

    `faults` holds the first `MOST_FAULTS` of `count`: a model file given by mistake has tens of thousands.
    """

    def __init__(self, faults: Sequence[LocatedFault]) -> None:
        found = sorted(set(faults), key=lambda fault: (fault.place, fault.what))
        self.count, self.faults = len(found), found[:MOST_FAULTS]
        first = found[0]
        super().__init__(first.what, where=str(first.place), next_step=first.hint)

    def lines(self) -> list[str]:
        """One line per fault, and one that counts those left out."""
        left_out = self.count - len(self.faults)
        return [*map(str, self.faults), *([f"… and {left_out} more"] if left_out else [])]

    def __str__(self) -> str:
        lines = self.lines()
        return lines[0] if self.count == 1 else "\n  ".join([f"{self.count} faults in the recipe", *lines])

    def as_json(self) -> dict[str, object]:
        return {**super().as_json(), "count": self.count, "faults": [fault.as_json() for fault in self.faults]}


def printable(text: str, most: int = 600) -> str:
    """The text on one line of at most `most` characters, anything that a terminal would not show as an escape."""
    shown = text if text.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in text)
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """The known word closest to `word`, or None when none is near."""
    folded = {candidate.casefold(): candidate for candidate in known}
    near = difflib.get_close_matches(word.casefold(), folded, n=1, cutoff=0.6)
    return folded[near[0]] if near else None
