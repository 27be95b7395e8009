"""What differs between two environments, key by key. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any


def between(a: Any, b: Any) -> dict[str, tuple[Any, Any]]:
    """Path of every leaf that differs, such as `ranks.0.env.EXL3_TIER`, with both values (None where absent)."""
    left, right = dict(_leaves(a)), dict(_leaves(b))
    paths = dict.fromkeys([*left, *right])
    return {path: (left.get(path), right.get(path)) for path in paths if left.get(path) != right.get(path)}


def told(found: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """The same as short lines."""
    return [f"{path}: {_short(a)} → {_short(b)}" for path, (a, b) in found.items()]


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{path}.{number}" if path else str(number))
    else:
        yield path, value


def _short(value: Any) -> str:
    text = "absent" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
