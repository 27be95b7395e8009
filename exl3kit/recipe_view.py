"""The effective recipe for a reader: YAML that loads again, the source of each value, and the schema for editors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from exl3kit import yaml_source
from exl3kit.faults import Key
from exl3kit.recipe import Recipe
from exl3kit.recipes import Effective

_COLUMN = 60  # where the sources begin
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9._/+-]*")


def as_yaml(effective: Effective) -> str:
    """The recipe with all defaults, one value per line, each with a comment that names its source."""
    lines = ["# " + " <- ".join(yaml_source.visible(str(file)) for file in reversed(effective.files))]
    for key, value in effective.recipe.model_dump(mode="json").items():
        if isinstance(value, dict):
            lines += [f"{key}:", *(_line(f"  {name}", v, effective, (key, name)) for name, v in value.items())]
        else:
            lines.append(_line(key, value, effective, (key,)))
    return "\n".join(lines) + "\n"


def as_json(effective: Effective) -> dict[str, object]:
    """The same as data: the recipe, the source of each value, the files (base first)."""
    dump = effective.recipe.model_dump(mode="json")
    return {
        "recipe": dump,
        "sources": {".".join(path): source(effective, path) for path in _leaves(dump)},
        "files": [str(file) for file in effective.files],
    }


def source(effective: Effective, path: tuple[Key, ...]) -> str:
    """Where the value under `path` was written: file:line:column, an argument, or 'default'."""
    node = yaml_source.find(effective.tree, path)
    return "default" if node is None else str(node.place)


def json_schema() -> dict[str, Any]:
    """The schema for editors, looser than the kit: a recipe that extends another may leave out keys."""
    schema = Recipe.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "kit recipe, schema 1"
    schema["properties"]["extends"] = {
        "type": "string",
        "description": "A shipped recipe's name or a path to build on.",
    }
    schema["required"] = ["recipe", "name"]
    schema["anyOf"] = [{"required": ["extends"]}, {"required": ["model", "image"]}]
    schema["$defs"]["Image"].pop("required")
    return schema


def _leaves(dump: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for key, value in dump.items():
        if isinstance(value, dict):
            yield from ((key, name) for name in value)
        else:
            yield (key,)


def _line(key: str, value: object, effective: Effective, path: tuple[Key, ...]) -> str:
    text = f"{key}: {write(value)}"
    return f"{text:<{_COLUMN}}  # {yaml_source.visible(source(effective, path))}"


def write(value: object) -> str:
    """A value in YAML's flow style, on one line, readable by every YAML reader alike."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{write(key)}: {write(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(write(item) for item in value) + "]"
    if isinstance(value, str):
        plain = _PLAIN.fullmatch(value) is not None and isinstance(yaml_source.resolve(value), str)
        return value if plain else yaml_source.quoted(value)
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
