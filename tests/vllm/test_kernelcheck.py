"""The kernel check of an image where it cannot pass: no library, and a torch without CUDA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]


def checked(library: Path) -> tuple[int, dict[str, Any]]:
    environment = {**os.environ, "PYTHONPATH": str(REPO / "overlay")}
    argv = [sys.executable, "-m", "exl3_vllm.kernelcheck", "--library", str(library)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=environment)
    report: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, report


def test_a_missing_library_is_an_error_and_no_traceback(tmp_path: Path) -> None:
    code, report = checked(tmp_path / "exl3_kernels.abi3.so")
    assert code == 5 and "no kernel library; build it with" in report["errors"][0]
    assert (report["abi"], report["instances"], report["gpus"]) == (None, [], [])


def test_a_file_that_is_no_library_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "exl3_kernels.abi3.so"
    file.write_bytes(b"no ELF")
    code, report = checked(file)
    assert code == 5 and "not a usable kernel library" in report["errors"][0]
