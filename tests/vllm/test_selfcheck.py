"""The self-check passes, and fails for each planted fault."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from exl3_vllm import diagnostics, experts, selfcheck_tiers, tiers
from exl3_vllm.diagnostics import Window


def test_it_passes() -> None:
    assert selfcheck_tiers.problems() == []


def plant_missing_key(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(diagnostics, "EXL3_FAT_DIAG_KEYS", diagnostics.EXL3_FAT_DIAG_KEYS[:-1])


def plant_other_schema(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(diagnostics, "EXL3_FAT_DIAG_SCHEMA", 2)


def plant_symbols_before_scales(patch: pytest.MonkeyPatch) -> None:
    def resolve(configured: str, shared: bool, symbols: object, obstacle: str | None = None) -> tiers.Resolution:
        original(configured, True, symbols, obstacle)
        return original(configured, shared, symbols, obstacle)

    original = tiers.resolve
    patch.setattr(selfcheck_tiers, "resolve", resolve)


def plant_silent_fallback(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tiers, "_need", lambda wanted, symbols, tier: None)


def plant_unnamed_symbol(patch: pytest.MonkeyPatch) -> None:
    def need(wanted: object, symbols: object, tier: str) -> None:
        if not set(wanted) <= set(symbols):  # type: ignore[call-overload]
            raise tiers.TierError(f"tier {tier}", "lacks something", "Think")

    patch.setattr(tiers, "_need", need)


def plant_wrong_sums(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        experts.DecodedExperts, "swiglu", lambda self, gate, up: gate * up.sigmoid() if up.stride(0) > 16 else gate
    )


def plant_sticky_label(patch: pytest.MonkeyPatch) -> None:
    """A label that survives from one call to the next."""
    seen: list[tuple[str, str]] = []
    original = experts.label

    def label(plan: experts.Plan, any_fat: bool) -> tuple[str, str]:
        seen.append(original(plan, any_fat))
        return seen[0] if len(seen) > 1 else seen[-1]

    patch.setattr(experts, "label", label)


def plant_counting_decode(patch: pytest.MonkeyPatch) -> None:
    original = experts._Call.present

    def present(self: experts._Call) -> object:
        self.scratch._diagnostics.window.prefill_layer_calls += 1
        return original(self)

    patch.setattr(experts._Call, "present", present)


def plant_no_growth(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(diagnostics.Diagnostics, "scratch_grew", lambda self, nbytes: None)


def plant_off_by_one(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """A counter that starts at one."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = Window.__init__

        def init(self: Window, *arguments: object, **named: object) -> None:
            original(self, *arguments, **named)  # type: ignore[arg-type]
            setattr(self, name, getattr(self, name) + 1)

        patch.setattr(Window, "__init__", init)

    plant.__name__ = name
    return plant


COUNTERS = (
    "prefill_layer_calls",
    "thin_calls",
    "row_tile_calls",
    "fat_expert_runs",
    "direct_calls",
    "scatter_calls",
    "fat_scratch_allocs",
    "fat_stat_layers",
    "fat_layers",
    "fat_expert_slots",
    "rows_expected",
)


@pytest.mark.parametrize(
    "plant",
    [
        plant_missing_key,
        plant_other_schema,
        plant_symbols_before_scales,
        plant_silent_fallback,
        plant_unnamed_symbol,
        plant_wrong_sums,
        plant_sticky_label,
        plant_counting_decode,
        plant_no_growth,
        *(plant_off_by_one(name) for name in COUNTERS),
    ],
    ids=lambda plant: plant.__name__,
)
def test_it_fails_for_a_planted_fault(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    try:
        told = selfcheck_tiers.problems()
    except tiers.TierError as error:
        told = [str(error)]
    assert told
