"""Small shapes through every kernel: few enough for compute-sanitizer, which `scripts/gpu` runs over them."""

from __future__ import annotations

import pytest
import reference as ref
import torch
from conftest import INSTANCES
from exl3_vllm import kernels, plans
from exl3_vllm.plans import HALF, NARROW, THIN, WIDE, DensePlan, MoePlan
from test_moe import EXPERTS, HIDDEN, LIMIT, TOPK, layer, spread


@pytest.mark.parametrize("tile", range(4))
def test_small_dense_products(tile: int) -> None:
    m = ref.matrix(384, 384, *INSTANCES[0])
    for rows in (1, 17, plans.TILE_ROWS[tile]):
        x = torch.randn(rows, 384, device=ref.DEVICE, dtype=torch.float16)
        for splits in (0, 2):
            out = ref.poisoned((rows, 384), torch.float32)
            kernels.fused_linear(x, [m], False, out, DensePlan(tile, 1, splits))
            assert ref.error(out, ref.product(x, m)) < ref.DENSE_LIMIT


def test_small_reconstruction() -> None:
    m = ref.matrix(128, 256, *INSTANCES[0])
    assert torch.equal(kernels.reconstruct(m, original_basis=False), ref.inner(m))
    assert ref.error(kernels.reconstruct(m), ref.weight(m)) < 4e-4


def test_both_ways_through_cublas() -> None:  # racecheck cannot run cuBLAS's Hopper kernels
    m = ref.matrix(128, 256, *INSTANCES[0])
    x = torch.randn(5, 128, device=ref.DEVICE, dtype=torch.float16)
    for folded_rows in (0, 100):
        out = ref.poisoned((5, 256), torch.float16)
        kernels.reconstructed_linear(x, [m], out, folded_rows=folded_rows)
        assert ref.error(out, ref.product(x, m)) < 1e-3


@pytest.mark.parametrize(
    "plan",
    [
        MoePlan(32, 2, 1, (THIN, 1, 32), (THIN, 1, 32)),
        MoePlan(128, 0, 0, (HALF, 1, 64, WIDE, 65, 128), (HALF, 1, 64, NARROW, 65, 128)),
    ],
)
def test_small_moe_layers(plan: MoePlan) -> None:
    made = layer(list(INSTANCES[:1]))
    for tokens in (3, 40):
        x = torch.randn(tokens, HIDDEN, device=ref.DEVICE, dtype=torch.float16)
        ids, weights = spread(tokens), torch.rand(tokens, TOPK, device=ref.DEVICE)
        ids[0, 0] = EXPERTS  # another rank's
        out = ref.poisoned((tokens, HIDDEN), torch.float32)
        stacked = kernels.experts(*made)
        space = torch.empty(kernels.moe_workspace(tokens, TOPK, stacked, plan), dtype=torch.uint8, device=ref.DEVICE)
        kernels.moe_into(x, ids, weights, stacked, LIMIT, plan, out, space)
        assert ref.error(out, ref.moe(x, ids, weights, *made, LIMIT)) < ref.MOE_LIMIT
