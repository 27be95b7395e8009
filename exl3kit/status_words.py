"""What `kit status` and the page of `kit dash` say of a rank, in a few words each; a dash where it tells nothing.

Every function takes a rank as `exl3kit.status.status` gives it. Pure, but for the clock.
"""

from __future__ import annotations

import time
from typing import Any

from exl3kit import status
from exl3kit.deploy_lock import age


def since(rank: dict[str, Any]) -> str:
    return age(max(0, int(time.time() - rank["since"]))) if rank["since"] else "-"


def requests(rank: dict[str, Any]) -> str:
    """`2 run, 1 waits, moved 0.4 s ago`; a headless rank has none."""
    progress = rank["progress"]
    if not progress or progress.get("running") is None:
        return "-"
    said = f"{progress['running']:.0f} run"
    if progress.get("waiting"):
        said += f", {progress['waiting']:.0f} wait"
    if progress["running"] or progress.get("waiting"):
        said += f", moved {progress['last_progress_s']:.0f} s ago"
    return said


def kv(rank: dict[str, Any]) -> str:
    usage = (rank["progress"] or {}).get("kv_usage")
    return "-" if usage is None else f"{usage:.0%}"


def memory(rank: dict[str, Any]) -> str:
    """What the machine has left, and how much of the time something waited for memory when that is any."""
    told = rank["memory"] or {}
    if told.get("available") is None:
        return "-"
    pressure = told.get("psi_some_avg10") or 0
    return f"{told['available'] / (1 << 30):.1f} GiB free" + (f", pressure {pressure:.0f} %" if pressure >= 1 else "")


def receipts(rank: dict[str, Any]) -> str:
    held = sum(receipt["trellis_bytes"] for receipt in rank["receipts"])
    tiers = sorted({str(receipt.get("effective_tier")) for receipt in rank["receipts"]})
    return f"{held / 1e6:.1f} MB trellis, {'/'.join(tiers)}" if rank["receipts"] else "-"


def remark(rank: dict[str, Any]) -> str:
    if rank["waiting_for"]:
        return f"waits for {status.waits(rank)}"
    said = rank["why"] or rank["unhealthy"] or ""
    said = "" if said == rank["state"] else said
    return said + (f" ({rank['restarts']} restarts)" if rank["restarts"] else "")
