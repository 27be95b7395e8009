"""The first process of a rank: it has one child, the supervisor, and ends everything when that one ends or hangs.

A supervisor that a signal has stopped can end nothing any more, and its rank would hold the gang's place for ever. The
guard is small enough to be always there: it reaps, forwards SIGTERM, and counts the supervisor's signs of life.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from exl3_vllm import watch

LOOK_S = 0.5
CRASHED = 70  # exit code of a supervisor with a fault of its own
HUNG_S = 10.0  # longer than the 7 s after which the other ranks give this one up
WATCHED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)

SignOfLife = Callable[[], None]


def guard(supervise: Callable[[SignOfLife], int], when_failed: Callable[[str, str], None]) -> int:
    """Run `supervise` in a child, which calls what it is given as its sign of life; returns its exit code.

    `when_failed` is told when the child could not end as it should: `hung` (no sign of life) or `supervisor` (killed,
    or a fault of its own), and a sentence.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    life, sign = os.pipe()
    os.set_blocking(life, False)
    os.set_blocking(sign, False)
    child = os.fork()
    if child == 0:
        os.close(life)
        os._exit(_in_child(supervise, sign))
    os.close(sign)
    try:
        return _watch(child, life, when_failed)
    finally:
        os.close(life)


def _in_child(supervise: Callable[[SignOfLife], int], sign: int) -> int:
    def alive() -> None:
        try:
            os.write(sign, b".")
        except BlockingIOError:  # the guard is behind, and has enough of them
            return

    try:
        return supervise(alive)
    except BaseException:
        import traceback

        traceback.print_exc()
        return CRASHED


def _watch(child: int, life: int, when_failed: Callable[[str, str], None]) -> int:
    heard = looked = time.monotonic()
    hung = ""
    while True:
        event = signal.sigtimedwait(WATCHED, LOOK_S)
        status = _reap(child)
        if status is not None:
            break
        if event is not None and event.si_signo != signal.SIGCHLD:
            os.kill(child, event.si_signo)
        now = time.monotonic()
        if _signs(life) or now - looked > HUNG_S / 2:  # asleep ourselves: the machine was suspended
            heard = now
        looked = now
        if now - heard > HUNG_S and not hung:
            state = getattr(watch.read_process(child), "state", "?")
            how = "stopped by a signal" if state in "Tt" else f"in state {state}"
            hung = f"the supervisor gave no sign of life for {now - heard:.0f} s ({how}) and was killed"
            watch.kill_below(os.getpid())
    watch.kill_below(os.getpid())
    code = os.waitstatus_to_exitcode(status)
    if hung:
        when_failed("hung", hung)
    elif code < 0 or code == CRASHED:
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else "failed by a fault of its own; the log says which"
        )
        when_failed("supervisor", f"the supervisor {how}")
    return 1 if hung else 128 - code if code < 0 else code


def _signs(life: int) -> bool:
    try:
        return bool(os.read(life, 65536))
    except BlockingIOError:
        return False


def _reap(child: int) -> int | None:
    """Collect every ended child; the wait status of the supervisor once it has ended."""
    ended = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        if pid == child:
            ended = status
