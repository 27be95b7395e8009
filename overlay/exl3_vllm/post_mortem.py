"""The death report: what each rank says of an incarnation's end, and which of them died first."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from exl3_vllm.rank_settings import write_json

MARK = "EXL3-POST-MORTEM "  # begins the one line of the log that holds the whole report
NEWEST = "post-mortem.json"
KEPT = 10  # older reports
OWN = (
    "exit",
    "vanished",
    "oom",
    "stopped",
    "stall",
    "start",
    "refused",
    "hung",
    "unfit",
)  # ends that began on the rank itself
VIOLENT = ("oom", "stopped", "hung", "supervisor")  # no consequence of another rank's death, as an exit often is
VIOLENT_S = 5.0  # within which an end by force is taken for the cause of an exit that was noticed before it
BEAT_SLACK_S = 0.8  # a rank whose last beat is not later than this after an exit was gone before it
LINES, LINE_LENGTH = 15, 200  # of each rank's log; every record must fit one datagram


def record(rank: int, kind: str, process: str, sentence: str, at: float, **more: Any) -> dict[str, Any]:
    """What one rank says. `at`: its own monotonic clock; `peer` in `more`: the rank that a derived end began on."""
    return {"rank": rank, "kind": kind, "process": process, "sentence": sentence, "at": at, **more}


def last_lines(lines: list[str], secret: str | None) -> list[str]:
    """The end of a log, short enough for a datagram, without the API key where a program printed it."""
    shown = [line.replace(secret, "***") if secret else line for line in lines]
    return [line[:LINE_LENGTH] for line in shown if line.strip()][-LINES:]


def find_first(
    records: Mapping[int, Mapping[str, Any]], offset: Callable[[int], float], last_heard: Mapping[int, float]
) -> dict[str, Any]:
    """Who died first: of the ranks whose end began on themselves, the earliest on one clock.

    A rank that could no longer say anything is named by the others, who lost it; also when its end took one of their
    processes with it, before its silence was long enough to be noticed.
    """

    def when(one: Mapping[str, Any]) -> float:
        return float(one["at"]) + offset(one["rank"])

    own = sorted((one for one in records.values() if one["kind"] in OWN), key=when)
    if own:
        by_force = [one for one in own if one["kind"] in VIOLENT or one.get("signal") not in (None, "SIGTERM")]
        first = own[0] if not by_force or when(by_force[0]) - when(own[0]) > VIOLENT_S else by_force[0]
        if first["kind"] == "exit" and first not in by_force:
            for rank, heard in last_heard.items():
                if heard <= when(first) + BEAT_SLACK_S:
                    sentence = f"rank {rank} was not heard again; then {first['sentence']} on rank {first['rank']}"
                    return {"rank": rank, "process": "rank", "kind": "silent", "sentence": sentence}
        return {key: first[key] for key in ("rank", "process", "kind", "sentence")}
    derived = min(records.values(), key=when)
    return {
        "rank": derived.get("peer", derived["rank"]),
        "process": derived["process"],
        "kind": derived["kind"],
        "sentence": derived["sentence"],
    }


def compose(
    records: Mapping[int, Mapping[str, Any]],
    *,
    world: int,
    generation: str,
    incarnation: int,
    offset: Callable[[int], float],
    last_heard: Mapping[int, float],
) -> dict[str, Any]:
    """The whole report, as it is written and logged."""
    return {
        "deployment_generation": generation,
        "incarnation": incarnation,
        "written": time.time(),
        "first": find_first(records, offset, last_heard),
        "records": {str(rank): dict(one) for rank, one in sorted(records.items())},
        "missing": [rank for rank in range(world) if rank not in records],
    }


def save(report: Mapping[str, Any], folder: Path) -> str | None:
    """Write the report as the newest, keeping some older ones; why that failed, or None (a full disk ends no gang)."""
    try:
        write_json(folder / f"post-mortem-{report['incarnation']:06d}.json", report)
        write_json(folder / NEWEST, report)
        for old in sorted(folder.glob("post-mortem-*.json"))[:-KEPT]:
            old.unlink()
    except OSError as error:
        return f"cannot write the post-mortem to {folder}: {error.strerror}"
    return None


def newest(folder: Path) -> dict[str, Any] | None:
    with suppress(OSError, ValueError):
        return dict(json.loads((folder / NEWEST).read_text(encoding="utf-8")))
    return None


def line(report: Mapping[str, Any]) -> str:
    return MARK + json.dumps(report, sort_keys=True)
