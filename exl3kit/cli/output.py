"""How the kit prints: people on stdout (stderr under `--json`), one JSON object on stdout for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from exl3kit.errors import KitError


def console(*, as_json: bool = False) -> Console:
    """The console for people: stdout, or stderr when stdout carries JSON."""
    from rich.console import Console

    return Console(stderr=as_json, highlight=False, soft_wrap=True)


def emit(fields: Mapping[str, object]) -> None:
    """Print the one JSON object of a `--json` run."""
    print(json.dumps(fields, indent=2, sort_keys=True, default=str))


def refuse(error: KitError, *, as_json: bool) -> int:
    """Say why the kit stops: a sentence on stderr, and the same as JSON on stdout when asked; returns the exit code."""
    if as_json:
        emit(error.as_json())
    print(f"kit: {error}", file=sys.stderr)
    return int(error.code)
