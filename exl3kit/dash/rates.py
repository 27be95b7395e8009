"""What counters did lately, from looks at them that come at any interval. Pure."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from exl3kit.dash.asker import Counters

SPEED_SECONDS = 10.0
TTFT_SECONDS = 60.0
HISTORY = 150  # looks, two seconds apart: five minutes


class Recent:
    """Samples of a few counters over the last `seconds`.

    A counter that went backwards was begun anew (the gang was started again), and a gap longer than `seconds` (nobody
    looked) says nothing about now: both forget what was before.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._samples: deque[tuple[float, tuple[float, ...]]] = deque()

    def add(self, at: float, *counters: float) -> None:
        """One look, at a monotonic time in seconds; a look that was added before is none."""
        if self._samples:
            last, before = self._samples[-1]
            if at <= last:
                return
            if at - last > self.seconds or any(now < then for now, then in zip(counters, before, strict=True)):
                self._samples.clear()
        self._samples.append((at, counters))
        while self._samples[0][0] < at - self.seconds:
            self._samples.popleft()

    def moved(self) -> tuple[float, ...] | None:
        """Seconds between the first and the last look, then how far each counter went; None of less than two looks."""
        if len(self._samples) < 2:
            return None
        (begun, first), (ended, last) = self._samples[0], self._samples[-1]
        return (ended - begun, *(now - then for now, then in zip(last, first, strict=True)))


class Speed:
    """How fast one deployment answers, from its head's counters."""

    def __init__(self) -> None:
        self._tokens, self._first = Recent(SPEED_SECONDS), Recent(TTFT_SECONDS)
        self._history: deque[tuple[float, float]] = deque(maxlen=HISTORY)
        self._last: Counters | None = None

    def add(self, counted: Counters) -> None:
        """One look; the same look again changes nothing."""
        if counted == self._last:
            return
        self._tokens.add(counted.at, counted.tokens)
        self._first.add(counted.at, counted.waited, counted.requests)
        if self._history and counted.at - self._history[-1][0] > SPEED_SECONDS:  # nobody looked meanwhile
            self._history.clear()
        if (moved := self._tokens.moved()) is not None:
            self._history.append((counted.at, moved[1] / moved[0]))
        self._last = counted

    def as_json(self) -> dict[str, Any]:
        """`tokens_per_s` over the last 10 s; its `history`, which spans `history_s` seconds; `ttft` of the last minute
        and `ttft_since_start`.

        Those two are mean seconds and the number of requests. What is not known is None.
        """
        tokens, first = self._tokens.moved(), self._first.moved()
        return {
            "tokens_per_s": tokens[1] / tokens[0] if tokens else None,
            "history": [rate for _, rate in self._history],
            "history_s": self._history[-1][0] - self._history[0][0] if self._history else 0.0,
            "ttft": mean(first[1], first[2]) if first else None,
            "ttft_since_start": mean(self._last.waited, self._last.requests) if self._last else None,
        }


def mean(total: float, count: float) -> tuple[float, int] | None:
    return (total / count, int(count)) if count else None
