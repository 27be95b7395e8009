"""The tables of scripts/mutate fit the source, and every class of trouble that they are for has a test of its name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
ROWS: list[dict[str, Any]] = [
    row for path in sorted((REPOSITORY / "tests/mutations").glob("*.yaml")) for row in yaml.safe_load(path.read_text())
]
# Build, network between the nodes, memory, weights, configuration.
CASES = [*range(1, 6), *range(7, 14), *range(15, 25), 27, *range(29, 32)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['case']}: {row['breaks']}")
def test_a_mutation_finds_its_place_and_its_test(row: dict[str, Any]) -> None:
    assert (REPOSITORY / row["file"]).read_text(encoding="utf-8").count(row["find"]) == 1
    path, _, name = row["test"].partition("::")
    assert f"def {name}(" in (REPOSITORY / path).read_text(encoding="utf-8")


@pytest.mark.parametrize("case", CASES)
def test_every_class_of_trouble_has_a_test_of_its_name_and_a_mutation(case: int) -> None:
    sources = (path.read_text(encoding="utf-8") for path in (REPOSITORY / "tests").rglob("test_*.py"))
    assert any(re.search(rf"^def test_case_{case}_", source, re.MULTILINE) for source in sources)
    assert case in {row["case"] for row in ROWS}
