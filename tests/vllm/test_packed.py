"""Layers that keep their matrices packed, as on a GPU; here the reference decoder stands in for the kernels."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from demo import wrong_answers
from exl3_vllm import decode, linear, packed_ops
from exl3_vllm.packed_ops import PackedPart
from logits import ENGINE, make_synthetic, relative_error, vllm_logits
from test_decode import seeded_trellis

Engine = Callable[..., AbstractContextManager[Any]]


def parts() -> list[PackedPart]:
    """Two matrices of 128 rows and 256 columns, of which columns 40 to 200 and 0 to 256 are wanted."""
    made = []
    for half_bits, codebook, first, columns in ((6, "mcg", 40, 160), (5, "mul1", 0, 256)):
        generator = torch.Generator().manual_seed(half_bits)
        suh, svh = (torch.randn(size, generator=generator).half() for size in (128, 256))
        made.append(PackedPart(seeded_trellis(half_bits), suh, svh, codebook, first, columns))
    return made


@pytest.mark.parametrize("threshold", [packed_ops.TABLE_DECIDES, 0, 4, 5, 6])
def test_both_sides_of_the_threshold_give_the_same(threshold: int) -> None:
    # given 5 rows of 100 inputs (28 rows of the matrices are padding), a bias, and 8 columns of padding
    x, bias = torch.randn(5, 100, generator=torch.Generator().manual_seed(1)), torch.arange(424.0)
    made = parts()
    dense = [decode.dequantise(one.trellis, one.suh, one.svh, one.codebook)[:100] for one in made]
    wanted = torch.cat([x @ dense[0][:, 40:200], x @ dense[1], torch.zeros(5, 8)], 1) + bias
    # when
    got = packed_ops.packed_layer(x[None], made, False, 8, threshold, bias)
    # then
    assert got.shape == (1, 5, 424)
    assert torch.linalg.norm(got[0] - wanted) / torch.linalg.norm(wanted) < 1e-5


def test_rows_that_are_views_and_no_rows_at_all_are_rows_too() -> None:
    # given rows that lie in wider ones, and none
    wide = torch.randn(5, 3, 100, generator=torch.Generator().manual_seed(2))
    made = parts()
    # when / then
    packed = wide[:, 1].contiguous()
    for threshold in (0, 1):
        view = packed_ops.packed_layer(wide[:, 1], made, False, 0, threshold, None)
        same = packed_ops.packed_layer(packed, made, False, 0, threshold, None)
        torch.testing.assert_close(view, same, rtol=1e-5, atol=1e-4)
        assert packed_ops.packed_layer(packed[:0], made, False, 8, threshold, None).shape == (0, 424)


def test_bf16_values_beyond_fp16_stay_finite() -> None:
    # given activations that fp16 can not hold
    x = torch.full((3, 128), 3e6, dtype=torch.bfloat16)
    for threshold in (0, 1):
        y = packed_ops.packed_layer(x, parts(), False, 0, threshold, None)
        assert y.dtype == torch.bfloat16 and torch.isfinite(y).all() and y.abs().max() > 65504


def test_the_operator_passes_torchs_own_checks() -> None:
    one = parts()[0]
    arguments = (
        torch.randn(3, 128),
        [one.trellis],
        [one.suh],
        [one.svh],
        [1],
        [40],
        [160],
        True,
        4,
        0,
        torch.ones(164),
    )
    torch.library.opcheck(packed_ops.packed_linear, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "keeps_packed", lambda part: True)


def test_the_demo_answers_from_packed_layers(packed: None, engine: Engine, models: Path) -> None:
    with engine(models / "demo-dense") as llm:
        assert wrong_answers(llm, models / "demo-dense") == []


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama", "padded"])
@pytest.mark.parametrize("threshold", ["0", "8"])
def test_logits_from_packed_layers_equal_transformers(
    name: str, threshold: str, packed: None, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_EXL3_PREFILL_RECONSTRUCT_M", threshold)
    synthetic = make_synthetic(name, tmp_path)
    with engine(synthetic.model, **ENGINE) as llm:
        assert relative_error(vllm_logits(llm), synthetic.reference) < 2e-5
