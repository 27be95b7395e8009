"""Whether the tier that an arm claims did the work between two receipts of every rank. Pure.

A flag on an image without its symbols once did nothing, and the boot looked healthy; so a claim is what was counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Receipts = Sequence[Mapping[str, Any]]
UNCLAIMED = ("auto", "none")
BELOW = ("thin",)  # rows of experts that were not fat; every tier has them


def faults(before: Receipts, after: Receipts, tier: str) -> list[str]:
    """Why `tier` cannot be said to have run, as sentences without a full stop; empty for `auto` and `none`."""
    if tier in UNCLAIMED:
        return []
    if not after:
        return [f"the tier {tier} is claimed, and no rank has a receipt"]
    start = {receipt["rank"]: receipt for receipt in before}
    if set(start) != {receipt["rank"] for receipt in after}:
        return ["other ranks had receipts before than after"]
    return [fault for receipt in after for fault in _of_rank(start[receipt["rank"]], receipt, tier)]


def _of_rank(before: Mapping[str, Any], after: Mapping[str, Any], tier: str) -> Iterator[str]:
    where = f"rank {after['rank']}"
    if before.get("generation") != after.get("generation") or before.get("pid") != after.get("pid"):
        yield f"{where} was started anew in between"
    if after.get("effective_tier") != tier:
        yield f"{where} runs the tier {after.get('effective_tier')} ({after.get('tier_reason')}), and {tier} is claimed"
    rows = moved(before, after)
    if not rows.get(tier):
        done = ", ".join(f"{name} {count}" for name, count in rows.items()) or "no row at all"
        yield f"{where} handled no row on the tier {tier} while it was measured ({done})"
    for name in sorted(set(rows) - {tier, *BELOW}):
        yield f"{where} handled {rows[name]} rows on the tier {name}, and {tier} is claimed"


def moved(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, int]:
    """Rows by tier between two receipts of one rank, without the tiers that did none."""
    old, new = before.get("rows_handled") or {}, after.get("rows_handled") or {}
    counts = {name: int(count) - int(old.get(name, 0)) for name, count in new.items()}
    return {name: count for name, count in counts.items() if count}
