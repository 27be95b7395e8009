"""What the tests of the kernel build share: paths, a builder of specimen libraries, a runner of the symbol check."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(REPO / "overlay/csrc"), str(REPO / "overlay")]

import build  # noqa: E402
import compiler  # noqa: E402
import toolchain as wheels  # noqa: E402

LOCK = REPO / "locks/cuda-13.0-toolchain.json"
SPECIMEN = REPO / "tests/specimen"


def need_cross(host: str) -> None:
    """Skip, saying which Debian package is missing, where this machine cannot compile for ``host``."""
    try:
        compiler.find_cxx(wheels.build_machine(), host)
    except compiler.BuildError as error:
        pytest.skip(str(error))


Symbols = Callable[..., tuple[int, dict[str, Any]]]
Edited = Callable[[dict[str, tuple[str, str] | None]], Path]


@dataclass(frozen=True)
class Workshop:
    """Builds specimen libraries; objects are cached for the session in a folder of its own."""

    toolchain: Path
    cache: Path

    def tools(self, host: str) -> compiler.Tools:
        need_cross(host)
        return compiler.find_tools(self.toolchain, host, None)

    def request(self, source: Path = SPECIMEN, host: str = "", **fields: Any) -> compiler.Request:
        asked = {"targets": ("12.0", "12.1"), "rates": (4.0,), "codebooks": ("mcg",), **fields}
        return compiler.Request(source=source, host=host or wheels.build_machine(), **asked)

    def build(self, out: Path, request: compiler.Request) -> dict[str, Any]:
        return build.build(request, self.tools(request.host), self.cache, out, 2)


def run_symbols(*words: object) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of `python -m exl3_vllm.symbols`."""
    argv = [sys.executable, "-m", "exl3_vllm.symbols", *map(str, words), "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=REPO / "overlay")
    return done.returncode, json.loads(done.stdout) if done.stdout else {"said": done.stderr}
