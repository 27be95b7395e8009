"""`kit plan` on the demo models against what a real engine holds: weights, and tokens of KV cache."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from engines import KV_MEMORY, REPO, held_bytes, kv_tokens
from exl3_vllm import gpu_dense
from exl3_vllm.arena import ALIGNMENT

sys.path.append(str(REPO))

from exl3kit import admission, recipes, weights

Engine = Callable[..., AbstractContextManager[Any]]
WITHIN = 0.03
MIB = 1 << 20
PAGE = REPO / "docs" / "recipes.md"


def planned(ref: str, *sets: str) -> admission.RankPlan:
    recipe = recipes.load(ref, sets)
    found = weights.survey(recipe)
    return admission.rank_plan(recipe, admission.Sizes.of(found.sizes), found.config)


@pytest.mark.parametrize(("ref", "model"), [("demo", "demo-dense"), ("demo-moe", "demo-moe")])
def test_a_plan_agrees_with_the_engine(ref: str, model: str, engine: Engine, models: Path) -> None:
    # given the recipe's own memory for the KV cache
    assert recipes.load(ref).serve.kv_cache_memory == KV_MEMORY
    # when the model is loaded
    with engine(models / model) as llm:
        held, tokens = held_bytes(llm), kv_tokens(llm)
    # then weights and tokens are the plan's, and the page's table tells them
    rank = planned(ref)
    assert rank.weights == pytest.approx(held, rel=WITHIN)
    assert KV_MEMORY / rank.kv_token == pytest.approx(tokens, rel=WITHIN)
    assert row(ref, 1, rank.weights, held, KV_MEMORY // rank.kv_token, tokens) in PAGE.read_text()


def row(ref: str, ranks: int, weights: int, held: int, planned_tokens: int, tokens: int) -> str:
    """The row of the page's table."""
    sizes = f"{weights / MIB:.2f} | {held / MIB:.2f} | {weights / held - 1:+.1%}"
    return f"| `{ref}` | {ranks} | {sizes} | {planned_tokens} | {tokens} |"


@pytest.mark.parametrize(("inputs", "outputs"), [(128, 128), (5120, 32768), (5120, 75_968), (2048, 248_320)])
@pytest.mark.parametrize("rows", [1, 2048, 8192])
def test_the_plan_counts_a_matrix_on_its_way_through_cublas_as_the_layer_does(
    inputs: int, outputs: int, rows: int
) -> None:
    blocks = -(-outputs // 128) * 128
    widest = max(end - begin for begin, end in gpu_dense.pieces(blocks))
    assert admission.written_out(inputs, outputs, rows) == pytest.approx(
        gpu_dense._reconstructed_bytes(rows, inputs, widest), abs=4 * ALIGNMENT
    )
