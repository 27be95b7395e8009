"""The tiers of the experts' prefill: same sums, and an account that adds up."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from demo import questions, wrong_answers
from exl3_vllm.diagnostics import DIAGNOSTICS, EXL3_FAT_DIAG_KEYS, SCHEMA_1_KEYS, Diagnostics
from exl3_vllm.experts import DecodedExperts, Plan, Scratch, run_experts
from exl3_vllm.tiers import Resolution, resolve

Engine = Callable[..., AbstractContextManager[Any]]

ALL_OFF = dict.fromkeys(("EXL3_FAT_SORTED", "EXL3_FAT_BATCHED", "EXL3_FAT_KERNEL"), "0")

CAP, EXPERTS, HIDDEN, WIDTH, TOP = 8, 4, 32, 16, 2


class Layer:
    """A small layer of experts and its own account."""

    def __init__(self, limit: float | None = None) -> None:
        generator = torch.Generator().manual_seed(3)
        gate_up = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, generator=generator)
        down = torch.randn(EXPERTS, HIDDEN, WIDTH, generator=generator)
        self.weights = DecodedExperts(gate_up, down, limit)
        self.diagnostics = Diagnostics()
        self.scratch = Scratch(self.diagnostics)

    def run(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, plan: Plan) -> torch.Tensor:
        return run_experts(x, weights, ids, self.weights, plan, self.scratch, self.diagnostics)

    def reference(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Every expert on every row, in fp64."""
        out = torch.zeros(x.shape, dtype=torch.float64)
        for expert in range(EXPERTS):
            both = x.double() @ self.weights.gate_up[expert].double().t()
            gate, up = both[:, :WIDTH], both[:, WIDTH:]
            if self.weights.limit is not None:
                gate, up = gate.clamp(max=self.weights.limit), up.clamp(-self.weights.limit, self.weights.limit)
            y = (torch.nn.functional.silu(gate) * up) @ self.weights.down[expert].double().t()
            out += (weights.double() * (ids == expert)).sum(1, keepdim=True) * y
        return out


def tokens(count: int, ids: list[list[int]] | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x, route weights, expert ids): by default experts 0 and 1 take most tokens, 2 and 3 a few each."""
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, HIDDEN, generator=generator)
    if ids is None:
        ids = [[0, 1]] * (count - 3) + [[2, 3]] * 3
    return x, torch.rand(count, TOP, generator=generator), torch.tensor(ids)


def plan_of(tier: str | None, shared: bool = True, row_tile: int = 0) -> Plan:
    return Plan(resolve(tier, shared, ()), CAP, row_tile)


PLANS = {
    "legacy": (plan_of(None), "legacy", "legacy_default"),
    "sorted": (plan_of("sorted"), "sorted", "sorted_ok"),
    "batched": (plan_of("batched"), "batched", "batched_ok"),
    "lost suh": (plan_of("batched", shared=False), "sorted", "degraded_shared_suh"),
    "row tiles": (plan_of("batched", row_tile=5), "row_tile", "row_tile_preempts_fat"),
}


@pytest.mark.parametrize("limit", [None, 0.7])
@pytest.mark.parametrize("name", PLANS)
def test_every_tier_gives_the_same_sums_and_says_what_it_did(name: str, limit: float | None) -> None:
    # given a layer, and a prefill in which two experts of four are fat
    plan, tier, reason = PLANS[name]
    layer, inputs = Layer(limit), tokens(40)
    # when it runs
    got = layer.run(*inputs, plan)
    # then the sums are right
    wanted = layer.reference(*inputs)
    assert torch.linalg.norm(got - wanted) / torch.linalg.norm(wanted) < 1e-6
    # and the account shows the one call, under its tier and reason, with every row
    account = layer.diagnostics.report()
    assert account["prefill_layer_calls"] == 1
    assert account["fallback_calls"] == {tier: 1}
    assert account["fallback_reasons"] == {reason: 1}
    assert account["rows_expected"] == sum(account["rows_handled"].values()) == 80
    assert account["rows_handled"] == ({tier: 80} if tier == "row_tile" else {"thin": 6, tier: 74})
    assert (account["fat_layers"], account["fat_expert_slots"], account["max_rows"]) == (1, 2, 37)
    assert account["fat_expert_runs"] == (2 if tier in ("sorted", "batched") else 0)
    assert (account["direct_calls"], account["scatter_calls"]) == (0, 0)
    assert account["row_tile_calls"] == (tier == "row_tile")
    assert account["fat_scratch_allocs"] == (tier == "batched")
    assert (
        account["fat_scratch_bytes"] == account["fat_scratch_peak_bytes"] == (37 * 32 * 4 if tier == "batched" else 0)
    )


def test_a_prefill_without_fat_experts_is_thin() -> None:
    layer = Layer()
    inputs = tokens(12, [[0, 1], [2, 3]] * 6)
    got = layer.run(*inputs, plan_of("batched"))
    assert torch.allclose(got.double(), layer.reference(*inputs), atol=1e-4)
    account = layer.diagnostics.report()
    assert (account["thin_calls"], account["fallback_reasons"]) == (1, {"thin_only": 1})
    assert account["rows_handled"] == {"thin": 24}


def test_a_decode_call_touches_no_counter_and_inherits_no_label() -> None:
    # given an account with one batched prefill
    layer, plan = Layer(), plan_of("batched")
    layer.run(*tokens(40), plan)
    before = layer.diagnostics.report()
    # when a call of up to `cap` tokens follows, all to the same experts
    inputs = tokens(CAP, [[0, 1]] * CAP)
    got = layer.run(*inputs, plan)
    # then it is right and leaves the account as it was
    assert torch.allclose(got.double(), layer.reference(*inputs), atol=1e-4)
    assert layer.diagnostics.report() == before


def test_experts_of_another_rank_contribute_nothing_and_are_not_counted() -> None:
    layer = Layer()
    inputs = tokens(40, [[0, -1]] * 20 + [[-1, -1]] * 10 + [[2, 1]] * 10)
    for name, (plan, _, _) in PLANS.items():
        layer.diagnostics.reset()
        got = layer.run(*inputs, plan)
        assert torch.allclose(got.double(), layer.reference(*inputs), atol=1e-4), name
        assert layer.diagnostics.report()["rows_expected"] == 40


def test_the_scratch_is_one_buffer_that_only_grows() -> None:
    layer, plan = Layer(), plan_of("batched")
    for count in (40, 30, 60, 60):
        layer.run(*tokens(count), plan)
    account = layer.diagnostics.report()
    assert (account["fat_scratch_allocs"], account["fat_scratch_bytes"]) == (2, 57 * 32 * 4)


def test_the_account_has_exactly_the_keys_of_its_schema() -> None:
    account = Diagnostics().report()
    assert tuple(account) == EXL3_FAT_DIAG_KEYS
    assert (len(SCHEMA_1_KEYS), account["schema"]) == (32, 3)
    assert json.loads(json.dumps(account)) == account


@pytest.mark.parametrize(
    ("environ", "tier", "reason"),
    [
        ({}, "legacy", "legacy_default"),
        (dict.fromkeys(("EXL3_FAT_SORTED", "EXL3_FAT_BATCHED", "EXL3_FAT_KERNEL"), "0"), "legacy", "legacy_default"),
        ({"EXL3_TIER": "sorted"}, "sorted", "sorted_ok"),
        ({"EXL3_TIER": "auto"}, "batched", "batched_ok"),
        ({"EXL3_MOE_ROW_TILE": "3"}, "row_tile", "row_tile_preempts_fat"),
    ],
    ids=["nothing asked", "all flags 0", "sorted by recipe", "auto", "row tiles"],
)
def test_vllm_answers_right_on_every_tier_and_the_receipt_proves_it(
    environ: dict[str, str], tier: str, reason: str, engine: Engine, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    # given a cap so small that the questions make fat experts
    monkeypatch.setenv("EXL3_TEMP_ROWS_FUSED", "4")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    model = models / "demo-moe"
    # when all questions are prefilled in one step, by a fresh account
    with engine(model) as llm:
        DIAGNOSTICS.reset()
        wrong = wrong_answers(llm, model)
    # then the answers are exact, and both layers handled every row of that step on the tier that was asked for
    account = DIAGNOSTICS.report()
    assert wrong == []
    assert (account["moe_layers_loaded"], account["shared_suh_layers"], account["shared_suh"]) == (2, 2, True)
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompt = sum(len(tokenizer(pair["question"]).input_ids) for pair in questions(model))
    handled = account["rows_handled"]
    assert account["fallback_reasons"][reason] >= 2
    assert handled[tier] > 0
    assert sum(handled.values()) == account["rows_expected"] >= 2 * 2 * prompt


def test_a_tier_by_name_that_needs_symbols_is_refused(
    engine: Engine, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from exl3_vllm.errors import TierError

    monkeypatch.setenv("EXL3_TIER", "grouped")
    named = "exl3_fat_moe_gather, exl3_fat_moe_gateup, exl3_fat_moe_down"
    with pytest.raises(TierError, match=named), engine(models / "demo-moe"):
        pass
    monkeypatch.setenv("EXL3_TIER", "none")
    with pytest.raises(TierError, match="unquantised control"), engine(models / "demo-moe"):
        pass


def test_the_plan_is_what_was_resolved() -> None:
    assert PLANS["lost suh"][0].resolution == Resolution("batched", "sorted", "shared_suh_absent")
