"""MoE layers: routing, accuracy over token counts and routings, mixed rates, own suh, capture, determinism."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import reference as ref
import torch
from conftest import INSTANCES
from exl3_vllm import kernels, plans
from exl3_vllm.plans import HALF, NARROW, THIN, WIDE, MoePlan
from torch import Tensor

HIDDEN, INTER, EXPERTS, TOPK, LIMIT = 384, 256, 12, 4, 3.0
Layer = tuple[list[kernels.Matrix], list[kernels.Matrix], list[kernels.Matrix]]


def layer(kinds: list[tuple[int, int]], *, shared: bool = True) -> Layer:
    suh = ref.signs(HIDDEN, HIDDEN**-0.5) if shared else None
    kind = [kinds[e % len(kinds)] for e in range(EXPERTS)]
    other = [kinds[(e + 1) % len(kinds)] for e in range(EXPERTS)]
    gate, up = ([ref.matrix(HIDDEN, INTER, *k, suh=suh) for k in kind] for _ in range(2))
    return gate, up, [ref.matrix(INTER, HIDDEN, *k) for k in other]


def spread(tokens: int) -> Tensor:
    return (
        torch.stack([torch.randperm(EXPERTS, device=ref.DEVICE)[:TOPK] for _ in range(tokens)])
        .int()
        .reshape(tokens, TOPK)
    )


def all_to_one(tokens: int) -> Tensor:
    """Slot 0 to expert 3; the other slots are other ranks' experts."""
    ids = torch.full((tokens, TOPK), -1, device=ref.DEVICE, dtype=torch.int32)
    ids[:, 0] = 3
    return ids


def few(tokens: int) -> Tensor:
    """Experts 0, 1, 10 and 11 alone, ids beyond the last expert included."""
    pool = torch.tensor([0, 1, 10, 11, EXPERTS, EXPERTS + 900], device=ref.DEVICE)
    return torch.stack([pool[torch.randperm(6, device=ref.DEVICE)[:TOPK]] for _ in range(tokens)]).int()


def run(made: Layer, x: Tensor, ids: Tensor, weights: Tensor, plan: MoePlan | None = None) -> Tensor:
    stacked = kernels.experts(*made)
    if plan is None:
        return kernels.moe(x, ids, weights, stacked, limit=LIMIT, out_dtype=torch.float32)
    out = ref.poisoned(tuple(x.shape), torch.float32)
    size = kernels.moe_workspace(x.shape[0], TOPK, stacked, plan)
    workspace = torch.full(
        (size,), 255, dtype=torch.uint8, device=ref.DEVICE
    )  # NaN in every format: stale memory shows
    kernels.moe_into(x, ids, weights, stacked, LIMIT, plan, out, workspace)
    return out


def check(
    made: Layer,
    tokens: int,
    route: Callable[[int], Tensor],
    plan: MoePlan | None = None,
    dtype: torch.dtype = torch.float16,
) -> None:
    x = torch.randn(tokens, HIDDEN, device=ref.DEVICE).to(dtype)
    ids, weights = route(tokens), torch.rand(tokens, TOPK, device=ref.DEVICE)
    want = ref.moe(x, ids, weights, *made, LIMIT)
    assert ref.error(run(made, x, ids, weights, plan), want) < ref.MOE_LIMIT, (tokens, route.__name__, plan)


@pytest.mark.parametrize("route", [spread, all_to_one, few])
@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 33, 127, 128, 129, 260, 700, 2100])
def test_every_number_of_tokens_and_routing(tokens: int, route: Callable[[int], Tensor]) -> None:
    check(layer(list(INSTANCES[:1])), tokens, route)


PLANS = {
    "half": MoePlan(64, 0, 0, (HALF, 1, 64), (HALF, 1, 64)),
    "wide": MoePlan(128, 0, 0, (WIDE, 1, 128), (NARROW, 1, 128)),
    "both": MoePlan(128, 0, 0, (HALF, 1, 64, WIDE, 65, 128), (HALF, 1, 64, NARROW, 65, 128)),
    "long first": MoePlan(128, 0, 0, (WIDE, 65, 128, HALF, 1, 64), (NARROW, 65, 128, HALF, 1, 64)),
    "split": MoePlan(32, 3, 2, (THIN, 1, 32), (THIN, 1, 32)),
    "split gate": MoePlan(32, 1, 0, (THIN, 1, 32), (WIDE, 1, 128)),
    "split down": MoePlan(16, 0, 4, (WIDE, 1, 128), (NARROW, 1, 128)),
}


@pytest.mark.parametrize("name", PLANS)
def test_every_tile_class(instance: tuple[int, int], name: str) -> None:
    made = layer([instance])
    for tokens, route in ((1, spread), (70, spread), (300, all_to_one)):
        check(made, tokens, route, PLANS[name])


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("tokens", [1, 40, 300, 1500])
def test_mixed_rates_and_own_suh(tokens: int, shared: bool) -> None:
    made = layer(list(INSTANCES[:3]), shared=shared)
    assert (kernels.experts(*made).suh is not None) == shared
    check(made, tokens, spread)
    check(made, tokens, spread, dtype=torch.bfloat16)


def test_no_tokens() -> None:
    made = layer(list(INSTANCES[:1]))
    x = torch.empty(0, HIDDEN, device=ref.DEVICE, dtype=torch.float16)
    ids, weights = torch.empty(0, TOPK, device=ref.DEVICE, dtype=torch.int32), torch.empty(0, TOPK, device=ref.DEVICE)
    assert kernels.moe(x, ids, weights, kernels.experts(*made)).shape == (0, HIDDEN)


def test_all_slots_elsewhere_gives_zero() -> None:
    made = layer(list(INSTANCES[:1]))
    for tokens in (3, 400):
        x = torch.randn(tokens, HIDDEN, device=ref.DEVICE, dtype=torch.float16)
        ids = torch.full((tokens, TOPK), -1, device=ref.DEVICE, dtype=torch.int32)
        assert not run(made, x, ids, torch.rand(tokens, TOPK, device=ref.DEVICE)).any()


def test_gate_and_up_of_different_rates_are_refused() -> None:
    gate, up, down = layer(list(INSTANCES[:1]))
    up[5] = ref.matrix(HIDDEN, INTER, *INSTANCES[1])
    with pytest.raises(ValueError, match="expert 5"):
        kernels.experts(gate, up, down)


def test_runs_are_bit_identical_and_streams_do_not_meet() -> None:
    made = kernels.experts(*layer(list(INSTANCES[:1])))
    for tokens in (1, 9, 64, 400, 1300):
        x = torch.randn(tokens, HIDDEN, device=ref.DEVICE, dtype=torch.bfloat16)
        ids, weights = spread(tokens), torch.rand(tokens, TOPK, device=ref.DEVICE)
        first = kernels.moe(x, ids, weights, made)
        streams = [torch.cuda.Stream() for _ in range(3)]
        torch.cuda.synchronize()
        got = []
        for _ in range(4):
            for stream in streams:
                with torch.cuda.stream(stream):
                    got.append(kernels.moe(x, ids, weights, made))
        torch.cuda.synchronize()
        assert all(torch.equal(y, first) for y in got)


@pytest.mark.parametrize("tokens", [1, 8, 200, 600])
def test_capture_and_replay_with_changing_routing(tokens: int) -> None:
    made = kernels.experts(*layer(list(INSTANCES[:1])))
    x = torch.randn(tokens, HIDDEN, device=ref.DEVICE, dtype=torch.float16)
    ids, weights = spread(tokens), torch.rand(tokens, TOPK, device=ref.DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kernels.moe(x, ids, weights, made, limit=LIMIT)
    for route in (spread, all_to_one, few, spread):
        x.copy_(torch.randn_like(x))
        ids.copy_(route(tokens))
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, kernels.moe(x, ids, weights, made, limit=LIMIT))


def test_plans_agree_with_each_other() -> None:
    """Bits may differ between plans (other sums), values may not: decode and prefill of one token see one model."""
    made = layer(list(INSTANCES[:1]))
    x = torch.randn(200, HIDDEN, device=ref.DEVICE, dtype=torch.float16)
    ids, weights = spread(200), torch.rand(200, TOPK, device=ref.DEVICE)
    results = [run(made, x, ids, weights, plan) for plan in PLANS.values()]
    assert all(ref.error(y, results[0]) < ref.MOE_LIMIT for y in results)


def test_plan_of_the_headline_layer_at_every_decode_size() -> None:
    """Every plan that dispatch may pick is accepted by the operator: no token count falls between two tile classes."""
    gpu = kernels.gpu_of(torch.device("cuda", 0))
    made = kernels.experts(*layer(list(INSTANCES[:1])))
    for tokens in range(1, 300):
        plan = plans.moe_plan(plans.table_for(gpu), gpu, tokens, TOPK, EXPERTS, HIDDEN, INTER, shared_suh=True)
        x = torch.randn(tokens, HIDDEN, device=ref.DEVICE, dtype=torch.float16)
        out = ref.poisoned((tokens, HIDDEN), torch.float16)
        workspace = torch.empty(kernels.moe_workspace(tokens, TOPK, made, plan), dtype=torch.uint8, device=ref.DEVICE)
        kernels.moe_into(
            x, all_to_one(tokens), torch.rand(tokens, TOPK, device=ref.DEVICE), made, LIMIT, plan, out, workspace
        )
        assert not out.isnan().any(), tokens
