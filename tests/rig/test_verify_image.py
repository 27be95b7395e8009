"""`kit verify symbols IMAGE` reads the library out of an image in a real engine, for an arm64 image on x86 too."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rig_hosts import REPOSITORY, Rig

INSIDE = "/opt/kernels/exl3_kernels.abi3.so"
IMAGE = "exl3kit-test-kernels:1"
Report = Callable[[str], tuple[int, dict[str, Any]]]


@pytest.fixture
def imported(rig: Rig) -> Iterator[Callable[..., None]]:
    """Makes the image on node1 with a library in it, or without, labelled or not; removed after the test."""

    def make(content: bytes | None, label: str = f"io.exl3kit.kernels={INSIDE}") -> None:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            member = tarfile.TarInfo(INSIDE.lstrip("/") if content is not None else "empty")
            member.size = len(content or b"")
            archive.addfile(member, io.BytesIO(content or b""))
        argv = [rig.status["docker"], "--host", rig.docker_host("node1"), "import"]
        argv += ["--change", f"LABEL {label}", "-", IMAGE]
        subprocess.run(argv, input=buffer.getvalue(), check=True, capture_output=True)

    yield make
    rig.docker("node1", "rmi", "--force", IMAGE)


@pytest.fixture
def verify(rig: Rig) -> Report:
    """Run the verb against node1's engine as the local one: (exit code, JSON)."""

    def run(subject: str) -> tuple[int, dict[str, Any]]:
        argv = [sys.executable, "-m", "exl3kit.cli", "verify", "symbols", subject, "--json"]
        environment = {**rig.env, "DOCKER_HOST": rig.docker_host("node1")}
        done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=REPOSITORY, env=environment)
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, json.loads(done.stdout)

    return run


def test_the_library_in_an_image_is_verified_and_nothing_is_left(
    rig: Rig, specimen: Path, imported: Callable[..., None], verify: Report
) -> None:
    before = rig.docker("node1", "ps", "--all", "--quiet").stdout
    imported(specimen.read_bytes())
    code, report = verify(IMAGE)
    assert (code, report["errors"], report["file"]) == (0, [], IMAGE)
    assert rig.docker("node1", "ps", "--all", "--quiet").stdout == before


def test_a_stripped_library_in_an_image_fails(
    specimen: Path, imported: Callable[..., None], verify: Report, tmp_path: Path
) -> None:
    subprocess.run(["strip", "-o", tmp_path / "stripped.so", specimen], check=True)
    imported((tmp_path / "stripped.so").read_bytes())
    code, report = verify(IMAGE)
    assert code == 5 and report["errors"][0].startswith("no symbol table")


def test_an_image_without_the_library_is_named(imported: Callable[..., None], verify: Report) -> None:
    imported(None)
    code, report = verify(IMAGE)
    assert code == 5 and report["error"]["what"] == f"the image has no library at {INSIDE}"


def test_an_image_of_somebody_else_is_named(imported: Callable[..., None], verify: Report) -> None:
    imported(b"", label="maintainer=nobody")
    code, report = verify(IMAGE)
    assert code == 5 and report["error"]["what"] == "the image has no label io.exl3kit.kernels"


def test_an_image_that_is_not_there_is_named(rig: Rig, verify: Report) -> None:
    code, report = verify("exl3kit-test-absent:1")
    assert code == 5 and report["error"]["where"] == "exl3kit-test-absent:1"


SMI = """#!/bin/sh
[ "$1" = --query-gpu=name,compute_cap ] && echo "NVIDIA {name}, {capability}"
"""


@pytest.fixture
def with_gpu(rig: Rig) -> Iterator[Callable[[str, str], None]]:
    """Gives node1 a driver that lists one GPU; taken away after the test."""
    path = "/usr/local/bin/nvidia-smi"

    def give(name: str, capability: str) -> None:
        script = SMI.format(name=name, capability=capability)
        rig.exec("node1", "sh", "-c", f"cat > {path} <<'END'\n{script}END\nchmod 755 {path}")

    yield give
    rig.exec("node1", "rm", "-f", path)


def verify_on_node(rig: Rig, specimen: Path) -> tuple[int, str]:
    argv = [sys.executable, "-m", "exl3kit.cli", "verify", "symbols", str(specimen), "--nodes", "node1"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=REPOSITORY, env=rig.env)
    return done.returncode, done.stdout + done.stderr


def test_a_node_whose_gpu_the_library_has_code_for_passes(
    rig: Rig, specimen: Path, with_gpu: Callable[[str, str], None]
) -> None:
    with_gpu("GB10", "12.1")
    code, said = verify_on_node(rig, specimen)
    assert code == 0 and "node node1: NVIDIA GB10 (12.1)" in said


def test_a_node_with_another_gpu_is_named(rig: Rig, specimen: Path, with_gpu: Callable[[str, str], None]) -> None:
    with_gpu("H200", "9.0")
    code, said = verify_on_node(rig, specimen)
    assert code == 5
    assert "node node1: NVIDIA H200 has compute capability 9.0, and the library has machine code for 12.0, 12.1" in said


def test_a_node_without_a_driver_is_named(rig: Rig, specimen: Path) -> None:
    code, said = verify_on_node(rig, specimen)
    assert code == 5 and "node node1: has no NVIDIA GPU that its driver knows of (nvidia-smi: " in said
