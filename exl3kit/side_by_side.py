"""Work in threads that Ctrl-C can end: the programs which the threads run are stopped, and nobody waits for ever."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager, suppress
from typing import TypeVar

T = TypeVar("T")
GRACE_SECONDS = 10.0  # for threads to clean up after Ctrl-C; mmdebstrap takes the longest, to unmount and remove

_programs: set[subprocess.Popen[str]] = set()
_guard = threading.Lock()


def run(
    *jobs: Callable[[], T], stopped: threading.Event | None = None, say: Callable[[str], None] | None = None
) -> list[T]:
    """Run every job in a thread of its own and give their results in order.

    All of them end before the first failure is raised, for what they fetch is there the next time; `say` is told at
    once of a failure that others outlive. On Ctrl-C `stopped` is set for the jobs to see, their programs are stopped,
    and they get ten seconds.
    """
    futures: list[Future[T]] = [Future() for _ in jobs]
    for job, future in zip(jobs, futures, strict=True):
        threading.Thread(target=_fulfil, args=(job, future), daemon=True).start()
    try:
        ended, going_on = wait(futures, return_when=FIRST_EXCEPTION)
        if going_on and say is not None:
            say(f"{_failure(ended)}; what runs beside it goes on, and is there the next time; Ctrl-C ends it")
        wait(futures)
    except BaseException:
        if stopped is not None:
            stopped.set()
        _stop_programs()
        wait(futures, timeout=GRACE_SECONDS)
        raise
    return [future.result() for future in futures]


def _failure(ended: Iterable[Future[T]]) -> str:
    """The first line of what failed: a `KitError` without its next step, which comes at the end."""
    error = next(error for future in ended if (error := future.exception()) is not None)
    return str(error).partition("\n")[0]


def _fulfil(job: Callable[[], T], future: Future[T]) -> None:
    try:
        future.set_result(job())
    except BaseException as error:
        future.set_exception(error)


@contextmanager
def program(argv: Sequence[str], *, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A program whose output (stdout and stderr in one) the block reads; it is stopped when the block fails.

    In a session of its own: Ctrl-C is for the kit, which then stops it.
    """
    started = subprocess.Popen(
        list(argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=env,
        start_new_session=True,
    )
    with _guard:
        _programs.add(started)
    try:
        with started:
            try:
                yield started
            except BaseException:
                started.terminate()
                raise
    finally:
        with _guard:
            _programs.discard(started)


def _stop_programs() -> None:
    with _guard:
        for started in _programs:
            with suppress(OSError):
                started.terminate()
