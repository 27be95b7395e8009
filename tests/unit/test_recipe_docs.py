"""The page about recipes names every key of the schema, and its examples are valid."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from exl3kit import paths, recipe_view, recipes

PAGE = (paths.REPO / "docs" / "recipes.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```yaml\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


def keys() -> set[str]:
    """Every key of the schema, dotted below its section."""
    schema = recipe_view.json_schema()
    found = set()
    for name, value in schema["properties"].items():
        section = schema["$defs"].get(value.get("$ref", "").removeprefix("#/$defs/"))
        found |= {f"{name}.{key}" for key in section["properties"]} if section else {name}
    return found


def test_every_key_has_its_row() -> None:
    rows = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    named = {key for row in rows for key in re.findall(r"`([a-z0-9_.]+)`", row)}
    assert named == keys()


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_are_valid(example: str, tmp_path: Path) -> None:
    path = tmp_path / "example.yaml"
    path.write_text(example)
    assert recipes.load(str(path))
    assert len(EXAMPLES) == 2
