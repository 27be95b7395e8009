"""Where things lie: the repository the kit runs from, and the caches of the user."""

from __future__ import annotations

import os
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
LOCKS = REPO / "locks"
OVERLAY = REPO / "overlay"
RECIPES = REPO / "recipes"


def cache_dir(*parts: str) -> Path:
    """A folder under the user's cache (`$XDG_CACHE_HOME/exl3kit`, else `~/.cache/exl3kit`), made when missing.

    A relative `XDG_CACHE_HOME` is ignored, as the XDG base directory specification asks.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        base = Path.home() / ".cache"
    folder = base.joinpath("exl3kit", *parts)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def wheelhouse() -> Path:
    """Every wheel that a pins file names, fetched once and checked against its sha256 before use."""
    return cache_dir("wheels")


def shown(path: Path) -> str:
    """The path as people read it: relative to the repository when it lies inside."""
    try:
        return path.resolve().relative_to(REPO).as_posix()
    except ValueError:
        return str(path)
