"""Plans against what vLLM 0.33.0 took on an H200, as recorded in docs/measurements by `scripts/gpu`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from exl3kit import admission, plan, published, recipes
from exl3kit.admission import GIB

REPO = Path(__file__).resolve().parents[2]
sys.path.append(str(REPO / "scripts" / "gpu_host"))

from geometries import MODELS  # noqa: E402

RECORD: dict[str, Any] = json.loads((REPO / "docs/measurements/vllm-h200-2026-11-30.json").read_text())
TIMED = RECORD["timed"]
GEOMETRY = {"moe-k4": "qwen3-30b-k4", "moe-bf16": "qwen3-30b-k4", "dense": "dense-40", "dense-bf16": "dense-40"}
KV = 2 * GIB
WITHIN = 0.03


def planned(label: str) -> plan.Plan:
    """The plan of a timed run: its geometry and rates, its settings, one rank."""
    model, packed = MODELS[GEOMETRY[label]], "receipt" in TIMED[label]
    settings = RECORD["settings"]
    assert settings["kv_cache"] == "2 GiB"
    recipe = recipes.load(
        "qwen3-30b-a3b-rtx",
        [
            f"serve.max_num_batched_tokens={settings['max_num_batched_tokens']}",
            f"serve.max_num_seqs={max(settings['capture_sizes'])}",
            "serve.gpu_memory_utilization=null",
            "serve.kv_cache_memory=2GiB",
            "serve.kv_cache_dtype=auto",
            f"exl3.tier={'auto' if packed else 'none'}",
        ],
    )
    entry = {
        "config": model.config,
        "source": "scripts/gpu_host",
        "packed": ["routed experts", "mlp", "attention", "head"],
        "head_bits": model.rates[-1] / 2,
    }
    shape = published.of(label, entry, model.rates[0] / 2, decoded=not packed)
    down = model.config["intermediate_size"]
    matrices = tuple(
        replace(one, bits=model.rate("down_proj") / 2) if packed and (one.part, one.inputs) == ("mlp", down) else one
        for one in shape.matrices
    )
    return plan.make(recipe, plan.of_published(recipe, replace(shape, matrices=matrices)))


def row(label: str) -> str:
    """The row of the page's table: planned, measured, and how far they are apart."""
    rank, measured = planned(label).rank, TIMED[label]["allocated_gib"]
    parts = [rank.weights / GIB, rank.scratch / GIB, KV / GIB]
    cells = [f"{size:.2f}" for size in (*parts, sum(parts), measured)]
    return f"| `{label}` | {' | '.join(cells)} | {sum(parts) / measured - 1:+.1%} |"


@pytest.mark.parametrize("label", GEOMETRY)
def test_weights_scratch_and_kv_cache_are_what_vllm_held_on_an_h200(label: str) -> None:
    rank, measured = planned(label).rank, TIMED[label]
    assert (rank.weights + rank.scratch + KV) / GIB == pytest.approx(measured["allocated_gib"], rel=WITHIN)
    # what a step takes beside that is an estimate, and must not be below the truth
    assert rank.activation / GIB > measured["peak_gib"] - measured["allocated_gib"]
    assert row(label) in (REPO / "docs" / "recipes.md").read_text(), row(label)


@pytest.mark.parametrize("label", [label for label in GEOMETRY if "receipt" in TIMED[label]])
def test_a_matrix_on_its_way_through_cublas_takes_the_arena_to_the_byte(label: str) -> None:
    """Given the head, the largest matrix of both models, then the ranks' receipts counted what the formula says."""
    config = MODELS[GEOMETRY[label]].config
    rows = RECORD["settings"]["max_num_batched_tokens"]
    counted = admission.written_out(config["hidden_size"], config["vocab_size"], rows)
    assert counted == TIMED[label]["receipt"]["arena_bytes"]
