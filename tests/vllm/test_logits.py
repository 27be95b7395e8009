"""Mixed rates and codebooks through vLLM against transformers on dequantised weights, in fp32."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from exl3_vllm.format import Checkpoint
from logits import ENGINE, make_synthetic, relative_error, vllm_logits

Engine = Callable[..., AbstractContextManager[Any]]


@pytest.mark.parametrize(
    "name",
    ["llama", "qwen2_moe", "padded", *(pytest.param(name, marks=pytest.mark.full) for name in ("qwen3", "qwen3_moe"))],
)
def test_logits_equal_transformers(name: str, engine: Engine, tmp_path: Path) -> None:
    # given a model whose tensors differ in rate and codebook, also within one expert
    synthetic = make_synthetic(name, tmp_path)
    matrices = Checkpoint.open(synthetic.model).matrices.values()
    assert len({(matrix.half_bits, matrix.codebook) for matrix in matrices}) >= min(14, len(matrices))
    # when vLLM computes it
    with engine(synthetic.model, **ENGINE) as llm:
        logits = vllm_logits(llm)
    # then no position is off by more than fp32 rounding
    assert relative_error(logits, synthetic.reference) < 2e-5
