"""Threads whose programs end with Ctrl-C."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from rich.console import Console

from exl3kit import side_by_side
from exl3kit.errors import KitError
from exl3kit.progress import Progress


def test_results_come_in_order_and_the_first_failure_after_all_have_ended() -> None:
    ended = threading.Event()

    def slow() -> int:
        time.sleep(0.2)
        ended.set()
        return 1

    def failing() -> int:
        raise ValueError("no")

    assert side_by_side.run(slow, lambda: 2) == [1, 2]
    ended.clear()
    with pytest.raises(ValueError, match="no"):
        side_by_side.run(failing, slow)
    assert ended.is_set()


def test_a_failure_that_others_outlive_is_told_at_once_and_its_stage_is_no_longer_shown_as_running() -> None:
    """Given one job that fails beside one that works on, then the screen says so before that one has ended."""
    out, go_on = io.StringIO(), threading.Event()
    progress = Progress(Console(file=out, width=200))
    seen: list[str] = []

    def failing() -> None:
        with progress.stage("wheels"):
            raise KitError("no such wheel", where="pins", why="pip says so", next_step="look")

    def slow() -> None:
        with progress.stage("rootfs"):
            assert go_on.wait(5)

    def say(text: str) -> None:
        progress.tell(text)
        seen.append(out.getvalue())
        assert [stage.name for stage in progress.active] == ["rootfs"]
        go_on.set()

    with pytest.raises(KitError, match="no such wheel"):
        side_by_side.run(slow, failing, say=say)
    (then,) = seen
    assert "x wheels" in then and "+ rootfs" not in then
    assert "pins: no such wheel (pip says so); what runs beside it goes on" in then and "next: look" not in then


def test_a_failure_after_all_others_and_success_are_not_told() -> None:
    told: list[str] = []
    assert side_by_side.run(lambda: 1, lambda: 2, say=told.append) == [1, 2]
    with pytest.raises(ZeroDivisionError):
        side_by_side.run(lambda: 1 / 0, say=told.append)
    assert told == []


INTERRUPTED = """
import sys
from exl3kit import side_by_side
def long():
    with side_by_side.program(["sh", "-c", "echo $$; exec sleep 97"]) as program:
        print(program.stdout.readline(), end="", flush=True)
        program.stdout.read()
side_by_side.run(long)
"""


def test_ctrl_c_stops_the_programs_of_the_threads() -> None:
    # given a thread that waits for a program
    kit = subprocess.Popen([sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                           text=True)  # fmt: skip
    assert kit.stdout is not None
    program = int(kit.stdout.readline())
    # when
    kit.send_signal(signal.SIGINT)
    began = time.monotonic()
    kit.wait(timeout=8)
    kit.stdout.close()
    # then
    assert time.monotonic() - began < 5
    with pytest.raises(ProcessLookupError):
        os.kill(program, 0)
