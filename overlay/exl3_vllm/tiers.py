"""The tiers of the experts' prefill, and which of them a deployment gets. Pure: decided once, when weights are loaded.

    legacy < sorted < batched < kernel < grouped; a higher one implies the lower ones

The checkpoint is looked at first: without a shared suh the stacked gate and up can not share one rotated input, so
nothing above sorted is possible, whatever the image holds. Only then are symbols looked at.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from exl3_vllm.errors import TierError

TIERS = ("legacy", "sorted", "batched", "kernel", "grouped")

FLAGS = {
    "sorted": "EXL3_FAT_SORTED",
    "batched": "EXL3_FAT_BATCHED",
    "kernel": "EXL3_FAT_KERNEL",
    "grouped": "EXL3_FAT_GROUPED",
}
"""The environment flag of each tier, lowest first."""

KERNEL_SYMBOLS = ("exl3_fat_gemm", "exl3_fat_gemm_scatter")
GROUPED_SYMBOLS = ("exl3_fat_moe_gather", "exl3_fat_moe_gateup", "exl3_fat_moe_down")

REBUILD = "Build an image with this recipe's rates and codebooks (kit build), or ask for a lower tier"


@dataclass(frozen=True)
class Resolution:
    """The tier that runs, and why it is that one."""

    configured: str | None
    tier: str
    reason: str


def resolve(
    configured: str | None, shared_suh: bool, symbols: Collection[str], grouped_obstacle: str | None = None
) -> Resolution:
    """What a configured tier comes to.

    Parameters
    ----------
    configured: a tier, or None when nothing asked for one.
    shared_suh: gate and up of every expert of every MoE layer have the same input scales.
    symbols: the fat symbols that the loaded kernels hold.
    grouped_obstacle: why the grouped tier can not take this model (bits, codebook, hidden, ...), or None.

    Raises
    ------
    TierError: the tier needs symbols that are missing; the message names every one of them.
    """
    if configured is None:
        return Resolution(None, "legacy", "none_requested")
    if not shared_suh and rank_of(configured) >= rank_of("batched"):
        return Resolution(configured, "sorted", "shared_suh_absent")
    tier, prefix = configured, ""
    if configured == "grouped":
        _need(GROUPED_SYMBOLS, symbols, "grouped")
        if grouped_obstacle is not None:
            tier, prefix = "kernel", f"grouped_ineligible_{grouped_obstacle}:"
    if tier == "kernel":
        _need(KERNEL_SYMBOLS, symbols, "kernel")
    return Resolution(configured, tier, f"{prefix}{tier}_ok")


def highest(shared_suh: bool, symbols: Collection[str], grouped_obstacle: str | None = None) -> Resolution:
    """The highest tier that resolves (`auto`): missing symbols are no error here, they only rule a tier out."""
    for tier in reversed(TIERS):
        try:
            return resolve(tier, shared_suh, symbols, grouped_obstacle)
        except TierError:
            continue
    raise AssertionError("legacy needs no symbol")


def decide(
    asked: str | None,
    flagged: str | None,
    shared_suh: bool,
    symbols: Collection[str],
    grouped_obstacle: str | None = None,
) -> Resolution:
    """The tier of a deployment, through either of two doors.

    A flag (`flagged`) degrades where `resolve` says so, visibly. A tier that the recipe names (`asked`) is delivered
    or refused; `auto` without a flag takes the highest; with neither it is legacy.

    Raises
    ------
    TierError: symbols are missing, or the named tier would have been degraded.
    """
    if flagged is not None:
        return resolve(flagged, shared_suh, symbols, grouped_obstacle)
    if asked == "auto":
        return highest(shared_suh, symbols, grouped_obstacle)
    found = resolve(asked, shared_suh, symbols, grouped_obstacle)
    if asked is not None and found.tier != asked:
        what = f"was asked for, and this checkpoint and image give {found.tier} ({found.reason})"
        raise TierError(f"tier {asked}", what, f"Ask for {found.tier} or auto")
    return found


def rank_of(tier: str) -> int:
    """The place of a tier: a higher one implies the lower ones."""
    return TIERS.index(tier)


def _need(wanted: Collection[str], symbols: Collection[str], tier: str) -> None:
    missing = [name for name in wanted if name not in symbols]
    if missing:
        raise TierError(f"tier {tier}", f"needs {', '.join(missing)}, and the kernels do not hold it", REBUILD)
