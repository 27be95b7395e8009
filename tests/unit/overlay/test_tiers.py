"""Every combination of tier, scales, symbols and geometry, through both doors."""

from __future__ import annotations

import itertools

import pytest
from exl3_vllm.errors import SettingError, TierError
from exl3_vllm.settings import Settings
from exl3_vllm.tiers import FLAGS, GROUPED_SYMBOLS, KERNEL_SYMBOLS, TIERS, decide, resolve

ALL = (*KERNEL_SYMBOLS, *GROUPED_SYMBOLS)
SYMBOLS = {"none": (), "kernel": KERNEL_SYMBOLS, "grouped only": GROUPED_SYMBOLS, "all": ALL}
OBSTACLES = (None, "bits", "codebook", "hidden", "intermediate", "device", "capability")

# (configured, shared suh, symbols, obstacle to grouped or "any") -> tier and reason, or the names in the refusal.
# The first line that fits decides.
TABLE: list[tuple[str | None, bool | None, str | None, str | None, tuple[str, str] | tuple[str, ...]]] = [
    (None, None, None, "any", ("legacy", "none_requested")),
    ("legacy", None, None, "any", ("legacy", "legacy_ok")),
    ("sorted", None, None, "any", ("sorted", "sorted_ok")),
    ("batched", False, None, "any", ("sorted", "shared_suh_absent")),
    ("kernel", False, None, "any", ("sorted", "shared_suh_absent")),
    ("grouped", False, None, "any", ("sorted", "shared_suh_absent")),
    ("batched", True, None, "any", ("batched", "batched_ok")),
    ("kernel", True, "none", "any", KERNEL_SYMBOLS),
    ("kernel", True, "grouped only", "any", KERNEL_SYMBOLS),
    ("kernel", True, None, "any", ("kernel", "kernel_ok")),
    ("grouped", True, "none", "any", GROUPED_SYMBOLS),
    ("grouped", True, "kernel", "any", GROUPED_SYMBOLS),
    ("grouped", True, None, None, ("grouped", "grouped_ok")),
    ("grouped", True, "grouped only", "any", KERNEL_SYMBOLS),
    ("grouped", True, "all", "any", ("kernel", "grouped_ineligible_{}:kernel_ok")),
]


def expected(configured: str | None, shared: bool, symbols: str, obstacle: str | None) -> tuple[str, ...]:
    for row in TABLE:
        fits = row[0] == configured and row[1] in (None, shared) and row[2] in (None, symbols)
        if fits and (row[3] == "any" or row[3] == obstacle):
            return tuple(text.format(obstacle) for text in row[4])
    raise AssertionError("the table leaves a combination out")


@pytest.mark.parametrize("obstacle", OBSTACLES)
@pytest.mark.parametrize("symbols", SYMBOLS)
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "apart"])
@pytest.mark.parametrize("configured", [None, *TIERS])
def test_resolution_follows_the_table(configured: str | None, shared: bool, symbols: str, obstacle: str | None) -> None:
    wanted = expected(configured, shared, symbols, obstacle)
    if wanted[0] in TIERS:
        # the flags' door takes what the table gives
        flagged = decide(None, configured, shared, SYMBOLS[symbols], obstacle)
        assert (flagged.tier, flagged.reason) == wanted
        # the recipe's door refuses anything but what it named
        if configured in (None, wanted[0]):
            assert decide(configured, None, shared, SYMBOLS[symbols], obstacle) == flagged
        else:
            with pytest.raises(TierError, match=wanted[0]):
                decide(configured, None, shared, SYMBOLS[symbols], obstacle)
        return
    # a refusal names every missing symbol and the way out, through both doors
    for asked, flagged_tier in ((None, configured), (configured, None)):
        with pytest.raises(TierError) as refusal:
            decide(asked, flagged_tier, shared, SYMBOLS[symbols], obstacle)
        assert all(name in str(refusal.value) for name in wanted)
        assert "kit build" in str(refusal.value)


@pytest.mark.parametrize(
    ("shared", "symbols", "obstacle", "tier"),
    [
        (True, "all", None, "grouped"),
        (True, "all", "bits", "kernel"),
        (True, "kernel", None, "kernel"),
        (True, "grouped only", "bits", "batched"),
        (True, "none", None, "batched"),
        (False, "all", None, "sorted"),
        (False, "none", None, "sorted"),
    ],
)
def test_auto_takes_the_highest_that_resolves(shared: bool, symbols: str, obstacle: str | None, tier: str) -> None:
    assert decide("auto", None, shared, SYMBOLS[symbols], obstacle).tier == tier


def test_lost_scales_come_before_lost_symbols() -> None:
    # without a shared suh no symbol is looked at, even when all are missing
    assert resolve("kernel", False, ()) == resolve("kernel", False, ALL)


@pytest.mark.parametrize("values", list(itertools.product((None, "0", "1"), repeat=4)))
def test_the_highest_flag_wins_and_implies_the_lower_ones(values: tuple[str | None, ...]) -> None:
    environ = {flag: value for flag, value in zip(FLAGS.values(), values, strict=True) if value is not None}
    switched = [tier for tier, value in zip(FLAGS, values, strict=True) if value == "1"]
    assert Settings.from_environ(environ).flagged == (switched[-1] if switched else None)


@pytest.mark.parametrize("value", ["", "off", "on", "yes", "no", "TRUE", "False", "2", " 1", "1 ", "None"])
def test_a_switch_that_is_not_understood_is_refused_by_name(value: str) -> None:
    for name in (*FLAGS.values(), "VLLM_EXL3_GRAPH_DECODE"):
        with pytest.raises(SettingError, match=f"{name}.*Use 0, 1, true or false"):
            Settings.from_environ({name: value})


@pytest.mark.parametrize("value", ["", "x", "-1", "1.5", "0x10", "99999999", "1_0", "٣"])
def test_a_number_that_is_not_understood_is_refused_by_name(value: str) -> None:
    for name in ("EXL3_TEMP_ROWS_FUSED", "EXL3_MOE_ROW_TILE", "VLLM_EXL3_PREFILL_RECONSTRUCT_M"):
        with pytest.raises(SettingError, match=name):
            Settings.from_environ({name: value})


def test_the_other_refusals_and_the_defaults() -> None:
    assert Settings.from_environ({"PATH": "/bin"}) == Settings(None, None, 128, 0, None, True)
    assert Settings.from_environ({"VLLM_EXL3_PREFILL_RECONSTRUCT_M": "0"}).reconstruct_rows == 0
    assert Settings.from_environ({"EXL3_TIER": "auto", "EXL3_FAT_SORTED": "true"}).flagged == "sorted"
    for environ, named in [
        ({"VLLM_EXL3_EXT_PATH": "/somewhere.so"}, "VLLM_EXL3_EXT_PATH"),
        ({"VLLM_EXL3_EXT_PATH": ""}, "VLLM_EXL3_EXT_PATH"),
        ({"EXL3_TIER": "fast"}, "EXL3_TIER"),
        ({"EXL3_TIER": "sorted", "EXL3_FAT_KERNEL": "1"}, "EXL3_TIER"),
        ({"EXL3_TEMP_ROWS_FUSED": "0"}, "EXL3_TEMP_ROWS_FUSED"),
    ]:
        with pytest.raises(SettingError, match=named):
            Settings.from_environ(environ)
