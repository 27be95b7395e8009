"""One gatherer for all who look: it puts together what the nodes told, every two seconds while somebody looks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

from exl3kit import post_mortem, status
from exl3kit.cluster import hosts
from exl3kit.dash import asker
from exl3kit.dash.rates import Speed
from exl3kit.dash.watcher import Interest, Times, Watcher
from exl3kit.errors import KitError

if TYPE_CHECKING:
    from exl3kit.cluster import Host
    from exl3kit.containers import Standing
    from exl3kit.dash.asker import Ask, Told

USUAL = Times()


@dataclass(frozen=True)
class Facts:
    """What the page shows.

    `at`: seconds since 1970. `named`: the text of `--nodes`. `deployment`: the only one that is
    looked at, or None for all. `asked`: nodes that have not answered or failed yet; while
    there are some, nothing is said of deployments. `deployments`: as `kit status --json` has them, each with its
    `speed` (see `Speed`). `unreachable`: errors by node; `ages`: seconds since each of the others told what is shown of
    it. `death`: the post-mortem that `kit down` kept, when nothing stands. `bench`: the last campaign (see
    `last_bench`). `fault`: why there is nothing else, when the kit failed.
    """

    at: float
    named: str
    deployment: str | None
    nodes: tuple[str, ...]
    asked: tuple[str, ...] = ()
    addresses: Mapping[str, str | None] = field(default_factory=dict)
    ages: Mapping[str, float] = field(default_factory=dict)
    deployments: tuple[dict[str, Any], ...] = ()
    unreachable: Mapping[str, KitError] = field(default_factory=dict)
    death: Mapping[str, Any] | None = None
    bench: Mapping[str, Any] | None = None
    fault: str | None = None


class Gatherer:
    """Facts by number, each newer than the one before.

    Parameters
    ----------
    named: the text of `--nodes`.
    deployment: the only one to look at, or None for all.
    opener: opens one of these machines (see `asker.opened`).
    bench: gives the last campaign, or None.
    """

    def __init__(
        self,
        named: str,
        deployment: str | None,
        opener: Callable[[Host, str | None], AbstractContextManager[Ask]],
        bench: Callable[[], Mapping[str, Any] | None],
        times: Times = USUAL,
    ) -> None:
        self.named, self.deployment, self._times, self._bench = named, deployment, times, bench
        self._interest = Interest(times.interest)
        listed = hosts(named)
        first_local = next((host for host in listed if host.is_local), None)  # `local,local` is one engine
        self._watchers = [
            Watcher(host, partial(opener, host, deployment), self._interest, times)
            for host in listed
            if not host.is_local or host is first_local
        ]
        self._news = threading.Condition()
        self._number = 0
        self._facts = Facts(time.time(), self.named, self.deployment, self.nodes, asked=self.nodes)
        self._speeds: dict[str, Speed] = {}
        self._thread = threading.Thread(target=self._run, name="gather", daemon=True)

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(one.host.name for one in self._watchers)

    def start(self) -> None:
        for thread in (*self._watchers, self._thread):
            thread.start()

    def stop(self, patience: float = 3.0) -> None:
        """End every thread and close every node; one that hangs in a question is left, and ends with the process."""
        self._interest.end()
        with self._news:
            self._news.notify_all()
        deadline = time.monotonic() + patience
        for thread in (*self._watchers, self._thread):
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))

    @property
    def ended(self) -> bool:
        return self._interest.ended

    def newer(self, number: int, patience: float) -> tuple[int, Facts]:
        """The newest facts and their number, as soon as it is not `number`, at the latest after `patience` seconds."""
        with self._interest.shown(), self._news:
            self._news.wait_for(lambda: self._number != number or self.ended, timeout=patience)
            return self._number, self._facts

    def now(self, patience: float) -> tuple[int, Facts]:
        """Facts that are not old, as far as some come within `patience` seconds."""
        with self._interest.shown(), self._news:
            self._news.wait_for(lambda: self._is_fresh() or self.ended, timeout=patience)
            return self._number, self._facts

    def _is_fresh(self) -> bool:
        return not self._facts.asked and time.time() - self._facts.at < 3 * self._times.period

    def _run(self) -> None:
        while self._interest.wait():
            try:
                facts = self._look()
            except Exception as error:  # the page must say it, and not stand still
                facts = Facts(
                    time.time(), self.named, self.deployment, self.nodes, fault=f"{type(error).__name__}: {error}"
                )
            if not facts.asked or facts.asked != self._facts.asked:
                with self._news:
                    self._number, self._facts = self._number + 1, facts
                    self._news.notify_all()
            self._interest.pause(min(0.1, self._times.period) if facts.asked else self._times.period)

    def _look(self) -> Facts:
        latest = {one.host.name: one.latest for one in self._watchers}
        asked = tuple(name for name, one in latest.items() if one is None)
        return (
            Facts(time.time(), self.named, self.deployment, self.nodes, asked=asked)
            if asked
            else self._put_together(latest)
        )

    def _put_together(self, latest: Mapping[str, Told | KitError | None]) -> Facts:
        told = {name: one for name, one in latest.items() if isinstance(one, asker.Told)}
        missing = {name: one for name, one in latest.items() if isinstance(one, KitError)}
        deployments = merged(list(told.values()), missing)
        counted = {name: found for one in told.values() for name, found in one.counters.items()}
        self._speeds = {name: self._speeds.get(name) or Speed() for name in counted}  # others have none now
        for name, found in counted.items():
            self._speeds[name].add(found)
        for one in deployments:
            one["speed"] = self._speeds.get(one["deployment"], Speed()).as_json()
        kept = [death for one in told.values() for death in one.kept]
        return Facts(
            at=time.time(),
            named=self.named,
            deployment=self.deployment,
            nodes=self.nodes,
            addresses={name: one.address for name, one in told.items()},
            ages={name: time.monotonic() - one.at for name, one in told.items()},
            deployments=tuple(deployments),
            unreachable=missing,
            death=None if deployments else post_mortem.choose(kept),
            bench=self._bench(),
        )


def merged(told: Sequence[Told], missing: Mapping[str, KitError]) -> list[dict[str, Any]]:
    """Every deployment, from what each node told of its own ranks; two names may lead to one engine."""
    pairs: dict[str, tuple[Standing, dict[str, Any]]] = {}
    for one in told:
        for standing, rank in zip(one.standing, one.ranks, strict=True):
            pairs.setdefault(str(standing.container.id), (standing, rank))
    ordered = sorted(pairs.values(), key=lambda pair: (pair[0].deployment, pair[0].rank))
    found = []
    for _, members in groupby(ordered, key=lambda pair: pair[0].deployment):
        standing_of, ranks_of = zip(*members, strict=True)
        found.append(status.of_deployment(standing_of, list(ranks_of), missing))
    return found
