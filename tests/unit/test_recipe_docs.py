"""The reference names every key of the schema, and recipes in the pages are valid."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from exl3kit import paths, recipe_view, recipes

KEYS = (paths.REPO / "docs" / "reference" / "recipe.md").read_text(encoding="utf-8")
PAGES = [paths.REPO / "docs" / name for name in ("recipes.md", "add-a-model.md")]
BLOCKS = [
    block for page in PAGES for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
]
EXAMPLES = [block for block in BLOCKS if block.startswith("recipe: 1")]


def keys() -> set[str]:
    """Every key of the schema, dotted below its section; the keys of two mappings inside a section too."""
    schema = recipe_view.json_schema()
    found = set()
    for name, value in schema["properties"].items():
        section = schema["$defs"].get(value.get("$ref", "").removeprefix("#/$defs/"))
        found |= {f"{name}.{key}" for key in section["properties"]} if section else {name}
    inner = {"image.base": "RootFs", "serve.speculative": "Speculative"}
    return found | {f"{name}.{key}" for name, kind in inner.items() for key in schema["$defs"][kind]["properties"]}


def test_every_key_has_its_row() -> None:
    rows = [line.split("|")[1] for line in KEYS.splitlines() if line.startswith("| `")]
    named = {key for row in rows for key in re.findall(r"`([a-z0-9_.]+)`", row)}
    assert named == keys()


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_are_valid(example: str, tmp_path: Path) -> None:
    path = tmp_path / "example.yaml"
    path.write_text(example)
    assert recipes.load(str(path))
    assert len(EXAMPLES) == 3
