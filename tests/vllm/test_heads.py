"""Layers that a model's class makes in an unusual way: heads without a quantisation, replicated sections."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from demo import wrong_answers
from exl3_vllm import linear
from exl3_vllm.decode import dequantise
from exl3_vllm.families import Shape
from exl3_vllm.format import Checkpoint
from exl3_vllm.linear import Exl3LinearMethod, output_ranges
from exl3_vllm.loading import ModelLoading
from exl3_vllm.settings import Settings
from exl3_vllm.synth import matrix_tensors
from safetensors.torch import save_file
from vllm.model_executor.layers.linear import MergedColumnParallelLinear

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
    # given rank 1 of 2 of a merged layer with sections of 512 and 192, the latter replicated: its size counts twice
    layer = MergedColumnParallelLinear.__new__(MergedColumnParallelLinear)
    layer.__dict__.update(tp_rank=1, tp_size=2, output_sizes=[512, 384], replicated_shard_ids={1})
    # when / then
    assert output_ranges(layer) == [(512, 256, 512), (192, 0, 192)]


def test_a_matrix_that_spans_several_sections_is_cut_in_each_of_them(tmp_path: Path) -> None:
    # given q, k and v side by side in one matrix and z in another, as gated delta nets store them
    generator = torch.Generator().manual_seed(4)
    shapes = {"in_proj_qkv": Shape(128, 1024), "in_proj_z": Shape(128, 512)}
    stored = {name: matrix_tensors(shape, 6, "mcg", False, generator) for name, shape in shapes.items()}
    tensors = {f"{name}.{kind}": tensor for name, parts in stored.items() for kind, tensor in parts.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    # and rank 1 of 2 of the fused layer, whose sections q, k, v, z have 256, 256, 512 and 512 outputs
    layer = MergedColumnParallelLinear.__new__(MergedColumnParallelLinear)
    torch.nn.Module.__init__(layer)
    layer.__dict__.update(tp_rank=1, tp_size=2, output_sizes=[256, 256, 512, 512], input_size=128)
    done: list[bool] = []
    loading = ModelLoading(checkpoint, Settings(), on_complete=lambda: done.append(True))
    method = Exl3LinearMethod("in_proj_qkvz", list(checkpoint.matrices.values()), loading)
    loading.announce("in_proj_qkvz", checkpoint.matrices.values())
    # when vLLM loads the matrices under a span of shard ids and a single one
    method.create_weights(layer, 128, [128, 128, 256, 256], 128, 1536, torch.float32)
    for name, shard in (("in_proj_qkv", (0, 1, 2)), ("in_proj_z", 3)):
        for kind, tensor in stored[name].items():
            parameter = getattr(layer, kind)
            parameter.weight_loader(parameter, tensor, shard)
    method.process_weights_after_loading(layer)
    # then the rank holds the second half of each section
    qkv, z = (dequantise(stored[name]["trellis"], stored[name]["suh"], stored[name]["svh"], "mcg") for name in shapes)
    wanted = torch.cat([qkv[:, 128:256], qkv[:, 384:512], qkv[:, 768:1024], z[:, 256:512]], 1).t()
    torch.testing.assert_close(layer.weight.data, wanted, rtol=1e-5, atol=1e-6)
    assert done == [True]


@pytest.mark.parametrize("packed", [False, True], ids=["decoded", "packed"])
def test_sections_that_are_stored_plain_keep_their_place(
    packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given q and f_a as trellises, b and g_a as plain weights, as GLM-5.3's KDA may be stored
    generator = torch.Generator().manual_seed(4)
    shapes = {"q_proj": Shape(128, 256), "f_a_proj": Shape(128, 128)}
    stored = {name: matrix_tensors(shape, 6, "mcg", False, generator) for name, shape in shapes.items()}
    b, g = (torch.randn(rows, 128, generator=generator) for rows in (8, 64))
    save_file(
        {f"{name}.{kind}": tensor for name, parts in stored.items() for kind, tensor in parts.items()},
        tmp_path / "model.safetensors",
    )
    checkpoint = Checkpoint.open(tmp_path)
    # and rank 1 of 2 of the fused layer, which has f_a and g_a whole on every rank
    layer = MergedColumnParallelLinear.__new__(MergedColumnParallelLinear)
    torch.nn.Module.__init__(layer)
    layer.__dict__.update(
        tp_rank=1, tp_size=2, output_sizes=[256, 8, 256, 128], input_size=128, replicated_shard_ids={2, 3}
    )
    monkeypatch.setattr(linear, "keeps_packed", lambda part: packed)
    loading = ModelLoading(checkpoint, Settings(), on_complete=lambda: None)
    matrices = [checkpoint.matrices[name] for name in shapes]
    method = Exl3LinearMethod("in_proj", matrices, loading, plain={1: "b_proj", 3: "g_a_proj"})
    loading.announce("in_proj", matrices)
    # when vLLM loads them
    method.create_weights(layer, 128, [128, 4, 128, 64], 128, 648, torch.float32)
    for name, shard in (("q_proj", 0), ("f_a_proj", 2)):
        for kind, tensor in stored[name].items():
            getattr(layer, kind).weight_loader(getattr(layer, kind), tensor, shard)
    for weight, shard in ((b, 1), (g, 3)):
        layer.weight.weight_loader(layer.weight, weight, shard)
    method.process_weights_after_loading(layer)
    # then outputs are in the order of the sections, this rank's half of q and b, all of f_a and g_a
    q, f = (dequantise(stored[name]["trellis"], stored[name]["suh"], stored[name]["svh"], "mcg").t() for name in shapes)
    x, bias = torch.randn(3, 128, generator=generator), torch.randn(324, generator=generator)
    wanted = torch.cat([q[128:], b[4:], f, g])
    torch.testing.assert_close(method.apply(layer, x, bias), x @ wanted.t() + bias, rtol=1e-4, atol=1e-4)


def test_a_plain_section_that_never_came_is_named(tmp_path: Path) -> None:
    from exl3_vllm.errors import CompletenessError
    from exl3_vllm.plain_sections import PlainSections

    with pytest.raises(CompletenessError, match=r"tensor model\.b_proj\.weight"):
        PlainSections("in_proj", {1: "model.b_proj"}).check_complete()
