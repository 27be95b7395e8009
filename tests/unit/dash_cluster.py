"""Machines that serve the demo, played for the page: what an engine lists and what a rank's container answers.

The rest is real: the gatherer, `status` and `transport`, the rank's own words (`exl3_vllm`), and the receipts, which a
gang of two wrote (docs/receipts). The other figures are made up.
"""

from __future__ import annotations

import io
import json
import math
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "overlay"))

from exl3_vllm import post_mortem, watch

from exl3kit import asking
from exl3kit.cluster import Host
from exl3kit.containers import Standing
from exl3kit.dash.asker import Ask, Asker
from exl3kit.dash.gather import Gatherer
from exl3kit.dash.last_bench import LastBench
from exl3kit.dash.server import Server
from exl3kit.dash.watcher import Times
from exl3kit.deployment import LABEL
from exl3kit.errors import ExitCode, KitError
from exl3kit.nodes import Node

REPOSITORY = Path(__file__).resolve().parents[2]
CAMPAIGN = REPOSITORY / "docs" / "receipts" / "demo-tp2-prefill" / "campaign.jsonl"
KEY = "sk-planted-0123456789abcdef"  # wherever a key could be; the page must not have it
WAIT = 5.0
QUICK = Times(period=0.05, retry=0.05, silent=WAIT, interest=0.5)
RATE = 40.0  # tokens per second, more or less
TTFT = 0.25
METRICS = """# HELP vllm:time_to_first_token_seconds Histogram of time to first token in seconds.
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{engine="0",le="+Inf",model_name="demo"}} {count}
vllm:time_to_first_token_seconds_count{{engine="0",model_name="demo"}} {count}
vllm:time_to_first_token_seconds_sum{{engine="0",model_name="demo"}} {total}
vllm:generation_tokens_total{{engine="0",model_name="demo"}} {count}
"""


@cache
def recorded() -> list[dict[str, Any]]:
    """The receipts of both ranks, as a real gang wrote them."""
    lines = (json.loads(line) for line in CAMPAIGN.read_text().splitlines())
    return next(list(line["receipts"]) for line in lines if line["record"] == "boot")


@dataclass
class PlayedRank:
    """One container; `state` is the rank's own word, `engine` docker's."""

    rank: int
    ranks: int = 2
    state: str = "serving"
    engine: str = "running"
    deployment: str = "demo-tp2"
    generation: str = "20261130T145600.179728Z"
    death: dict[str, Any] | None = None
    receipt: dict[str, Any] = field(default_factory=dict)
    begun: float = field(default_factory=lambda: time.monotonic() - 10)

    def report(self) -> dict[str, Any]:
        """What `exl3_vllm.rank --report` prints."""
        other = 1 - self.rank
        waiting = [{"rank": other, "why": "was not heard for 9 s"}] if self.state == "waiting" else []
        memory = {"available": (18 - self.rank) << 30, "psi_some_avg10": 3.2 * self.rank, "limit": None,
                  "used": 2 << 30, "oom_kills": 0}  # fmt: skip
        assert memory.keys() == watch.memory().keys()
        return {
            "rank": self.rank, "role": "headless" if self.rank else "head", "generation": self.generation,
            "incarnation": 3, "since": time.time() - 754, "beat": time.time(), "state": self.state,
            "waiting_for": waiting, "why": None, "progress": None if self.rank else self.progress(), "memory": memory,
            "peers": [{"rank": other, "state": "serving", "silent_s": 0.2}], "processes": [], "restarts": 0,
            "unhealthy": None if self.state == "serving" else f"waits for rank {other}", "post_mortem": self.death,
            "receipts": [{**recorded()[self.rank], **self.receipt}],
        }  # fmt: skip

    def progress(self) -> dict[str, Any]:
        now = time.monotonic()
        told = watch.Progress(now)
        sample = {"running": 2.0, "waiting": 1.0, "generation_tokens": self.tokens(), "prompt_tokens": 900.0}
        told.take({**sample, "kv_usage": 0.31}, now)
        return told.report(now)

    def tokens(self) -> int:
        seconds = time.monotonic() - self.begun
        return round(seconds * RATE + RATE / 2 * math.sin(seconds))

    def metrics(self) -> str:
        count = self.tokens()
        return METRICS.format(count=count, total=count * TTFT)

    def container(self) -> Any:
        labels = {"deployment": self.deployment, "rank": str(self.rank), "ranks": str(self.ranks), "model": "demo",
                  "generation": self.generation, "stamp": str(recorded()[0]["stamp"]), "ports": "8000,18000,28000",
                  "nodes": ",".join(f"node{number + 1}" for number in range(self.ranks))}  # fmt: skip
        attrs = {
            "State": {"StartedAt": "2026-11-30T14:56:03Z", "ExitCode": 137}, "RestartCount": 0,
            "HostConfig": {"DeviceRequests": None}, "Config": {"Env": [f"VLLM_API_KEY={KEY}"]},
        }  # fmt: skip
        name = f"exl3kit-{self.deployment}-rank{self.rank}"
        return SimpleNamespace(
            id=f"{self.deployment}/{self.rank}", name=name, status=self.engine, attrs=attrs, played=self,
            labels={LABEL + key: value for key, value in labels.items()}, get_archive=self.archive,
        )  # fmt: skip

    def archive(self, path: str) -> tuple[list[bytes], dict[str, Any]]:
        """The post-mortem in the container, as docker hands files out."""
        data, packed = json.dumps(self.death).encode(), io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            member = tarfile.TarInfo(Path(path).name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        return [packed.getvalue()], {}


def death(sentence: str = "worker TP1 ended with signal SIGKILL") -> dict[str, Any]:
    """A post-mortem as the ranks compose it: rank 1 was first, and a program of it printed a key and a prompt."""
    lines = ["INFO a prompt of a user", f"Authorization: Bearer {KEY}"]
    records = {
        1: post_mortem.record(1, "exit", "worker TP1", sentence, 10.0, exit_code=None, signal="SIGKILL", lines=lines),
        0: post_mortem.record(0, "gone", "rank", "rank 1 ended", 10.5, peer=1, exit_code=None, signal=None, lines=[]),
    }
    return post_mortem.compose(
        records, world=2, generation="20261130T145600.179728Z", incarnation=2, offset=lambda rank: 0.0, last_heard={}
    )


@dataclass
class Played:
    """Nodes by name with their ranks.

    `errors`: nodes that do not answer; `hung`: nodes whose questions stay open; `named`: the one deployment that is
    looked at; `kept`: the post-mortem that `kit down` left on every node; `asked`: how often nodes were asked.
    """

    nodes: dict[str, list[PlayedRank]]
    errors: dict[str, KitError] = field(default_factory=dict)
    hung: dict[str, threading.Event] = field(default_factory=dict)
    named: str | None = None
    kept: dict[str, Any] | None = None
    asked: int = 0

    @contextmanager
    def opened(self, host: Host, deployment: str | None) -> Iterator[Ask]:
        """In the place of `exl3kit.dash.asker.opened`."""
        if host.name in self.errors:
            raise self.errors[host.name]
        engine: Any = SimpleNamespace(containers=SimpleNamespace(list=lambda **_: self.listed(host.name)))

        def run(argv: list[str], **_: Any) -> Any:
            return SimpleNamespace(stdout=json.dumps(self.kept) if self.kept else "", returncode=0)

        address = f"10.77.6.{host.name[-1]}"
        yield Asker(Node(host.name, engine, "unix:///played", address, False, run, None), deployment).ask  # type: ignore[arg-type]

    def listed(self, name: str) -> list[Any]:
        self.asked += 1
        if name in self.hung:
            self.hung[name].wait()
        if name in self.errors:
            raise self.errors[name]
        return [rank.container() for rank in self.nodes[name]]

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Programs in containers answer as long as this lasts."""
        with mock.patch.object(asking, "run", program):
            yield


def program(rank: Standing, argv: list[str], *, patience: float) -> dict[str, Any]:
    """In the place of `asking.run`: what the program in the container would print."""
    played: PlayedRank = rank.container.played  # type: ignore[attr-defined]
    if "--report" in argv:
        return played.report()
    if "--ask" in argv:
        serves = played.state == "serving"
        return {"status": 200 if serves else 0, "seconds": 0.01, "waited": 0.0, "answer": played.metrics()}
    there = f"10.77.6.{2 - played.rank}"
    return {"nccl": [], "connections": [["eth0", 40000, there]], "counters": {}, "debug": None}


def two_nodes() -> Played:
    """A gang of two that serves."""
    return Played({"node1": [PlayedRank(0)], "node2": [PlayedRank(1)]})


def gone(name: str) -> KitError:
    return KitError(
        "the node does not answer", where=f"node {name}", why="ssh says: Connection timed out",
        next_step=f"check that it is switched on and `ping {name}`", code=ExitCode.UNREACHABLE,
    )  # fmt: skip


@contextmanager
def served(played: Played, *, times: Times = QUICK, bench: Path = Path("nowhere")) -> Iterator[Server]:
    """The page over played nodes."""
    gatherer = Gatherer(",".join(played.nodes), played.named, played.opened, LastBench(bench, None), times)
    with played.answering(), Server(gatherer, 0) as server:
        gatherer.start()
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            for hung in played.hung.values():
                hung.set()
            gatherer.stop()
            server.shutdown()
