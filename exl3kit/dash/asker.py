"""One node, asked again and again over one connection: its containers, what their ranks say, the API's counters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from exl3kit import asking, containers, post_mortem, status, transport
from exl3kit.bench.metrics import GENERATED, TTFT_SUM, Missing, Scrape
from exl3kit.errors import KitError
from exl3kit.nodes import open_nodes

if TYPE_CHECKING:
    from exl3kit.cluster import Host
    from exl3kit.containers import Standing
    from exl3kit.nodes import Node

COUNTED = (GENERATED, TTFT_SUM, TTFT_SUM.removesuffix("_sum") + "_count")
TRANSPORT_SECONDS = 60.0  # a rank's connections are made once, at its start; a look at them costs a program each
KEPT_SECONDS = 30.0  # between two looks for post-mortems that `kit down` kept
METRICS_SECONDS = 5.0


class Counters(NamedTuple):
    """What a head's vLLM has counted since it began, `at` a time (monotonic seconds).

    `tokens` that were generated; `waited`: seconds until the first token, summed over `requests`.
    """

    at: float
    tokens: float
    waited: float
    requests: float


@dataclass(frozen=True)
class Told:
    """What one node told, `at` a time (monotonic seconds).

    `standing` and `ranks` (as `status.rank_status` gives them, each with its `transport`) go together; `counters` are
    those of the deployments whose heads serve here; `kept` are post-mortems of a deployment that was taken down.
    """

    address: str | None = None
    standing: tuple[Standing, ...] = ()
    ranks: tuple[dict[str, Any], ...] = ()
    counters: Mapping[str, Counters] = field(default_factory=dict)
    kept: tuple[dict[str, Any], ...] = ()
    at: float = field(default_factory=time.monotonic)


Ask = Callable[[], Told]
"""Asks a node once; raises `KitError` when it does not answer."""


@contextmanager
def opened(host: Host, deployment: str | None) -> Iterator[Ask]:
    """A connection to one node, and how to ask it about one deployment or all; raises `KitError` (unreachable)."""
    with open_nodes([host]) as (node,):
        yield Asker(node, deployment).ask


class Asker:
    """Asks an opened node; what seldom changes it asks seldom."""

    def __init__(self, node: Node, deployment: str | None) -> None:
        self._node = node
        self._deployment = deployment
        self._transports: dict[str, tuple[str, float, dict[str, Any]]] = {}
        self._kept: tuple[float, tuple[dict[str, Any], ...]] | None = None

    def ask(self) -> Told:
        """Everything at once, the ranks side by side."""
        standing = tuple(containers.find([self._node], self._deployment))
        with ThreadPoolExecutor(max_workers=max(1, 2 * len(standing))) as pool:
            ranks = pool.map(self._rank, standing)
            heads = {one.deployment: one for one in standing if one.rank == 0 and one.state == "running"}
            counted = dict(zip(heads, pool.map(counters, heads.values()), strict=True))
            told = tuple(ranks)
        return Told(
            address=self._node.address,
            standing=standing,
            ranks=told,
            counters={name: found for name, found in counted.items() if found is not None},
            kept=() if standing or self._deployment is None else self._post_mortems(self._deployment),
        )

    def _rank(self, one: Standing) -> dict[str, Any]:
        """One container as `kit status` tells of it; of one that does not run, its gang's death too."""
        told = status.rank_status(one)
        running = one.state == "running"
        told["transport"] = self._transport(one) if running else None
        if not running:
            told["post_mortem"] = post_mortem.of(one)
        return told

    def _transport(self, one: Standing) -> dict[str, Any]:
        name, started, now = str(one.container.id), str(one.container.attrs["State"]["StartedAt"]), time.monotonic()
        before = self._transports.get(name)
        if before is not None and before[0] == started and now - before[1] < TRANSPORT_SECONDS:
            return before[2]
        told = transport.look_at(one).as_json()
        if told["kind"] != transport.UNKNOWN:  # of a rank that has not connected yet: asked again
            self._transports[name] = (started, now, told)
        return told

    def _post_mortems(self, deployment: str) -> tuple[dict[str, Any], ...]:
        now = time.monotonic()
        if self._kept is None or now - self._kept[0] > KEPT_SECONDS:
            self._kept = (now, tuple(post_mortem.kept([self._node], deployment)))
        return self._kept[1]


def counters(head: Standing) -> Counters | None:
    """The counters of a head's vLLM, read from its `/metrics`, which are of this moment.

    None when it does not answer or has none: a rank that starts has none, and `status` says so.
    """
    try:
        answer = asking.ask(head, "/metrics", None, wait_s=0.0, answer_s=METRICS_SECONDS)
        return None if answer.status != 200 else of_metrics(time.monotonic(), str(answer.body))
    except KitError:
        return None


def of_metrics(at: float, text: str) -> Counters | None:
    """The counters in a text in Prometheus' format, each summed over the engines of one API."""
    lines = [line for line in text.splitlines() if line.startswith(COUNTED)]
    try:
        scrape = Scrape("".join(f"{line}\n" for line in lines))
        return Counters(at, *(scrape.total(name) for name in COUNTED))
    except Missing:
        return None
