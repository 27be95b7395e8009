"""Status: what stands on the nodes, told by the containers' labels and by the running ranks themselves."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import TYPE_CHECKING, Any

from exl3kit import asking, containers
from exl3kit.errors import KitError

if TYPE_CHECKING:
    from exl3kit.containers import Standing
    from exl3kit.nodes import Node


def status(nodes: Sequence[Node], deployment: str | None = None) -> list[dict[str, Any]]:
    """Every deployment on the nodes (or the named one), with its ranks.

    A deployment's `state` is `serving` when all its ranks run and are healthy, `starting` when all run, `partial` when
    some do, `mismatch` when they loaded different checkpoints, else `stopped`.
    """
    standing = containers.find(nodes, deployment)
    with ThreadPoolExecutor(max_workers=max(1, len(standing))) as pool:
        ranks = list(pool.map(rank_status, standing))
    told = []
    for name, members in groupby(zip(standing, ranks, strict=True), key=lambda pair: pair[0].deployment):
        pairs = list(members)
        first = pairs[0][0]
        told.append(
            {
                "deployment": name,
                "model": first.label("model"),
                "stamp": first.label("stamp"),
                "generation": first.label("generation"),
                "port": int(first.label("ports").partition(",")[0]),
                "state": state([rank for _, rank in pairs], expected=int(first.label("ranks") or 1)),
                "ranks": [rank for _, rank in pairs],
            }
        )
    return told


def state(ranks: Sequence[dict[str, Any]], *, expected: int) -> str:
    """One word for a deployment of `expected` containers."""
    running = [rank for rank in ranks if rank["state"] == "running"]
    if not running:
        return "stopped"
    if len(running) < expected or len({rank["generation"] for rank in ranks}) > 1:
        return "partial"
    loaded = {receipt.get("fingerprint") for rank in running for receipt in rank["receipts"]}
    if len(loaded) > 1:
        return "mismatch"
    return "serving" if all(rank["unhealthy"] is None for rank in running) else "starting"


def rank_status(one: Standing) -> dict[str, Any]:
    """One container as an object; `unhealthy` is None when the rank is what its role promises."""
    told: dict[str, Any] = {
        "rank": one.rank,
        "node": one.node.name,
        "container": str(one.container.name),
        "state": one.state,
        "generation": one.label("generation"),
        "exit_code": None if one.state == "running" else one.exit_code,
        "started": one.container.attrs["State"]["StartedAt"],
        "unhealthy": f"the container is {one.state}",
        "receipts": [],
    }
    if one.state == "running":
        try:
            report = asking.report(one)
            told |= {"unhealthy": report["unhealthy"], "receipts": report["receipts"]}
        except KitError as error:  # it may end while it is asked, which is a state and no failure of `status`
            told["unhealthy"] = str(error)
    return told
