"""The account of what the experts did: which tier ran, for how many rows, and what it took.

Counters are added after the work they count, in rows, and only by prefill calls; a decode call touches none. Nothing
here is printed per call: `receipt` writes the whole account to a file now and then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from exl3_vllm.tiers import GROUPED_SYMBOLS, KERNEL_SYMBOLS, Resolution

EXL3_FAT_DIAG_SCHEMA = 3
"""1: the 32 keys that the fat-expert patches of the field report. 3: those and ours. A changed key set raises it."""

SCHEMA_1_KEYS = (
    "schema", "configured_tier", "effective_tier", "tier_reason",
    "shared_suh", "shared_suh_layers", "moe_layers_loaded",
    "sym_exl3_moe", "sym_fat_gemm", "sym_fat_gemm_scatter",
    "cap_major", "cap_minor", "cap_ok", "tp_rank", "tp_size",
    "fused_temps_allocs", "fused_temps_bytes",
    "fat_scratch_allocs", "fat_scratch_bytes", "fat_scratch_peak_bytes",
    "prefill_layer_calls", "thin_calls", "row_tile_calls", "fallback_calls", "fallback_reasons",
    "fat_expert_runs", "direct_calls", "scatter_calls",
    "fat_stat_layers", "fat_layers", "fat_expert_slots", "max_rows",
)  # fmt: skip

OUR_KEYS = (
    "sym_fat_moe", "grouped_calls", "grouped_scratch_bytes", "grouped_eligible",
    "rows_handled", "rows_expected", "backend", "kernel_targets", "arena_bytes", "stamp", "rank", "generation",
)  # fmt: skip

EXL3_FAT_DIAG_KEYS = SCHEMA_1_KEYS + OUR_KEYS


@dataclass
class Facts:
    """What is fixed once the weights are loaded."""

    resolution: Resolution = field(default_factory=lambda: Resolution(None, "legacy", "none_requested"))
    grouped_obstacle: str | None = None
    moe_layers: int = 0
    shared_suh_layers: int = 0
    symbols: frozenset[str] = frozenset()
    capability: tuple[int, int] = (-1, -1)
    tp_rank: int = -1
    tp_size: int = 1
    backend: str = "cpu"
    kernel_targets: tuple[str, ...] = ()
    stamp: str | None = None
    rank: int = 0
    generation: str | None = None


@dataclass
class Window:
    """What has been counted since the last reset."""

    prefill_layer_calls: int = 0
    thin_calls: int = 0
    row_tile_calls: int = 0
    fat_expert_runs: int = 0
    direct_calls: int = 0
    scatter_calls: int = 0
    grouped_calls: int = 0
    fat_scratch_allocs: int = 0
    fused_temps_allocs: int = 0
    fat_stat_layers: int = 0
    fat_layers: int = 0
    fat_expert_slots: int = 0
    max_rows: int = 0
    rows_expected: int = 0
    calls_by_tier: Counter[str] = field(default_factory=Counter)
    calls_by_reason: Counter[str] = field(default_factory=Counter)
    rows_by_tier: Counter[str] = field(default_factory=Counter)

    def add_call(self, tier: str, reason: str, rows: Mapping[str, int], largest: int, fat_experts: int) -> None:
        """One prefill call of one layer is done: its label, the rows that each tier handled, the fattest expert."""
        self.prefill_layer_calls += 1
        self.thin_calls += reason == "thin_only"
        self.row_tile_calls += tier == "row_tile"
        self.calls_by_tier[tier] += 1
        self.calls_by_reason[reason] += 1
        self.rows_by_tier.update({name: count for name, count in rows.items() if count})
        self.rows_expected += sum(rows.values())
        self.fat_stat_layers += 1
        self.fat_layers += fat_experts > 0
        self.fat_expert_slots += fat_experts
        self.max_rows = max(self.max_rows, largest)

    def add_launched_call(self, tier: str, reason: str, rows: int) -> None:
        """One prefill call of one layer was launched on a GPU. Nothing is looked at on the host, so rows are counted as
        they were routed, and fat experts not at all."""
        self.prefill_layer_calls += 1
        self.grouped_calls += tier == "grouped"
        self.row_tile_calls += tier == "row_tile"
        self.calls_by_tier[tier] += 1
        self.calls_by_reason[reason] += 1
        self.rows_by_tier[tier] += rows
        self.rows_expected += rows


@dataclass
class Diagnostics:
    """Facts, counters, and the bytes that scratch buffers hold now and held at most."""

    facts: Facts = field(default_factory=Facts)
    window: Window = field(default_factory=Window)
    fat_scratch_bytes: int = 0
    fat_scratch_peak_bytes: int = 0
    fused_temps_bytes: int = 0
    arena_bytes: int = 0

    def scratch_grew(self, nbytes: int) -> None:
        """The prefill scratch was allocated anew with `nbytes`."""
        self.window.fat_scratch_allocs += 1
        self.fat_scratch_bytes = nbytes
        self.fat_scratch_peak_bytes = max(self.fat_scratch_peak_bytes, nbytes)
        self.arena_bytes = nbytes

    def reset(self) -> None:
        """Begin a new window; facts and buffers stay."""
        self.window = Window()
        self.fat_scratch_peak_bytes = self.fat_scratch_bytes

    def report(self) -> dict[str, Any]:
        """Every key of the schema, JSON-ready."""
        facts, window = self.facts, self.window
        values: dict[str, Any] = {
            "schema": EXL3_FAT_DIAG_SCHEMA,
            "configured_tier": facts.resolution.configured,
            "effective_tier": facts.resolution.tier,
            "tier_reason": facts.resolution.reason,
            "shared_suh": 0 < facts.moe_layers == facts.shared_suh_layers,
            "shared_suh_layers": facts.shared_suh_layers,
            "moe_layers_loaded": facts.moe_layers,
            "sym_exl3_moe": "exl3_moe" in facts.symbols,
            "sym_fat_gemm": KERNEL_SYMBOLS[0] in facts.symbols,
            "sym_fat_gemm_scatter": KERNEL_SYMBOLS[1] in facts.symbols,
            "sym_fat_moe": all(name in facts.symbols for name in GROUPED_SYMBOLS),
            "cap_major": facts.capability[0],
            "cap_minor": facts.capability[1],
            "cap_ok": facts.capability >= (8, 0),
            "tp_rank": facts.tp_rank,
            "tp_size": facts.tp_size,
            "fused_temps_bytes": self.fused_temps_bytes,
            "fat_scratch_bytes": self.fat_scratch_bytes,
            "fat_scratch_peak_bytes": self.fat_scratch_peak_bytes,
            "arena_bytes": self.arena_bytes,
            "grouped_scratch_bytes": 0,
            "grouped_eligible": facts.grouped_obstacle is None,
            "fallback_calls": dict(sorted(window.calls_by_tier.items())),
            "fallback_reasons": dict(sorted(window.calls_by_reason.items())),
            "rows_handled": dict(sorted(window.rows_by_tier.items())),
            "backend": facts.backend,
            "kernel_targets": list(facts.kernel_targets),
            "stamp": facts.stamp,
            "rank": facts.rank,
            "generation": facts.generation,
        }
        counted = {name: getattr(window, name) for name in EXL3_FAT_DIAG_KEYS if name not in values}
        return {name: {**values, **counted}[name] for name in EXL3_FAT_DIAG_KEYS}


DIAGNOSTICS = Diagnostics()
"""The account of this process: a rank serves one deployment."""


def exl3_fat_diag() -> dict[str, Any]:
    """The account of this rank; keys `EXL3_FAT_DIAG_KEYS`."""
    return DIAGNOSTICS.report()


def reset_exl3_fat_diag_counters() -> None:
    """Begin a new counting window."""
    DIAGNOSTICS.reset()
