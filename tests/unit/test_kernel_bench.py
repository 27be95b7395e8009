"""`kit bench kernels` without a GPU here: a named mock plays the bench of a GB10, and refusals are the real ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from exl3kit import kernel_bench

REPO = Path(__file__).resolve().parents[2]

MOCK_OF_A_GB10 = """#!{python}
# Plays `python -m exl3_vllm.bench` on a GB10, of which none is at hand: the files it writes, its last words, its code.
import json, pathlib, sys
assert sys.argv[1:3] == ["-m", "exl3_vllm.bench"], sys.argv
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
about = {{"gpu": "NVIDIA GB10", "torch": "2.11.0+cu130", "table": {{"fused_rows": 4096}}}}
(out / "bench.json").write_text(json.dumps({{"about": about, "results": {{"K8": {valid}}}}}))
(out / "bench.txt").write_text("K8  five runs bit-identical  [yes]\\n")
pathlib.Path(sys.argv[sys.argv.index("--write-table") + 1]).write_text('{{"capability": [12, 1], "sms": 48}}')
print("K8: 0.1 s", file=sys.stderr)
sys.exit({code})
"""


@pytest.fixture
def library(tmp_path: Path) -> Path:
    file = tmp_path / "exl3_kernels.abi3.so"
    file.write_bytes(b"")
    return file


def kit(*words: object, python: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ)
    if python is not None:
        environment["EXL3KIT_VLLM_PYTHON"] = str(python)
    argv = [sys.executable, "-m", "exl3kit.cli", "bench", "kernels", *map(str, words)]
    return subprocess.run(argv, capture_output=True, text=True, check=False, cwd=REPO, env=environment)


def mock(tmp_path: Path, code: int = 0, text: str | None = None) -> Path:
    python = tmp_path / "python"
    python.write_text(text or MOCK_OF_A_GB10.format(python=sys.executable, code=code, valid=code == 0))
    python.chmod(0o755)
    return python


def test_json_table_and_choices_of_the_gpu_come_back(tmp_path: Path, library: Path) -> None:
    done = kit("--library", library, "--out", tmp_path / "out", "--json", python=mock(tmp_path))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    report = told["nodes"]["local"]
    assert report["about"]["gpu"] == "NVIDIA GB10" and report["valid"] is True
    assert report["table"] == {"capability": [12, 1], "sms": 48}
    assert sorted(Path(file).name for file in report["files"]) == ["bench.json", "bench.txt", "table.json"]


def test_people_get_the_table_of_verdicts(tmp_path: Path, library: Path) -> None:
    done = kit("--library", library, "--out", tmp_path / "out", python=mock(tmp_path))
    assert "local: NVIDIA GB10\nK8  five runs bit-identical  [yes]\n" in done.stdout and "K8: 0.1 s" in done.stderr


def test_results_that_cannot_be_trusted_leave_with_8(tmp_path: Path, library: Path) -> None:
    done = kit("--library", library, "--out", tmp_path / "out", "--json", python=mock(tmp_path, code=8))
    assert done.returncode == 8 and json.loads(done.stdout)["nodes"]["local"]["valid"] is False


def test_a_bench_that_breaks_leaves_with_8_and_its_last_words(tmp_path: Path, library: Path) -> None:
    broken = mock(tmp_path, text="#!/bin/sh\necho 'CUDA error: out of memory' >&2\nexit 1\n")
    done = kit("--library", library, "--out", tmp_path / "out", python=broken)
    assert done.returncode == 8 and "did not come to an end (CUDA error: out of memory)" in done.stderr


def test_no_gpu_is_a_refusal_with_3(tmp_path: Path, library: Path) -> None:
    refuses = mock(tmp_path, text="#!/bin/sh\necho 'bench: no GPU on this machine' >&2\nexit 3\n")
    done = kit("--library", library, "--out", tmp_path / "out", python=refuses)
    assert done.returncode == 3 and "this machine: no GPU that torch can use (no GPU on this machine)" in done.stderr


@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        ((), 2, "name a recipe, or a file with --library"),
        (("demo",), 2, "demo: the recipe asks for no GPU code"),
        (("--library", "/nowhere.so"), 2, "there is no such library"),
    ],
)
def test_what_cannot_be_measured_is_refused(given: tuple[str, ...], code: int, said: str) -> None:
    done = kit(*given)
    assert done.returncode == code and said in done.stderr and "Traceback" not in done.stderr


def test_the_words_for_the_bench() -> None:
    assert kernel_bench.words("/tmp/x", "K1,K4") == [
        *("--out", "/tmp/x", "--write-table", "/tmp/x/table.json", "--only", "K1,K4"),
    ]
