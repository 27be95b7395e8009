"""Mixed rates and codebooks through vLLM against transformers on dequantised weights, in fp32."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from exl3_vllm.format import Checkpoint
from logits import make_synthetic, options_of, relative_error, vllm_logits

Engine = Callable[..., AbstractContextManager[Any]]


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "qwen2_moe", "padded", "mla", "tied"),
        *(pytest.param(name, marks=pytest.mark.full) for name in ("qwen3", "qwen3_moe", "glm4_moe")),
    ],
)
def test_logits_equal_transformers(name: str, engine: Engine, tmp_path: Path) -> None:
    # given a model whose tensors differ in rate and codebook, also within one expert
    synthetic = make_synthetic(name, tmp_path)
    matrices = Checkpoint.open(synthetic.model).matrices.values()
    assert len({(matrix.half_bits, matrix.codebook) for matrix in matrices}) >= min(14, len(matrices))
    # when vLLM computes it
    with engine(synthetic.model, **options_of(name)) as llm:
        logits = vllm_logits(llm)
    # then no position is off by more than fp32 rounding
    assert relative_error(logits, synthetic.reference) < 2e-5


@pytest.mark.full
def test_a_matrix_for_several_sections_gives_what_the_dequantised_model_gives(engine: Engine, tmp_path: Path) -> None:
    # given gated delta nets, whose q, k and v are one matrix that vLLM loads under a span of shard ids. vLLM computes
    # them in bf16 only, so the measure is how far vLLM itself is off on dequantised weights (0.0102 here)
    synthetic = make_synthetic("gdn", tmp_path)
    options = options_of("gdn")
    with engine(tmp_path / "gdn-dense", **options) as llm:
        dense = relative_error(vllm_logits(llm), synthetic.reference)
    # when / then
    with engine(synthetic.model, **options) as llm:
        assert relative_error(vllm_logits(llm), synthetic.reference) < 1.1 * dense
    assert dense < 0.05
