"""The tiers' self-check on a GPU: nothing to say about the plugin, and a sentence about each planted fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exl3_vllm import expert_loops, gpu, selfcheck_gpu
from exl3_vllm.diagnostics import Diagnostics, Window
from exl3_vllm.experts import Scratch

Fault = Callable[[pytest.MonkeyPatch], None]


def test_vllm_selfcheck_finds_nothing() -> None:
    assert selfcheck_gpu.problems() == []


def wrap(patch: pytest.MonkeyPatch, owner: Any, name: str, change: Callable[[Any], Callable[..., Any]]) -> None:
    patch.setattr(owner, name, change(getattr(owner, name)))


def counts_thin_experts_as_fat(patch: pytest.MonkeyPatch) -> None:
    def change(add: Any) -> Callable[..., None]:
        return lambda self, tier, reason, rows, most, fat: add(self, tier, reason, rows, most, fat + 2)

    wrap(patch, Window, "add_call", change)


def leaves_an_expert_out(patch: pytest.MonkeyPatch) -> None:
    wrap(
        patch,
        expert_loops.FatExperts,
        "run",
        lambda run: lambda self, t, x, i, w, fat, out: run(self, t, x, i, w, fat[1:], out),
    )


def allocates_each_time(patch: pytest.MonkeyPatch) -> None:
    def change(take: Any) -> Callable[..., Any]:
        def anew(self: Scratch, *arguments: Any) -> Any:
            self._buffer = None
            return take(self, *arguments)

        return anew

    wrap(patch, Scratch, "take", change)


def counts_decode(patch: pytest.MonkeyPatch) -> None:
    def change(run: Any) -> Callable[..., Any]:
        def counted(self: Any, x: Any, weights: Any, ids: Any, plan: Any, account: Diagnostics) -> Any:
            account.window.prefill_layer_calls += x.shape[0] <= plan.cap
            return run(self, x, weights, ids, plan, account)

        return counted

    wrap(patch, gpu.PackedExperts, "run", change)


def keeps_the_label(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gpu, "label", lambda plan, fat: ("kernel", "kernel_ok"))


def counts_one_call_too_many(patch: pytest.MonkeyPatch) -> None:
    def change(run: Any) -> Callable[..., Any]:
        def counted(self: Any, x: Any, weights: Any, ids: Any, plan: Any, account: Diagnostics) -> Any:
            account.window.direct_calls += plan.resolution.tier == "kernel"
            return run(self, x, weights, ids, plan, account)

        return counted

    wrap(patch, gpu.PackedExperts, "run", change)


def drops_the_route_weight(patch: pytest.MonkeyPatch) -> None:
    def change(fused: Any) -> Callable[..., None]:
        return lambda self, expert, rows, tokens, weights, out: fused(self, expert, rows, tokens, weights * 0 + 1, out)

    wrap(patch, expert_loops.FatExperts, "_fused", change)


def captures_anything(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


FAULTS: dict[Fault, str] = {
    counts_thin_experts_as_fat: "fat_expert_slots = 4, expected 2",
    leaves_an_expert_out: "",
    allocates_each_time: "fat_scratch_allocs",
    counts_decode: "a decode call changed the account",
    keeps_the_label: "fallback_reasons = {'kernel_ok': 1}, expected {'row_tile_preempts_fat': 1}",
    counts_one_call_too_many: "direct_calls = 3, expected 2",
    drops_the_route_weight: "the kernel tier is",
    captures_anything: "a capture of the",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_vllm_selfcheck_sees_a_planted_fault(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    try:
        told = selfcheck_gpu.problems()
    except RuntimeError as error:
        told = [str(error)]
    assert any(FAULTS[fault] in sentence for sentence in told), told
