"""Which matrices of a checkpoint a model may leave out, by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from exl3_vllm.errors import CompletenessError
from exl3_vllm.families import Shape
from exl3_vllm.format import Checkpoint
from exl3_vllm.loading import ModelLoading
from exl3_vllm.names import ModuleNames
from exl3_vllm.settings import Settings
from exl3_vllm.synth import matrix_tensors
from safetensors.torch import save_file

LAYER, DRAFT, OTHER = "model.layers.1.mlp.down_proj", "model.layers.2.eh_proj", "mtp.layers.0.self_attn.o_proj"
HEAD, PICTURES = "lm_head", "visual.blocks.0.attn.proj"
LAYERS = 2


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """A model of two layers, with draft layers of both ways of naming them, a head, and a vision tower."""
    parts = matrix_tensors(Shape(128, 128), 2, "mcg", False, torch.Generator().manual_seed(1))
    names = (LAYER, DRAFT, OTHER, HEAD, PICTURES)
    save_file(
        {f"{name}.{kind}": value.clone() for name in names for kind, value in parts.items()},
        tmp_path / "model.safetensors",
    )
    return Checkpoint.open(tmp_path)


def left_out(checkpoint: Checkpoint, *, draft: bool, last_stage: bool) -> set[str]:
    loading = ModelLoading(checkpoint, Settings(), on_complete=lambda: None)
    loading.draft = draft
    loading.ignored_layers = (lambda layer: layer < LAYERS) if draft else (lambda layer: layer >= LAYERS)
    loading.head_elsewhere = lambda: not last_stage
    lacking = set(checkpoint.matrices)
    out = set()
    for name in sorted(lacking):
        # when every other matrix has been taken by a layer
        loading.layers = {"rest": [matrix for other, matrix in checkpoint.matrices.items() if other != name]}
        try:
            loading.check_all_taken()
            out.add(name)
        except CompletenessError as error:
            assert f"tensor {name}.trellis" in str(error)
    return out


def test_a_model_leaves_out_draft_layers_and_nothing_else(checkpoint: Checkpoint) -> None:
    assert left_out(checkpoint, draft=False, last_stage=True) == {DRAFT, OTHER}


def test_a_stage_before_the_last_leaves_out_the_head_too(checkpoint: Checkpoint) -> None:
    assert left_out(checkpoint, draft=False, last_stage=False) == {DRAFT, OTHER, HEAD}


def test_a_draft_model_takes_the_draft_layers_and_leaves_the_rest_to_its_target(checkpoint: Checkpoint) -> None:
    assert left_out(checkpoint, draft=True, last_stage=True) == {LAYER, HEAD, PICTURES}


def test_a_text_part_without_a_mapper_finds_its_matrices() -> None:
    names = ModuleNames(["model.language_model.layers.2.eh_proj"], ["model.language_model.layers.2.mlp.gate"])
    assert names.stored("model.layers.2.eh_proj") == "model.language_model.layers.2.eh_proj"
    assert names.matrices_of("model.layers.2.mlp.gate", {}) == ([], ["model.layers.2.mlp.gate"])
    assert names.any_below("model.layers.2")
