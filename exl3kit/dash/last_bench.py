"""The last campaign of `kit bench` on this machine, read again only when its file has changed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from exl3kit.bench import records, report
from exl3kit.bench.records import Campaign


class LastBench:
    """Looks for the newest campaign below `folder` (`kit bench` writes to `bench/TIME-VERB`), of `recipe` or of any."""

    def __init__(self, folder: Path, recipe: str | None) -> None:
        self._folder, self._recipe = folder, recipe
        self._seen: dict[Path, tuple[tuple[int, int], dict[str, Any]]] = {}

    def __call__(self) -> dict[str, Any] | None:
        """What the newest says: `title`, `when`, `folder`, `verdict`, `valid`, `lines` and its first `table`.

        `verdict` is None for one that has no result (yet), and for one that cannot be read. None: there is no campaign.
        """
        found = sorted(self._folder.glob(f"*/{records.FILE}"), key=_changed, reverse=True)
        for path in found:
            told = self._told(path)
            if self._recipe is None or told["recipe"] in (None, self._recipe):
                return told
        return None

    def _told(self, path: Path) -> dict[str, Any]:
        key = _changed(path)
        if path not in self._seen or self._seen[path][0] != key:
            self._seen[path] = (key, read(path))
        return self._seen[path][1]


def _changed(path: Path) -> tuple[int, int]:
    try:
        told = path.stat()
    except OSError:  # removed meanwhile
        return (0, 0)
    return (told.st_mtime_ns, told.st_size)


def read(path: Path) -> dict[str, Any]:
    """One campaign as `LastBench` gives it, with the name of its `recipe`."""
    title, folder = f"kit bench, {path.parent.name}", os.path.relpath(path.parent)
    told: dict[str, Any] = {"title": title, "when": "", "folder": folder, "recipe": None, "verdict": None,
                            "valid": False, "lines": [], "table": None}  # fmt: skip
    try:
        first, *rest = path.read_bytes().splitlines()
        head = Campaign(path.parent, head=json.loads(first))
        recipe = head.head.get("recipe") or head.head.get("a", {}).get("recipe") or {}
        told |= {"title": report.title_of(head), "when": report.day(head), "recipe": recipe.get("name")}
        if not rest or json.loads(rest[-1]).get("record") != "result":
            observed = sum(b'"record": "observation"' in line for line in rest)
            return {**told, "lines": [f"no result yet: it runs, or was broken off ({observed} observations)"]}
        view = report.look(records.read(path))
    except Exception as error:  # another kit's file may hold anything, and the page goes on
        return {**told, "lines": [f"it cannot be read: {type(error).__name__}: {error}"]}
    table = view.tables[0] if view.tables else None
    return {**told, "verdict": view.verdict, "valid": view.valid, "lines": view.lines, "table": table}
