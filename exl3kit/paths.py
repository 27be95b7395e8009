"""Where things lie: the repository the kit runs from, the user's caches, and what is kept of earlier runs."""

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
    return _user_dir("XDG_CACHE_HOME", (".cache",), "the cache", parts)


def state_dir(*parts: str) -> Path:
    """A folder for what the kit remembers of its runs (`$XDG_STATE_HOME/exl3kit`, else `~/.local/state/exl3kit`).

    As `cache_dir`, and only its owner may read it.
    """
    return _user_dir("XDG_STATE_HOME", (".local", "state"), "the folder of logs", parts, mode=0o700)


def _user_dir(variable: str, usual: tuple[str, ...], noun: str, parts: tuple[str, ...], mode: int = 0o777) -> Path:
    try:
        base = Path(os.environ.get(variable, ""))
        if not base.is_absolute():
            base = Path.home().joinpath(*usual)
        folder = base.joinpath("exl3kit", *parts).absolute()
        folder.mkdir(mode=mode, parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # not writable; a user without HOME and without an entry in passwd
        raise KitError(
            f"{noun} cannot be made",
            why=str(error),
            next_step=f"set {variable} to a folder that you may write",
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
