"""The generated page docs/reference/import.md: what became of every key of the test corpus of foreign recipes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from exl3kit import imported, vllm_arguments

CORPUS = Path(__file__).resolve().parents[1] / "tests" / "unit" / "foreign_recipes.yaml"
OUTCOMES = (imported.MAPPED, imported.KEPT, imported.REFUSED)
SENTENCES = 3  # shown of a key that ends in many ways
HEAD = """\
# Import: what becomes of each key

`kit recipe import` reads recipes of eugr's spark-vllm-docker (version 1) and of sparkrun (version 2). Every key ends in
one of three ways: **mapped** to a key of the kit, **kept** beside the recipe in `NAME.foreign.json`, or **refused**
with the reason (and kept there too).

The numbers are of the {count} recipes in `tests/unit/foreign_recipes.yaml`, made up so that every key of both formats
occurs, with values right and wrong: {one} of version 1 and {two} of version 2. {keys} keys: {mapped} mapped,
{kept} kept, {refused} refused. Every one becomes a valid recipe, no key is lost, and each goes out again as version 1
and 2
(`kit recipe export`) and comes back as it was.
"""


@dataclass
class Row:
    """How often a key ended in which way, and the sentences that were said of it."""

    outcomes: Counter[str] = field(default_factory=Counter)
    said: dict[str, None] = field(default_factory=dict)

    def cells(self, key: str) -> list[str]:
        counts = [str(self.outcomes[outcome] or "") for outcome in OUTCOMES]
        said = list(self.said)
        return [f"`{key}`", *counts, "; ".join(said[:SENTENCES]) + ("; …" if len(said) > SENTENCES else "")]


def lines() -> list[str]:
    """The page."""
    corpus = yaml.safe_load(CORPUS.read_text(encoding="utf-8"))
    keys: dict[str, Row] = {}
    options: dict[str, Row] = {}
    total: Counter[str] = Counter()
    for number, one in enumerate(corpus):
        for key, outcome, why in imported.translate(one, f"recipe-{number}").report:
            table, name = (options, option_of(key)) if key.startswith("command -") else (keys, key_of(key))
            found = table.setdefault(name, Row())
            found.outcomes[outcome] += 1
            found.said.setdefault(why)
            total[outcome] += 1
    first = sum(str(one.get("recipe_version")) != "2" for one in corpus)
    numbers = {"count": len(corpus), "one": first, "two": len(corpus) - first, "keys": total.total(), **total}
    return [
        *HEAD.format(**numbers).splitlines(),
        *table_of("Keys", "key", keys),
        *table_of("Options of the command", "option of `vllm serve`", options),
    ]


def key_of(key: str) -> str:
    """`env.NAME` for every variable, and so on; a key with a dot of its own is one that was taken back."""
    section = key.partition(".")[0]
    return f"{section}.NAME" if section in ("env", "defaults") and key != section else key


def option_of(key: str) -> str:
    written = key.removeprefix("command ")
    return vllm_arguments.owner(written) or written


def table_of(title: str, head: str, rows: dict[str, Row]) -> list[str]:
    cells = [[head, *OUTCOMES, "where, or why"], *(rows[key].cells(key) for key in sorted(rows))]
    shown = ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in cells]
    return ["", f"## {title}", "", shown[0], "|---|---|---|---|---|", *shown[1:]]
