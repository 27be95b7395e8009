"""A checkpoint whose shapes cannot be cut over the ranks is refused before any weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from exl3kit import geometry, recipes
from exl3kit.faults import RecipeError

DENSE = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}
# Widths of published models, as their config.json gives them.
AIR = {
    "hidden_size": 4096,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 10944,  # stored as 11008 = 86 blocks
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
OSS = {
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
}
NARROW = {**DENSE, "intermediate_size": 768}
HALVES = {**DENSE, "num_attention_heads": 10, "head_dim": 32}
CODER = {
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 5472,  # of dense layers, of which this model has none
    "moe_intermediate_size": 768,
    "num_experts": 128,
}


@pytest.mark.parametrize(
    ("config", "tensor", "expert", "exl3", "said"),
    [
        (DENSE, 2, False, True, []),
        (DENSE, 8, False, True, []),
        (DENSE, 16, False, True, []),  # 8 key-value heads on 16 ranks: each is held twice
        (
            DENSE,
            3,
            False,
            True,
            ["32 attention heads", "8 key-value heads", "attention output's input", "intermediate_size"],
        ),
        (AIR, 1, False, True, []),
        (AIR, 2, False, True, []),  # 5 and 6 blocks of 1408, in experts and the shared one; 43 and 43 of 10944
        (AIR, 2, True, True, []),
        (AIR, 16, False, True, ["size of 1408 is 11 blocks of 128, fewer than 16 ranks"] * 2),
        (AIR, 2, False, False, []),  # without EXL3 there are no blocks
        ({**OSS, "num_local_experts": 32}, 2, False, True, []),  # 11 and 12 blocks: experts may be cut unevenly
        (OSS, 2, False, True, []),
        (CODER, 2, False, True, []),
        (CODER, 4, False, True, []),
        (CODER, 8, False, True, ["768 is 6 blocks of 128, fewer than 8 ranks"]),
        ({**CODER, "moe_intermediate_size": 769}, 2, False, True, ["769 does not divide over 2 ranks"]),
        (NARROW, 4, False, True, []),
        (NARROW, 8, False, True, ["intermediate_size of 768 is 6 blocks of 128, fewer than 8 ranks"]),
        (HALVES, 2, False, True, ["input of 320 over 2 ranks is 192 = 1.5 blocks of 128 per rank, not whole blocks"]),
        (CODER, 4, True, True, []),
        ({**CODER, "num_experts": 2}, 4, True, True, ["2 experts are fewer than 4 ranks"]),
        ({"text_config": NARROW, "hidden_size": 1}, 8, False, True, ["fewer than 8 ranks"]),
        ({}, 2, False, True, []),
        ({"intermediate_size": "wide", "num_attention_heads": True, "text_config": []}, 2, False, True, []),
    ],
)
def test_cuts(config: dict[str, Any], tensor: int, expert: bool, exl3: bool, said: list[str]) -> None:
    """Given a shape and a number of ranks, then exactly the layers that cannot be cut are named."""
    sentences = geometry.cut_faults(config, tensor=tensor, expert=expert, exl3=exl3)
    assert len(sentences) == len(said), sentences
    for sentence, fragment in zip(sentences, said, strict=True):
        assert fragment in sentence


def recipe(directory: Path, config: object, more: str) -> str:
    (directory / "model").mkdir()
    (directory / "model" / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    path = directory / "r.yaml"
    path.write_text(
        "recipe: 1\nname: r\nmodel: {path: model}\nimage: {base: {rootfs: bookworm}, vllm: 0.32.0+cpu}\n" + more
    )
    return str(path)


def test_a_local_checkpoint_is_looked_at(tmp_path: Path) -> None:
    """Given a model directory with fewer blocks than ranks, when loaded, then the fault stands at parallel.tensor."""
    ref = recipe(tmp_path, {**NARROW, "quantization_config": {"quant_method": "exl3"}}, "parallel: {tensor: 8}\n")
    with pytest.raises(RecipeError) as caught:
        recipes.load(ref)
    (fault,) = caught.value.faults
    assert (fault.place.line, fault.place.column) == (5, 20)
    assert "768 is 6 blocks of 128, fewer than 8 ranks" in fault.what
    assert recipes.load(ref, ["parallel.tensor=4"]).parallel.tensor == 4  # 1 and 2 blocks
    assert recipes.load(ref, ["exl3.tier=none"]).exl3.tier == "none"  # the unquantised control arm has no blocks


def test_stages_and_experts_that_the_model_does_not_have(tmp_path: Path) -> None:
    """Given two layers and no experts, then three stages and spread experts are refused where they were asked for."""
    ref = recipe(tmp_path, {**DENSE, "num_hidden_layers": 2}, "parallel: {tensor: 2, pipeline: 3, expert: true}\n")
    with pytest.raises(RecipeError) as caught:
        recipes.load(ref)
    assert [(fault.place.column, fault.what) for fault in caught.value.faults] == [
        (33, "parallel.pipeline: 2 layers are fewer than 3 stages"),
        (44, "parallel.expert: the model has no experts to spread"),
    ]
    assert recipes.load(ref, ["parallel.pipeline=2", "parallel.expert=false"]).parallel.pipeline == 2


def test_experts_counted_per_layer_are_experts(tmp_path: Path) -> None:
    ref = recipe(tmp_path, {**DENSE, "num_hidden_layers": 2, "num_experts": [16, 16]}, "parallel: {tensor: 2}\n")
    assert recipes.load(ref, ["parallel.expert=true"]).parallel.expert


def test_a_quantised_text_model_inside_a_larger_one_has_blocks(tmp_path: Path) -> None:
    """Given a quantisation that only the inner config names, then fewer blocks than ranks are refused all the same."""
    ref = recipe(tmp_path, {"text_config": {**NARROW, "quantization_config": {}}}, "parallel: {tensor: 8}\n")
    with pytest.raises(RecipeError, match="768 is 6 blocks of 128, fewer than 8 ranks"):
        recipes.load(ref)


@pytest.mark.parametrize("config", ["", "{", "[1]", "[" * 100_000, "\0"])
def test_a_broken_config_is_a_fault_of_the_path(config: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        recipes.load(recipe(tmp_path, config, ""))
    (fault,) = caught.value.faults
    assert (fault.place.line, fault.place.column) == (3, 15)
    assert fault.what.startswith("model.path: ")
    assert "config.json" in fault.what
