"""Servers of known speed as processes of their own, and campaigns on them: a boot is a new process."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from exl3kit.bench import ab
from exl3kit.bench.comparison import Comparison
from exl3kit.bench.places import Here
from exl3kit.bench.records import Recorder
from exl3kit.bench.targets import Target
from exl3kit.progress import Progress


def quiet() -> Progress:
    return Progress(Console(file=io.StringIO()))


@contextmanager
def process(**pace: Any) -> Iterator[str]:
    """The URL of a paced server in a process of its own."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in pace.items()]
    argv = [sys.executable, "-m", "exl3kit.bench.paced", *options]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield f"http://127.0.0.1:{json.loads(server.stdout.readline())['port']}"
        finally:
            server.kill()


def opener(paces: dict[str, dict[str, Any]], seeds: Iterator[int]) -> Callable[[str], Any]:
    """Boots the arm's server, each boot with the next seed."""

    @contextmanager
    def opened(arm: str) -> Iterator[Target]:
        with process(**paces[arm], seed=next(seeds)) as url:
            yield Target(Here(url))

    return opened


def campaign(
    folder: Path, question: ab.Question, a: dict[str, Any], b: dict[str, Any], seeds: Iterator[int]
) -> Comparison:
    """One live campaign."""
    recorder = Recorder(folder)
    recorder.begin("ab", question.as_json())
    with contextlib.closing(recorder):
        return ab.run(question, opener({"A": a, "B": b}, seeds), recorder, quiet())
