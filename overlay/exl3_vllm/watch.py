"""What a supervisor sees of its own rank: the processes of vLLM, the machine's memory, and whether requests get on."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROC = Path("/proc")
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
STOPPED_S = 2.0  # a process in state T for this long does not come back by itself


# Processes ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Process:
    """A process of the rank; `started` tells it from a later one with the same number."""

    pid: int
    parent: int
    state: str  # /proc's letter: R, S, D, T (stopped by a signal), Z (zombie), ...
    started: int
    rss: int
    cpu_s: float
    exit_status: int  # as waitpid gives it; of use when the state is Z


def read_process(pid: int) -> Process | None:
    """The process from /proc, or None when there is none."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    words = text.rpartition(")")[2].split()
    return Process(
        pid=pid,
        parent=int(words[1]),
        state=words[0],
        started=int(words[19]),
        rss=int(words[21]) * PAGE,
        cpu_s=(int(words[11]) + int(words[12])) / TICKS,
        exit_status=int(words[49]) if len(words) > 49 else 0,
    )


def descendants(root: int) -> list[Process]:
    """Every process below `root`, parents before children."""
    everything = [one for path in PROC.glob("[0-9]*") if (one := read_process(int(path.name)))]
    children: dict[int, list[Process]] = {}
    for one in everything:
        children.setdefault(one.parent, []).append(one)
    found: list[Process] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(0), [])
        found += below
        queue += [one.pid for one in below]
    return found


def command_line(pid: int) -> str:
    try:
        return (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        return ""


def process_name(command: str, *, is_main: bool, head: bool) -> str | None:
    """What a process is in vLLM's words, from its command line (vLLM titles its children); None for helpers.

    `VLLM::Worker_TP0` is `worker TP0`. A child between its start and its title has no name yet.
    """
    if is_main:
        return "API server" if head else "launcher"
    title = re.match(r"\w+::(\w+)", command)
    if title is None:
        return None
    word = title[1]
    if word.startswith("EngineCore"):
        return "engine core"
    if word.startswith("Worker"):
        return f"worker {word.partition('_')[2]}".strip()
    return word


@dataclass
class Tree:
    """vLLM's processes: `main` is the supervisor's own child, the others are below it.

    A named process is one whose end ends the rank; helpers of Python come and go.
    """

    main: int
    head: bool
    named: dict[int, tuple[str, int]] = field(default_factory=dict)  # pid -> (name, started)
    seen: list[Process] = field(default_factory=list)
    ended: dict[int, int | None] = field(default_factory=dict)  # wait status of named ones that ended, as far as read
    _stopped_since: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """`main` has its name from the first moment: it may have ended before anybody looks."""
        now = read_process(self.main)
        self.named[self.main] = ("API server" if self.head else "launcher", now.started if now is not None else -1)

    def look(self, now: float) -> None:
        """Read the tree anew."""
        found = descendants(os.getpid())
        self.seen = [one for one in found if one.state != "Z"]
        commands = {one.pid: command_line(one.pid) for one in self.seen}
        for one in self.seen:  # every time: a worker is titled twice, by its kind and later by its place
            if one.pid == self.main:
                continue
            # A child that a worker forks (to compile, to run a program) bears its title until it has one of its own.
            borrowed = commands[one.pid] == commands.get(one.parent)
            name = None if borrowed else process_name(commands[one.pid], is_main=False, head=self.head)
            if name is not None:
                self.named[one.pid] = (name, one.started)
            elif one.pid in self.named and commands[one.pid]:
                del self.named[one.pid]
        stopped = {one.pid for one in self.seen if one.state == "T"}
        self._stopped_since = {pid: self._stopped_since.get(pid, now) for pid in stopped}

    def note_end(self, pid: int, status: int | None = None) -> None:
        """Called at once when `pid` has ended, or when it was collected with `status`.

        Before that its status can be read. A worker whose parent died of its end is collected here, before its end was
        seen, when both happen between two looks.
        """
        if pid in self.named and self.ended.get(pid) is None:
            if status is None and pid not in self.ended:
                left = read_process(pid)
                status = left.exit_status if left is not None and left.state == "Z" else None
            self.ended[pid] = status

    def has_lost(self) -> bool:
        """Whether a named process has ended."""
        here = {one.pid: one.started for one in self.seen}
        for pid, (_, started) in self.named.items():
            if here.get(pid) != started:
                self.note_end(pid)
        return bool(self.ended)

    def culprit(self, main_status: int | None) -> tuple[str, int | None]:
        """Which end brought the others: its process and wait status.

        A process takes others with it within milliseconds, some of which are collected before it is. So a signal goes
        before an exit, an exit with an error before one without, then the order counts in which the ends were noted.
        SIGTERM is an end without an error: somebody was told to.
        """
        known = {pid: main_status if pid == self.main else status for pid, status in self.ended.items()}

        def order(pid: int) -> int:
            status = known[pid]
            told = status is not None and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM
            if status == 0 or told:
                return 3 if pid == self.main else 4
            return 2 if status is None else 0 if os.WIFSIGNALED(status) else 1

        first = min(self.ended, key=order)
        return self.named[first][0], known[first]

    def stopped(self, now: float) -> str | None:
        """A process that a signal has stopped, by name."""
        for pid, since in self._stopped_since.items():
            if now - since >= STOPPED_S:
                return self.named.get(pid, (f"process {pid}", 0))[0]
        return None

    def table(self) -> list[dict[str, Any]]:
        return [
            {
                "pid": one.pid,
                "process": self.named.get(one.pid, ("helper", 0))[0],
                "state": one.state,
                "rss": one.rss,
                "cpu_s": round(one.cpu_s, 1),
            }
            for one in self.seen
        ]


def kill_below(root: int, *, spare: Iterable[int] = ()) -> None:
    """SIGKILL every process below `root`; a stopped one dies of it too."""
    spared = set(spare)
    for one in descendants(root):
        if one.pid not in spared and one.state != "Z":
            with suppress(ProcessLookupError, PermissionError):
                os.kill(one.pid, signal.SIGKILL)


# Memory ---------------------------------------------------------------------------------------------------------------

GROUP_FILES = {  # of the container's own control group, version 2 and version 1
    "limit": ("memory.max", "memory/memory.limit_in_bytes"),
    "used": ("memory.current", "memory/memory.usage_in_bytes"),
    "oom_kills": ("memory.events", "memory/memory.oom_control"),
}
NO_LIMIT = 1 << 60  # version 1 writes "none" as a number of this size


def memory(proc: Path = PROC, group: Path = Path("/sys/fs/cgroup")) -> dict[str, Any]:
    """Memory of the machine and of the container's control group, in bytes; what is not told is None."""
    found: dict[str, Any] = {"available": None, "psi_some_avg10": None, "limit": None, "used": None, "oom_kills": None}
    with suppress(OSError, ValueError):
        text = (proc / "meminfo").read_text()
        found["available"] = int(text.partition("MemAvailable:")[2].split()[0]) * 1024
    with suppress(OSError, ValueError):
        found["psi_some_avg10"] = float((proc / "pressure/memory").read_text().partition("avg10=")[2].split()[0])
    for key, names in GROUP_FILES.items():
        for name in names:
            with suppress(OSError, ValueError, IndexError):
                text = (group / name).read_text()
                number = int(text.rpartition("oom_kill ")[2].split()[0] if key == "oom_kills" else text)
                found[key] = number if number < NO_LIMIT else None
                break
    return found


# Progress -------------------------------------------------------------------------------------------------------------

COUNTERS = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "generation_tokens": "vllm:generation_tokens_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "kv_usage": "vllm:kv_cache_usage_perc",
    "finished": "vllm:request_success_total",
}


def parse_metrics(text: str) -> dict[str, float]:
    """The counters above from vLLM's /metrics, each summed over its labels; one that is missing is left out."""
    wanted = {metric: key for key, metric in COUNTERS.items()}
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, _, rest = line.partition("{") if "{" in line else line.partition(" ")
        key = wanted.get(name)
        if key is None:
            continue
        with suppress(ValueError, IndexError):
            found[key] = found.get(key, 0.0) + float(rest.rpartition("}")[2].split()[0])
    return found


@dataclass
class Progress:
    """Whether requests get on, from samples of the engine's counters.

    Any change is progress, the share of the KV cache included: a prefill of 200,000 tokens counts its prompt only at
    the end, but fills the cache all the while. No request is progress too. No sample is none. The engine's counters do
    not know a request before its first step is done, so `unanswered` is added to them (`api_gate`).
    """

    since: float
    sample: Mapping[str, float] = field(default_factory=dict)

    def take(self, sample: Mapping[str, float], now: float) -> None:
        idle = not any(sample.get(key) for key in ("running", "waiting", "unanswered"))
        if idle or sample != self.sample:
            self.since = now
        self.sample = dict(sample)

    def stalled_s(self, now: float) -> float:
        return now - self.since

    def why(self, now: float) -> str:
        """What a stall is, in a sentence."""
        requests = (self.sample.get("running") or 0) + (self.sample.get("waiting") or 0)
        if not requests and self.sample.get("unanswered"):
            return f"a request waits for its first token, and nothing has moved for {self.stalled_s(now):.0f} s"
        if not requests:
            return f"the API's counters cannot be read, and have not changed for {self.stalled_s(now):.0f} s"
        return f"requests that wait: {requests:.0f}, and nothing has moved for {self.stalled_s(now):.0f} s"

    def report(self, now: float) -> dict[str, Any]:
        told: dict[str, Any] = {key: self.sample.get(key) for key in COUNTERS if key != "finished"}
        return {"last_progress_s": round(self.stalled_s(now), 1), **told}
