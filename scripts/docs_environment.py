"""Environments of scripts, made from hash-locked requirements with the launcher's own means. Standard library only."""

from __future__ import annotations

import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]


def require_python(script: str) -> None:
    """Leave with a sentence (3) when this Python is too old."""
    if sys.version_info < (3, 11):  # noqa: UP036 - the one place where an older Python gets a sentence
        found = f"{sys.version_info[0]}.{sys.version_info[1]}"
        print(f"{script}: this is Python {found}\n  next: run it with Python 3.11 or newer", file=sys.stderr)
        raise SystemExit(3)


def interpreter(script: str, folder: str, requirements: str) -> str:
    """The Python of an environment in the repository, made when it is missing; leaves with 3 when it cannot be."""
    sys.path.insert(0, str(REPO))
    sys.dont_write_bytecode = True
    import kit

    venv, lock = str(REPO / folder), str(REPO / requirements)
    try:
        if not kit.usable(venv, lock):
            kit.make_environment(venv, lock)
    except kit.Refusal as refusal:
        print(f"{script}: {refusal}\n  next: {refusal.next_step}", file=sys.stderr)
        raise SystemExit(3) from None
    return kit.python_of(venv)
