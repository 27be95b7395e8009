"""The tiers and their account, checked where they will run: the map from request to tier, then one layer that is run.

Static: the schema of the receipt, and every rule of the tier map, with the order in which rules apply. Dynamic: a fat
prefill from a cleared window with every counter foretold; a decode call that must leave the account alone; lost scales
and row tiles that must show. Each expectation is a sentence when it is not met.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exl3_vllm import diagnostics
from exl3_vllm.diagnostics import Diagnostics
from exl3_vllm.errors import TierError
from exl3_vllm.experts import DecodedExperts, Plan, Scratch, run_experts
from exl3_vllm.tiers import GROUPED_SYMBOLS, KERNEL_SYMBOLS, resolve

KEYS = 44
CAP, EXPERTS, HIDDEN, WIDTH = 8, 4, 32, 16
TOKENS, FAT_ROWS, THIN_ROWS = 40, 37, 3  # two experts get 37 rows each, two get 3 each


def wrong_schema() -> Iterator[str]:
    """The receipt has exactly the keys of its schema, and says which schema it is."""
    account = Diagnostics().report()
    if tuple(account) != diagnostics.EXL3_FAT_DIAG_KEYS or len(account) != KEYS or account["schema"] != 3:
        yield f"the receipt has schema {account.get('schema')} with {len(account)} keys, expected 3 with {KEYS}"


def wrong_tier_map() -> Iterator[str]:
    """Rules and their order: scales before symbols, all missing symbols named, obstacles to grouped shown."""
    everything = (*KERNEL_SYMBOLS, *GROUPED_SYMBOLS)
    rules: list[tuple[tuple[Any, ...], tuple[str, str]]] = [
        ((None, True, everything), ("legacy", "none_requested")),
        (("legacy", False, ()), ("legacy", "legacy_ok")),
        (("sorted", False, ()), ("sorted", "sorted_ok")),
        (("batched", False, everything), ("sorted", "shared_suh_absent")),
        (("kernel", False, ()), ("sorted", "shared_suh_absent")),
        (("grouped", False, ()), ("sorted", "shared_suh_absent")),
        (("batched", True, ()), ("batched", "batched_ok")),
        (("kernel", True, KERNEL_SYMBOLS), ("kernel", "kernel_ok")),
        (("grouped", True, everything), ("grouped", "grouped_ok")),
        (("grouped", True, everything, "bits"), ("kernel", "grouped_ineligible_bits:kernel_ok")),
    ]
    for arguments, wanted in rules:
        found = resolve(*arguments)
        if (found.tier, found.reason) != wanted:
            yield f"resolve{arguments} gives {found.tier}, {found.reason}; expected {', '.join(wanted)}"
    for tier, needed in (("kernel", KERNEL_SYMBOLS), ("grouped", GROUPED_SYMBOLS)):
        for absent in needed:
            yield from _must_refuse(tier, [name for name in everything if name != absent], absent)


def _must_refuse(tier: str, symbols: list[str], absent: str) -> Iterator[str]:
    try:
        found = resolve(tier, True, symbols)
    except TierError as error:
        if absent not in str(error):
            yield f"tier {tier} without {absent} is refused without naming it"
    else:
        yield f"tier {tier} without {absent} resolves to {found.tier} instead of a refusal"


@dataclass
class _Rehearsal:
    """One layer with its own account."""

    experts: DecodedExperts
    account: Diagnostics
    scratch: Scratch

    @classmethod
    def make(cls) -> _Rehearsal:
        generator = torch.Generator().manual_seed(5)
        gate_up = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, generator=generator, dtype=torch.float32)
        down = torch.randn(EXPERTS, HIDDEN, WIDTH, generator=generator, dtype=torch.float32)
        account = Diagnostics()
        return cls(DecodedExperts(gate_up, down, None), account, Scratch(account))

    def run(self, tokens: int, tier: str, *, shared_suh: bool = True, row_tile: int = 0) -> Tensor:
        """A call whose last three tokens go to experts 2 and 3, all others to 0 and 1."""
        x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(6), dtype=torch.float32)
        ids = torch.tensor([[0, 1]] * (tokens - THIN_ROWS) + [[2, 3]] * THIN_ROWS)
        weights = torch.full(ids.shape, 0.5, dtype=torch.float32)
        plan = Plan(resolve(tier, shared_suh, ()), CAP, row_tile)
        return run_experts(x, weights, ids, self.experts, plan, self.scratch, self.account)


def wrong_account() -> Iterator[str]:
    """What one layer does, against what it must say."""
    layer = _Rehearsal.make()
    reference = layer.run(TOKENS, "legacy")
    layer.account.reset()
    batched = layer.run(TOKENS, "batched")
    if not torch.allclose(batched, reference, rtol=1e-4, atol=1e-4):
        yield "the batched tier computes other values than the legacy tier"
    scratch = FAT_ROWS * 2 * WIDTH * 4
    first = layer.account.report()
    yield from _differing("a batched prefill", first, {
        "prefill_layer_calls": 1, "fallback_calls": {"batched": 1}, "fallback_reasons": {"batched_ok": 1},
        "thin_calls": 0, "row_tile_calls": 0, "fat_expert_runs": 2, "direct_calls": 0, "scatter_calls": 0,
        "fat_stat_layers": 1, "fat_layers": 1, "fat_expert_slots": 2, "max_rows": FAT_ROWS,
        "fat_scratch_allocs": 1, "fat_scratch_bytes": scratch, "fat_scratch_peak_bytes": scratch,
        "rows_expected": 2 * TOKENS, "rows_handled": {"batched": 2 * FAT_ROWS, "thin": 2 * THIN_ROWS},
    })  # fmt: skip
    layer.run(CAP, "batched")
    if layer.account.report() != first:
        yield "a decode call changed the account of prefill"
    layer.account.reset()
    layer.run(TOKENS, "batched", shared_suh=False)
    yield from _differing("a prefill without shared scales", layer.account.report(), {
        "fallback_calls": {"sorted": 1}, "fallback_reasons": {"degraded_shared_suh": 1}, "direct_calls": 0,
        "fat_expert_runs": 2, "rows_handled": {"sorted": 2 * FAT_ROWS, "thin": 2 * THIN_ROWS},
    })  # fmt: skip
    layer.account.reset()
    layer.run(TOKENS, "batched", row_tile=5)
    yield from _differing("a prefill in row tiles", layer.account.report(), {
        "row_tile_calls": 1, "fallback_calls": {"row_tile": 1}, "fallback_reasons": {"row_tile_preempts_fat": 1},
        "fat_expert_runs": 0, "rows_handled": {"row_tile": 2 * TOKENS},
    })  # fmt: skip


def _differing(what: str, account: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[str]:
    for key, value in wanted.items():
        if account.get(key) != value:
            yield f"{what} reports {key} = {account.get(key)!r}, expected {value!r}"


def problems() -> list[str]:
    """Every expectation that is not met, as a sentence."""
    return [*wrong_schema(), *wrong_tier_map(), *wrong_account()]
