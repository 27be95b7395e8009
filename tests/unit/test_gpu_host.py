"""What of scripts/gpu needs no GPU: who waits for whom, what a batch names, what is cut out of vLLM's wheel."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
HOST = REPO / "scripts" / "gpu_host"
sys.path[:0] = [str(REPO / "scripts"), str(HOST)]

import batches  # noqa: E402
import gpu_bundle  # noqa: E402

WORK, PACK = Path("/work-of-the-host"), Path("/pack")


@pytest.mark.parametrize("name", sorted(batches.BATCHES))
def test_jobs_of_a_batch_have_labels_of_their_own_and_wait_for_jobs_that_exist(name: str) -> None:
    for wave in batches.BATCHES[name](WORK, PACK):
        labels = [job.label for job in wave]
        assert len(set(labels)) == len(labels)
        assert {label for job in wave for label in job.after} <= set(labels)
        quiet = {job.quiet for job in wave if job.quiet}
        assert quiet <= {job.timed for job in wave}, "a job keeps quiet for nobody"


@pytest.mark.parametrize("name", sorted(batches.BATCHES))
def test_programs_of_a_batch_exist(name: str) -> None:
    for wave in batches.BATCHES[name](WORK, PACK):
        for job in wave:
            program = next((word for word in job.argv if word.endswith(".py")), None)
            assert program is None or Path(program).is_file()


JOBS = """\
import sys
from run import Job

def sleeps(seconds):
    return [sys.executable, "-c", f"import time; time.sleep({seconds})"]

TURN = '''
import sys, time
from on_gpu import alone
with alone(sys.argv[1]):
    begin = time.time()
    time.sleep(0.4)
    print("RESULT", sys.argv[1], begin, time.time())
'''

def batch(work, pack):
    yield [
        Job("first", sleeps(3), quiet="bench"),
        Job("one", [sys.executable, "-c", TURN, "one"], timed="bench"),
        Job("two", [sys.executable, "-c", TURN, "two"], timed="bench"),
        Job("fails", [sys.executable, "-c", "raise ValueError('planted')"], after=("first",)),
        Job("hangs", sleeps(60), limit=2, nice=3),
    ]

BATCHES = {"all": batch}
"""


def test_timed_jobs_take_turns_once_it_is_quiet_and_nothing_stops_the_others(tmp_path: Path) -> None:
    """Given one job that fails and one that hangs, then the timed ones ran apart, after the quiet one; all is kept."""
    host = tmp_path / "pack" / "gpu_host"
    host.mkdir(parents=True)
    for name in ("run.py", "on_gpu.py"):
        (host / name).write_text((HOST / name).read_text())
    (host / "batches.py").write_text(JOBS)
    library = tmp_path / "pack/overlay/exl3_vllm/exl3_kernels.abi3.so"
    library.parent.mkdir(parents=True)
    library.touch()
    environment = {**os.environ, "GPU_WORK": str(tmp_path / "work"), "OUT": str(tmp_path / "out"), "GPU_SECONDS": "60"}
    command = [sys.executable, host / "run.py", "all"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    said = done.stdout
    assert done.returncode == 0, done.stderr
    assert "hangs: past its limit" in said and "fails: 1" in said and "planted" in said
    spans = {
        line.split()[1]: [float(word) for word in line.split()[2:]] for line in said.splitlines() if "RESULT" in line
    }
    earlier, later = sorted(spans.values())
    assert later[0] >= earlier[1]
    ended = float(said.split("] first")[0].rpartition("[")[2].split()[0])
    started = float(said.split("] one")[0].rpartition("[")[2].split()[0])
    assert started > ended
    assert {"results.tar.gz", "logs.tar.gz"} <= {path.name for path in (tmp_path / "out").iterdir()}


def program(kind: int, architecture: int, content: bytes) -> bytes:
    """One entry of a fat binary, with the fields that are read."""
    header = bytearray(64)
    gpu_bundle.ENTRY.pack_into(header, 0, kind, 1, len(header), len(content))
    struct.pack_into("<I", header, 28, architecture)
    return bytes(header) + content


def test_only_machine_code_of_the_wanted_architecture_is_left(tmp_path: Path) -> None:
    entries = program(2, 80, b"A" * 32) + program(2, 90, b"B" * 32) + program(1, 90, b"C" * 32)
    binary = gpu_bundle.HEADER.pack(int.from_bytes(gpu_bundle.MAGIC, "little"), 1, 16, len(entries)) + entries
    source, target = tmp_path / "in.so", tmp_path / "out.so"
    source.write_bytes(b"code" * 8 + gpu_bundle.MAGIC + b"text" + binary + b"more")
    gpu_bundle.slim(source, target, lambda content: True)
    made = target.read_bytes()
    assert len(made) == source.stat().st_size and made.endswith(b"more")
    assert (made.count(b"A"), made.count(b"B"), made.count(b"C")) == (0, 32, 0)
    with pytest.raises(gpu_bundle.BundleError, match=r"in\.so holds no machine code"):
        gpu_bundle.slim(source, target, lambda content: False)


def test_a_folder_is_packed_with_the_plugins_entry_point(tmp_path: Path) -> None:
    """Given a toolchain that only says what it was asked, then the folder holds what run.sh needs."""
    build = tmp_path / "checkout/overlay/csrc/build.py"
    for name in ("overlay/exl3_vllm", "tests/gpu", "scripts/gpu_host"):
        (tmp_path / "checkout" / name).mkdir(parents=True)
    build.parent.mkdir(parents=True)
    build.write_text("import json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    script = tmp_path / "checkout/scripts/gpu"
    script.write_text((REPO / "scripts/gpu").read_text())
    done = subprocess.run(
        [sys.executable, script, "pack", tmp_path / "pack", "--rates", "3,4"],
        capture_output=True,
        text=True,
        check=True,
    )
    asked = [json.loads(line) for line in done.stdout.splitlines()]
    assert asked[0][asked[0].index("--rates") :][:2] == ["--rates", "3,4"] and "EXL3_MMA_REPEAT=3" in asked[1]
    info = tmp_path / "pack/overlay/exl3_vllm-0.1.0.dist-info/entry_points.txt"
    assert info.read_text() == "[vllm.general_plugins]\nexl3 = exl3_vllm:register\n"
    assert "gpu_host/run.py" in (tmp_path / "pack/run.sh").read_text()
