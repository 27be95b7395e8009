"""A thread for each node: it opens the node, asks it while somebody looks, and tries again when it was lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from exl3kit.errors import ExitCode, KitError

if TYPE_CHECKING:
    from exl3kit.cluster import Host
    from exl3kit.dash.asker import Ask, Told


@dataclass(frozen=True)
class Times:
    """In seconds: between two looks; before a node that did not answer is tried again; after which a question that is
    open has no answer; after the last reader asked until nobody looks.
    """

    period: float = 2.0
    retry: float = 5.0
    silent: float = 15.0
    interest: float = 20.0


class Interest:
    """Whether somebody looks: while a reader waits, for `seconds` after the last one did, and until `end`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.ended = False
        self._readers, self._until = 0, 0.0
        self._changed = threading.Condition()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """A reader waits."""
        with self._changed:
            self._readers += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                self._until = time.monotonic() + self.seconds

    @property
    def wanted(self) -> bool:
        return not self.ended and (self._readers > 0 or time.monotonic() < self._until)

    def wait(self) -> bool:
        """Wait until somebody looks; False when all is at its end."""
        with self._changed:
            self._changed.wait_for(lambda: self.wanted or self.ended)
        return not self.ended

    def pause(self, seconds: float) -> None:
        """Wait, but not beyond the end."""
        with self._changed:
            self._changed.wait_for(lambda: self.ended, timeout=seconds)

    def end(self) -> None:
        with self._changed:
            self.ended = True
            self._changed.notify_all()


class Watcher(threading.Thread):
    """What one node tells now."""

    def __init__(
        self, host: Host, opener: Callable[[], AbstractContextManager[Ask]], interest: Interest, times: Times
    ) -> None:
        super().__init__(name=f"watch {host.name}", daemon=True)
        self.host = host
        self._opener, self._interest, self._times = opener, interest, times
        self._latest: Told | KitError | None = None
        self._asked: float | None = None  # when the question that is open now was put

    @property
    def latest(self) -> Told | KitError | None:
        """What the node told last, or why it does not answer; None while it is asked for the first time."""
        asked = self._asked
        if asked is not None and not isinstance(self._latest, KitError):
            open_for = time.monotonic() - asked
            if open_for > self._times.silent:
                return KitError(
                    f"the node has not answered for {open_for:.0f} s",
                    where=f"node {self.host.name}",
                    next_step="look at its link, its load and its engine; it is still being asked",
                    code=ExitCode.UNREACHABLE,
                )
        return self._latest

    def run(self) -> None:
        while self._rest():
            try:
                self._asked = time.monotonic()
                with self._opener() as ask:
                    while self._rest():
                        self._asked = time.monotonic()
                        self._latest = ask()
                        self._asked = None
                        self._interest.pause(self._times.period)
            except KitError as error:
                self._fail(error)
            except Exception as error:  # whatever it is, the page must say it, and the other nodes go on
                what = f"the node cannot be asked: {type(error).__name__}: {error}"
                next_step = f"`kit status --nodes {self.host.name}` may say more"
                self._fail(KitError(what, where=f"node {self.host.name}", next_step=next_step, code=ExitCode.FAULT))

    def _rest(self) -> bool:
        """Forget what was told when nobody looks, and wait for somebody; False at the end."""
        if not self._interest.wanted:
            self._asked = self._latest = None
        return self._interest.wait()

    def _fail(self, error: KitError) -> None:
        self._latest, self._asked = error, None
        self._interest.pause(self._times.retry)
