"""`kit plan` on the demo models against what real engines hold: weights, and tokens of KV cache."""

from __future__ import annotations

import sys
from typing import Any

from engines import KV_MEMORY, REPO, held_bytes, kv_tokens

sys.path.append(str(REPO))

from exl3kit import admission, recipes, weights

WITHIN = 0.03
MIB = 1 << 20
PAGE = REPO / "docs" / "recipes.md"


def held(llm: Any) -> dict[str, int]:
    """What a rank's engine holds: bytes of weights, tokens of KV cache."""
    return {"weights": held_bytes(llm), "tokens": kv_tokens(llm)}


def assert_planned(ref: str, ranks: int, found: dict[str, int]) -> None:
    """The plan of a demo recipe agrees with what its engine held, and the page's table has the figures."""
    recipe = recipes.load(ref, [f"parallel.tensor={ranks}"])
    assert recipe.serve.kv_cache_memory == KV_MEMORY
    survey = weights.survey(recipe)
    rank = admission.rank_plan(recipe, admission.Sizes.of(survey.sizes), survey.config)
    planned = {"weights": rank.weights, "tokens": KV_MEMORY // rank.kv_token}
    for key, value in planned.items():
        assert abs(value / found[key] - 1) < WITHIN, (ref, key, value, found[key])
    sizes = f"{rank.weights / MIB:.2f} | {found['weights'] / MIB:.2f} | {rank.weights / found['weights'] - 1:+.1%}"
    row = f"| `{ref}` | {ranks} | {sizes} | {planned['tokens']} | {found['tokens']} |"
    assert row in PAGE.read_text(), row
