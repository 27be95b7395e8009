"""Threads whose programs end with Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from exl3kit import side_by_side


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
