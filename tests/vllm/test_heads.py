"""Layers that a model's class makes in an unusual way: heads without a quantisation, replicated sections."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from demo import wrong_answers
from exl3_vllm.linear import output_ranges

Engine = Callable[..., AbstractContextManager[Any]]


def test_a_head_whose_model_forgets_the_quantisation_finds_its_trellis(
    engine: Engine, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.models import llama

    # given a model class that makes its head as 47 of vLLM's do: without quant_config
    made = llama.ParallelLMHead

    def forgetful(*arguments: Any, quant_config: Any = None, **named: Any) -> Any:
        return made(*arguments, **named)

    monkeypatch.setattr(llama, "ParallelLMHead", forgetful)
    # when / then
    with engine(models / "demo-dense") as llm:
        assert wrong_answers(llm, models / "demo-dense") == []


def test_replicated_sections_are_whole_on_every_rank() -> None:
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    # given rank 1 of 2 of a merged layer with sections of 512 and 192, the latter replicated: its size counts twice
    layer = MergedColumnParallelLinear.__new__(MergedColumnParallelLinear)
    layer.__dict__.update(tp_rank=1, tp_size=2, output_sizes=[512, 384], replicated_shard_ids={1})
    # when / then
    assert output_ranges(layer) == [(512, 256, 512), (192, 0, 192)]
