"""A campaign's receipts: one JSONL file, a record a line, written as it goes; nothing in it is a conclusion that could
not be drawn again from the observations in it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exl3kit import __version__
from exl3kit.errors import ExitCode, KitError

SCHEMA = 1
FILE = "campaign.jsonl"
PLURAL = {
    "boot": "boots",
    "observation": "observations",
    "position": "positions",
    "level": "levels",
    "result": "results",
}


@dataclass
class Recorder:
    """Writes a campaign's file; `folder` is made, and must not hold a campaign already."""

    folder: Path

    def __post_init__(self) -> None:
        path = self.folder / FILE
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = path.open("x", encoding="utf-8")
        except OSError as error:
            why = error.strerror or "it cannot be written"
            raise KitError("the receipts cannot be written", where=str(path), why=why,
                           next_step="name another folder with --out") from error  # fmt: skip

    def write(self, record: str, fields: Mapping[str, Any]) -> None:
        """Append one record; it is on its way to the disk before the next observation begins."""
        self._file.write(json.dumps({"record": record, **fields}, sort_keys=True) + "\n")
        self._file.flush()

    def begin(self, verb: str, settings: Mapping[str, Any]) -> None:
        """The first record: what is measured, by which kit, when."""
        self.write("campaign", {"schema": SCHEMA, "verb": verb, "kit": __version__, "at": time.time(), **settings})

    def close(self) -> None:
        self._file.close()


@dataclass
class Campaign:
    """A campaign as read back. `boots` are in their order; observations name theirs by number."""

    folder: Path
    head: dict[str, Any] = field(default_factory=dict)
    boots: list[dict[str, Any]] = field(default_factory=list)
    observations: list[dict[str, Any]] = field(default_factory=list)
    positions: list[dict[str, Any]] = field(default_factory=list)  # of a parity run
    levels: list[dict[str, Any]] = field(default_factory=list)  # of a load
    results: list[dict[str, Any]] = field(default_factory=list)

    @property
    def verb(self) -> str:
        return str(self.head.get("verb", ""))

    @property
    def result(self) -> dict[str, Any]:
        """The last result written: the campaign's own reading of its observations."""
        return self.results[-1] if self.results else {}

    def of_boot(self, number: int) -> list[dict[str, Any]]:
        return [one for one in self.observations if one.get("boot") == number]


def read(folder: Path) -> Campaign:
    """A campaign's file; raises `KitError` (benchmark) for one that is absent, torn or of another schema."""
    path = folder / FILE if folder.is_dir() else folder
    campaign = Campaign(path.parent)
    for number, record in _lines(path):
        kind = record.pop("record", None)
        if kind == "campaign":
            campaign.head = record
        elif kind in PLURAL:
            getattr(campaign, PLURAL[kind]).append(record)
        else:
            raise _unreadable(path, f"line {number} is of no known kind ({kind!r})")
    if campaign.head.get("schema") != SCHEMA:
        raise _unreadable(path, f"its schema is {campaign.head.get('schema')!r}, and this kit reads {SCHEMA}")
    return campaign


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise _unreadable(path, str(error)) from error
    for number, line in enumerate(text.splitlines(), 1):
        try:
            yield number, dict(json.loads(line))
        except (ValueError, TypeError) as error:
            raise _unreadable(path, f"line {number}: {error}") from error


def _unreadable(path: Path, why: str) -> KitError:
    return KitError("these are no receipts of a campaign", where=str(path), why=why, code=ExitCode.BENCHMARK)
