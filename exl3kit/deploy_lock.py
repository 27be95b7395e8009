"""The deployment lock: one operator at a time changes what runs on a node.

It is a file on every node, made in one step and touched every few seconds through the connection that took it. When
the operator's kit ends, however it ends, the node removes the file; when the link breaks, the file grows silent, and
whoever comes after `STALE_SECONDS` takes it over. All times are told by the node's clock, so clocks need not agree.
"""

from __future__ import annotations

import getpass
import json
import os
import selectors
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exl3kit.errors import ExitCode

if TYPE_CHECKING:
    from exl3kit.nodes import Node

BEAT_SECONDS = 5.0
STALE_SECONDS = 30  # six beats; a lost link is noticed by its own kit after 6 s, so that one has stopped by then
ANSWER_SECONDS = 10.0
FILE = "/tmp/exl3kit-deployment-lock"  # the one folder that every user of a node may write to

# The node's side. $1 is the lock, $2 the owner as JSON, $3 a token in it, $4 seconds of silence that make a lock stale,
# $5 `break` to take any. The first line of its answer is `held`, `took OWNER` or `refused OWNER`, an owner being
# `<seconds held> <seconds silent> <JSON>`. It then touches the lock for every line that it reads, and ends when no more
# come or the lock is no longer its own. `ln` fails when the name exists and `mv` replaces it, each in one step; of two
# that take over at the same time the later one stays, and the earlier one sees that after its second of patience.
_HOLD = """
lock=$1 mine=$1.$3
holds() { case $(cat "$lock" 2>/dev/null) in *"$3"*) return 0;; esac; return 1; }
free() { rm -f "$mine"; if holds "$@"; then rm -f "$lock"; fi; }
trap 'free "$@"' EXIT
trap 'exit 0' HUP INT TERM
umask 022
printf '%s %s\\n' "$(date +%s)" "$2" > "$mine" || exit 9
if ln "$mine" "$lock" 2>/dev/null; then
  echo held
else
  now=$(date +%s)
  read -r since owner < "$lock" && beat=$(stat -c %Y "$lock") || { since=$now beat=$now owner='{}'; }
  told="$((now - since)) $((now - beat)) $owner"
  if [ "$5" != break ] && [ $((now - beat)) -le "$4" ]; then echo "refused $told"; exit 0; fi
  mv "$mine" "$lock" || { echo "refused $told"; exit 9; }
  sleep 1
  holds "$@" || { echo "refused 0 0 $(cut -d ' ' -f 2- "$lock" 2>/dev/null)"; exit 0; }
  echo "took $told"
fi
rm -f "$mine"
while read -r _; do
  holds "$@" || { echo lost; exit 8; }
  touch -c "$lock"
done
"""


@dataclass(frozen=True)
class Owner:
    """Who holds a lock; `held` and `silent` are seconds by the node's clock."""

    held: int
    silent: int
    fields: Mapping[str, Any]

    @classmethod
    def read(cls, told: str) -> Owner:
        """From the node's `<held> <silent> <JSON>`; what cannot be read is left out, for a lock is a lock."""
        held, _, rest = told.partition(" ")
        silent, _, text = rest.partition(" ")
        fields: Any = None
        with suppress(ValueError):
            fields = json.loads(text)
        seconds = [int(word) if word.lstrip("-").isdecimal() else 0 for word in (held, silent)]
        return cls(seconds[0], seconds[1], fields if isinstance(fields, dict) else {})

    @property
    def verb(self) -> str:
        return f"`kit {self.fields.get('verb', '?')}`"

    def is_own(self, asking: Mapping[str, Any]) -> bool:
        """Whether whoever asks has started it: the same user, and a process of this machine (host names repeat)."""
        told = self.fields
        if any(told.get(key) != asking[key] for key in ("user", "host")) or not isinstance(told.get("pid"), int):
            return False
        return Path(f"/proc/{told['pid']}").exists()

    def __str__(self) -> str:
        told = self.fields
        who = f"{told.get('user', 'somebody')}@{told.get('host', 'an unknown machine')}"
        return f"{who}: {self.verb}, process {told.get('pid', '?')}, for {age(self.held)}"


class Lock:
    """The lock of one node, held by a process there for as long as this object is not released."""

    def __init__(self, node: Node, process: subprocess.Popen[bytes]) -> None:
        self.node = node
        self._process = process
        self._released = threading.Event()
        threading.Thread(target=self._beat, name=f"lock of {node.name}", daemon=True).start()

    def _beat(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # the process ended, or the pipe was closed by `release`
            while not self._released.wait(BEAT_SECONDS):
                self._process.stdin.write(b"\n")
                self._process.stdin.flush()

    def check(self) -> None:
        """Raise `KitError` (preflight) when the lock is no longer ours."""
        if self._process.poll() is None:
            return
        raise self.node.error(
            "the deployment lock was lost",
            why="`--break-lock` took it, or the connection to the node is gone",
            next_step="`kit status` shows what stands; start again when the other is done",
            code=ExitCode.PREFLIGHT,
        )

    def release(self) -> None:
        """Give the lock back; never raises."""
        from exl3kit import ssh

        self._released.set()
        with suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=3)
        ssh.stop(self._process)


class Locks:
    """The locks of all nodes of a verb."""

    def __init__(self, held: Sequence[Lock], broken: Sequence[str]) -> None:
        self._held = held
        self.broken = broken  # sentences about locks that were taken over

    def check(self) -> None:
        """Raise `KitError` (preflight) unless every lock is still ours; called before anything is changed."""
        for lock in self._held:
            lock.check()


@contextmanager
def hold(nodes: Sequence[Node], verb: str, *, break_lock: bool = False) -> Iterator[Locks]:
    """Hold the locks of all nodes, one per engine.

    They are taken in the order of the engines' ids, which is the same for every operator: of two who start at the same
    time, one gets them all.

    Raises `KitError` (preflight) that names the owner and how long it has held the lock.
    """
    distinct = {str(node.engine.info()["ID"]): node for node in nodes}
    owner = {"user": user(), "host": socket.gethostname(), "pid": os.getpid(), "verb": verb}
    held: list[Lock] = []
    broken: list[str] = []
    with ExitStack() as stack:
        for _, node in sorted(distinct.items()):
            lock, former = take(node, owner, break_lock=break_lock)
            stack.callback(lock.release)
            held.append(lock)
            if former is not None:
                silence = f", silent for {age(former.silent)}" if former.silent > STALE_SECONDS else ""
                broken.append(f"took the lock of node {node.name} from {former}{silence}")
        yield Locks(held, broken)


def user() -> str:
    """This user's name, or the number of one that has none, as in a container."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def take(node: Node, owner: Mapping[str, Any], *, break_lock: bool = False) -> tuple[Lock, Owner | None]:
    """The lock of one node, and whose it was when it had to be taken over.

    Raises `KitError` (preflight) when another holds it and gives signs of life.
    """
    from exl3kit import ssh

    token = uuid.uuid4().hex
    text = json.dumps({**owner, "token": token})
    argv = ["sh", "-c", _HOLD, "sh", FILE, text, token, str(STALE_SECONDS), "break" if break_lock else ""]
    process = node.spawn(argv)
    answer = first_line(process)
    word, _, rest = answer.partition(" ")
    if word in ("held", "took"):
        return Lock(node, process), Owner.read(rest) if word == "took" else None
    ssh.stop(process)
    if word != "refused":
        raise node.error(
            "the deployment lock cannot be taken",
            why=answer or f"no file can be made beside {FILE}, or nothing came within {ANSWER_SECONDS:.0f} s",
            next_step="`df /tmp` and `ls -ld /tmp` on the node",
            code=ExitCode.PREFLIGHT,
        )
    other = Owner.read(rest)
    what = "another operator is changing what runs there"
    next_step = "wait until that has ended; `--break-lock` takes the lock from it, and what it does then fails"
    if other.silent > STALE_SECONDS or break_lock:  # only another user's file cannot be replaced
        next_step = f"the file is another user's: `sudo rm {FILE}` on the node"
    elif other.is_own(owner):
        what = f"your own {other.verb} is changing what runs there"
        next_step = f"wait until that has ended, or end it: Ctrl-C where it runs, or `kill {other.fields['pid']}`"
    raise node.error(what, why=str(other), next_step=next_step, code=ExitCode.PREFLIGHT)


def first_line(process: subprocess.Popen[bytes]) -> str:
    """What the node's side says first; empty when it ends or is silent for too long."""
    assert process.stdout is not None
    received = b""
    deadline = time.monotonic() + ANSWER_SECONDS
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while b"\n" not in received and (left := deadline - time.monotonic()) > 0 and selector.select(left):
            chunk = os.read(process.stdout.fileno(), 4096)
            if not chunk:
                break
            received += chunk
    return received.decode("utf-8", "replace").partition("\n")[0].strip()


def age(seconds: int) -> str:
    """Seconds for people: `42 s`, `7 min`, `3 h 5 min`."""
    if seconds < 120:
        return f"{seconds} s"
    minutes = seconds // 60
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
