"""Seconds per stage of the last run of a verb with a recipe on some nodes, to hold the next one against.

One small JSON file each below `$XDG_STATE_HOME/exl3kit/times`; a file that cannot be read or written is no failure.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from exl3kit import paths
from exl3kit.errors import KitError


@dataclass(frozen=True)
class Run:
    """What is compared: the same verb, the same recipes, the same nodes."""

    verb: str
    recipe: str
    nodes: str = "local"

    @property
    def file(self) -> Path:
        """Where its times are. Raises `KitError` when the folder cannot be made."""
        words = "-".join(re.sub(r"[^A-Za-z0-9.]+", "-", word)[:40] for word in (self.verb, Path(self.recipe).stem))
        digest = hashlib.sha256(json.dumps([self.verb, self.recipe, self.nodes]).encode()).hexdigest()[:12]
        return paths.state_dir("times") / f"{words}-{digest}.json"


@dataclass(frozen=True)
class Times:
    """Seconds of each stage, and of all of it; `stages` is by name, and by `name (2)` for one that came again."""

    stages: Mapping[str, float] = field(default_factory=dict)
    wall: float | None = None


def recall(run: Run) -> Times:
    """The times of the last such run; empty when there was none."""
    with suppress(OSError, ValueError, TypeError, KeyError, KitError):
        told = json.loads(run.file.read_text(encoding="utf-8"))
        return Times({str(name): float(seconds) for name, seconds in dict(told["stages"]).items()}, float(told["wall"]))
    return Times()


def remember(run: Run, times: Times) -> None:
    """Keep the times of a run that came to its end."""
    told = {"verb": run.verb, "recipe": run.recipe, "nodes": run.nodes, "at": int(time.time())}
    with suppress(OSError, KitError):
        file = run.file
        beside = file.with_suffix(".new")
        beside.write_text(json.dumps({**told, "stages": dict(times.stages), "wall": times.wall}), encoding="utf-8")
        beside.replace(file)


def nodes_named() -> Iterator[str]:
    """The `--nodes` of remembered runs, the newest first."""
    with suppress(KitError, OSError):
        files = sorted(paths.state_dir("times").glob("*.json"), key=lambda file: file.stat().st_mtime, reverse=True)
        for file in files[:50]:
            with suppress(OSError, ValueError, TypeError, KeyError):
                yield str(json.loads(file.read_text(encoding="utf-8"))["nodes"])
