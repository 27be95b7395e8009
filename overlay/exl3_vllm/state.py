"""What a rank remembers over restarts of its container, in its state folder.

A full disk costs the memory, never the gang.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from exl3_vllm.rank_settings import write_json

REMEMBERED = "gang.json"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass
class State:
    """`known`: the highest incarnation ever agreed to. `open`: the one that vLLM runs in, 0 when it ended properly."""

    folder: Path
    known: int = 0
    failures: int = 0  # starts in a row that came to no steady service
    open: int = 0
    boot: str = ""
    generation: str = ""  # of the open one

    @classmethod
    def load(cls, folder: Path) -> State:
        state = cls(folder)
        with suppress(OSError, ValueError, KeyError, TypeError):
            found = json.loads((folder / REMEMBERED).read_text(encoding="utf-8"))
            state.known, state.failures = int(found["known"]), int(found["failures"])
            state.open, state.boot = int(found["open"]), str(found["boot"])
            state.generation = str(found["generation"])
        return state

    def pause(self, cap: float) -> float:
        """Seconds to wait before the next start: none after the first failure, then 2, 4, 8, ... up to `cap`."""
        return 0.0 if self.failures < 2 else min(cap, 2.0 ** (self.failures - 1))

    def forget_failures_of_others(self, generation: str) -> None:
        """What an operator starts anew begins without a pause."""
        if generation != self.generation:
            self.failures = 0

    def enter(self, incarnation: int, generation: str) -> None:
        self.known = self.open = incarnation
        self.generation = generation
        self.boot = boot_id()
        self._save()

    def leave(self, *, failed: bool, kept: bool = False) -> None:
        """The incarnation has ended; `kept`: it says nothing about whether starts fail."""
        self.open = 0
        if not kept:
            self.failures = self.failures + 1 if failed else 0
        self._save()

    def left_open(self, generation: str) -> tuple[int, str] | None:
        """The incarnation that this rank left without writing how, and what is known of why.

        One of another generation was removed by an operator.
        """
        if not self.open or generation != self.generation:
            return None
        if (self.folder / f"post-mortem-{self.open:06d}.json").exists():
            return None
        if self.boot != boot_id():
            return self.open, "the machine was restarted (or lost its power) while the rank ran"
        return self.open, "the container was killed while the rank ran (SIGKILL, its engine, or its power)"

    def _save(self) -> None:
        fields: dict[str, int | str] = {"known": self.known, "failures": self.failures, "open": self.open}
        fields |= {"boot": self.boot, "generation": self.generation}
        with suppress(OSError):
            write_json(self.folder / REMEMBERED, fields)


def boot_id() -> str:
    with suppress(OSError):
        return BOOT_ID.read_text(encoding="ascii").strip()
    return ""
