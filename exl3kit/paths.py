"""Where things lie: the repository the kit runs from, and the caches of the user."""

from __future__ import annotations

import os
from pathlib import Path

from exl3kit.errors import ExitCode, KitError

REPO = Path(__file__).resolve().parent.parent
LOCKS = REPO / "locks"
OVERLAY = REPO / "overlay"
RECIPES = REPO / "recipes"


def cache_dir(*parts: str) -> Path:
    """A folder under the user's cache (`$XDG_CACHE_HOME/exl3kit`, else `~/.cache/exl3kit`), made when missing.

    A relative `XDG_CACHE_HOME` is ignored, as the XDG base directory specification asks. Raises `KitError` (preflight)
    when the folder cannot be made.
    """
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        if not base.is_absolute():
            base = Path.home() / ".cache"
        folder = base.joinpath("exl3kit", *parts).absolute()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # not writable; a user without HOME and without an entry in passwd
        raise KitError(
            "the cache cannot be made",
            why=str(error),
            next_step="set XDG_CACHE_HOME to a folder that you may write",
            code=ExitCode.PREFLIGHT,
        ) from error
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
