"""Status: what stands on the nodes, told by the containers' labels and by the running ranks themselves."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import TYPE_CHECKING, Any

from exl3kit import asking, containers, takedown, transport
from exl3kit.errors import KitError

if TYPE_CHECKING:
    from exl3kit.containers import Standing
    from exl3kit.nodes import Node

SERVING, UNREACHABLE = "serving", "unreachable"
ORDER = ("backing-off", "stopping", "waiting", "starting")  # what a gang is called when its ranks differ, worst first
SAMPLE_SECONDS = 2.0  # between two looks at the token counters, which the ranks themselves read every second


def status(
    nodes: Sequence[Node], missing: Mapping[str, KitError], deployment: str | None = None
) -> list[dict[str, Any]]:
    """Every deployment on the nodes (or the named one), with its ranks; `missing` are nodes that do not answer."""
    standing = containers.find(nodes, deployment)
    with ThreadPoolExecutor(max_workers=max(1, 2 * len(standing))) as pool:
        reports = pool.map(rank_status, standing)
        transports = pool.map(lambda one: transport.look_at(one) if one.state == "running" else None, standing)
        ranks = [
            {**told, "transport": None if way is None else way.as_json()}
            for told, way in zip(reports, transports, strict=True)
        ]
    told = []
    for _, members in groupby(zip(standing, ranks, strict=True), key=lambda pair: pair[0].deployment):
        pairs = list(members)
        told.append(of_deployment([one for one, _ in pairs], [rank for _, rank in pairs], missing))
    return told


def of_deployment(
    standing: Sequence[Standing], ranks: list[dict[str, Any]], missing: Mapping[str, KitError]
) -> dict[str, Any]:
    """One deployment as an object; ranks that nodes out of reach may hold are among its ranks."""
    first = standing[0]
    expected = int(first.label("ranks") or 1)
    absent = [absent_rank(rank, first, missing) for rank in takedown.absent_ranks(standing)] if missing else []
    everything = sorted([*ranks, *absent], key=lambda rank: int(rank["rank"]))
    word = state(everything, expected=expected)
    return {
        "deployment": first.deployment,
        "model": first.label("model"),
        "stamp": first.label("stamp"),
        "generation": first.label("generation"),
        "incarnation": max((int(rank["incarnation"] or 0) for rank in ranks), default=0),
        "port": int(first.label("ports").partition(",")[0] or 0),
        "state": word,
        "note": note(word, everything),
        "ranks": everything,
    }


def rank_status(one: Standing) -> dict[str, Any]:
    """One container as an object: what its engine says of it, and where it runs what it says of itself.

    `state` is the rank's own word (backing-off, waiting, starting, serving, stopping, ended), or the engine's when it
    does not run; `unhealthy` is None when the rank is what its role promises.
    """
    told: dict[str, Any] = {
        "rank": one.rank,
        "node": one.node.name,
        "container": str(one.container.name),
        "engine_state": one.state,
        "state": one.state,
        "generation": one.label("generation"),
        "exit_code": None if one.state == "running" else one.exit_code,
        "started": one.container.attrs["State"]["StartedAt"],
        "restarts": one.restarts,
        "unhealthy": f"the container is {one.state}",
        **dict.fromkeys(
            ("role", "incarnation", "since", "why", "progress", "memory", "peers", "processes", "post_mortem")
        ),
        "waiting_for": [],
        "receipts": [],
    }
    if one.state == "running":
        try:
            report = asking.report(one)
        except KitError as error:  # it may end while it is asked, which is a state and no failure of `status`
            return {**told, "state": "silent", "unhealthy": str(error)}
        told |= {key: report[key] for key in told.keys() & report.keys() if key not in ("rank", "restarts")}
    return told


def absent_rank(rank: int, beside: Standing, missing: Mapping[str, KitError]) -> dict[str, Any]:
    """A rank on a node that does not answer: where it was put, told by the labels of one that stands elsewhere."""
    placed = beside.label("nodes").split(",")
    node = placed[rank] if rank < len(placed) and placed[rank] else ", ".join(missing)
    error = missing.get(node)
    why = f"{error.what}" + (f" ({error.why})" if error.why else "") if error else "no node that answers holds it"
    keys = ("container", "exit_code", "started", "restarts", "role", "incarnation", "since", "progress", "memory")
    return {
        "rank": rank,
        "node": node,
        "engine_state": None,
        "state": UNREACHABLE if error or node not in missing else "absent",
        "generation": beside.label("generation"),
        "unhealthy": why,
        "why": why,
        "waiting_for": [],
        "receipts": [],
        **dict.fromkeys((*keys, "transport", "post_mortem")),
    }


def state(ranks: Sequence[dict[str, Any]], *, expected: int) -> str:
    """One word for a deployment of `expected` containers.

    `serving`: all ranks run and are what their roles promise. `mismatch`: they loaded different checkpoints.
    `unreachable`: a rank is on a node that does not answer. `partial`: a rank is missing, or of another generation.
    `stopped`: none runs. Else the worst word of a rank: backing-off, stopping, waiting, starting.
    """
    if any(rank["state"] == UNREACHABLE for rank in ranks):
        return UNREACHABLE
    running = [rank for rank in ranks if rank["engine_state"] == "running"]
    if not running:
        return "backing-off" if any(rank["engine_state"] == "restarting" for rank in ranks) else "stopped"
    if len(ranks) < expected or len({rank["generation"] for rank in ranks}) > 1:
        return "partial"
    if len(running) < expected:
        return "backing-off" if any(rank["engine_state"] == "restarting" for rank in ranks) else "partial"
    loaded = {receipt.get("fingerprint") for rank in running for receipt in rank["receipts"]}
    if len(loaded) > 1:
        return "mismatch"
    if all(rank["unhealthy"] is None for rank in running):
        return SERVING
    return next((word for word in ORDER if any(rank["state"] == word for rank in running)), "starting")


def note(word: str, ranks: Sequence[Mapping[str, Any]]) -> str | None:
    """What an operator should know of this state, None when the word says it all."""
    if word == UNREACHABLE:
        gone = ", ".join(f"rank {rank['rank']} on {rank['node']}" for rank in ranks if rank["state"] == UNREACHABLE)
        return (
            f"{gone} cannot be asked: it may run, and the others end and wait for it when they hear nothing of it; "
            "`kit wait` follows until all serve again"
        )
    if word == "waiting":
        return (
            "; ".join(f"rank {rank['rank']} waits for {waits(rank)}" for rank in ranks if rank["waiting_for"]) or None
        )
    return None


def waits(rank: Mapping[str, Any]) -> str:
    """What a waiting rank says it waits for."""
    return ", ".join(f"rank {one['rank']} ({one['why']})" for one in rank["waiting_for"])


# ---- speed -----------------------------------------------------------------------------------------------------------


class Speeds:
    """Tokens per second of each deployment, from the counters of two looks at it."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, int]] = {}

    def add(self, told: Sequence[dict[str, Any]]) -> None:
        """Put `tokens_per_s` into every deployment: None at the first look, and after its counter began anew."""
        now = time.monotonic()
        for one in told:
            one["tokens_per_s"] = None
            tokens = generated(one)
            before = self._before.pop(one["deployment"], None)
            if tokens is not None:
                if before is not None and tokens >= before[1]:
                    one["tokens_per_s"] = round((tokens - before[1]) / (now - before[0]), 1)
                self._before[one["deployment"]] = (now, tokens)


def generated(one: Mapping[str, Any]) -> int | None:
    """Tokens that a deployment has generated, by its head's counter."""
    for rank in one["ranks"]:
        if rank["progress"] and rank["progress"].get("generation_tokens") is not None:
            return int(rank["progress"]["generation_tokens"])
    return None


def busy(told: Sequence[Mapping[str, Any]]) -> bool:
    """Whether any deployment computes an answer now."""
    return any((rank["progress"] or {}).get("running") for one in told for rank in one["ranks"])
