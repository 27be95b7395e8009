"""An image's kernels are called and measured on the GPU of a node: on a host that plays a GB10, by a program that plays
the image's Python, since no GPU is at hand. The engine, ssh and the library that is read are real."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rig_hosts import REPOSITORY, Rig, rig_script, tiny_root

from exl3kit import kernel_bench, nodes
from exl3kit.errors import ExitCode, KitError
from exl3kit.progress import Progress

IMAGE = "exl3kit-test-gb10:1"
LIBRARY = "/opt/exl3/kernels/exl3_kernels.abi3.so"
RIGHT = {"abi": 1, "instances": ["4 mcg"], "errors": [],
         "gpus": [{"name": "NVIDIA GB10", "capability": "12.1", "error": {"4 mcg": 3.1e-4}}]}  # fmt: skip
WRONG = {**RIGHT, "errors": ["NVIDIA GB10 (12.1): wrong products, relative error 4 mcg 7.0e-01"]}

MOCK_PYTHON_OF_A_GB10 = """#!/bin/sh
# Plays the Python of an image on a GB10: what the kernel check prints there, and the files of the bench.
case $2 in
exl3_vllm.kernelcheck) echo '{answer}' ;;
exl3_vllm.bench)
    mkdir -p /tmp/bench; cd /tmp/bench
    echo '{{"about": {{"gpu": "NVIDIA GB10"}}, "results": {{"K8": true}}}}' > bench.json
    echo 'K8  five runs bit-identical  yes' > bench.txt
    echo '{{"capability": [12, 1], "sms": 48}}' > table.json
    echo 'K8: 0.1 s' >&2 ;;
esac
"""


@pytest.fixture
def gb10(no_rig: None, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """One host that plays a DGX Spark."""
    rig_script("up", "--fake-gpu", "--nodes", "node1")
    rig = Rig()
    monkeypatch.setenv("EXL3KIT_SSH_CONFIG", rig.env["EXL3KIT_SSH_CONFIG"])
    return rig


@pytest.fixture
def image(gb10: Rig, specimen: Path) -> Callable[[str], None]:
    """Gives node1 an image with the specimen library and a Python that prints ``answer``."""

    def make(answer: str) -> None:
        buffer = io.BytesIO(tiny_root(gb10.status["template"]))
        with tarfile.open(fileobj=buffer, mode="a") as archive:
            for name, content, mode in (
                (LIBRARY, specimen.read_bytes(), 0o644),
                ("/bin/python", MOCK_PYTHON_OF_A_GB10.format(answer=answer).encode(), 0o755),
            ):
                member = tarfile.TarInfo(name.lstrip("/"))
                member.size, member.mode = len(content), mode
                archive.addfile(member, io.BytesIO(content))
        argv = [gb10.status["docker"], "--host", gb10.docker_host("node1"), "import"]
        argv += ["--change", f"LABEL io.exl3kit.kernels={LIBRARY}", "--change", "ENV PATH=/bin", "-", IMAGE]
        subprocess.run(argv, input=buffer.getvalue(), check=True, capture_output=True)

    return make


def verified(rig: Rig) -> tuple[int, dict[str, Any]]:
    argv = [sys.executable, "-m", "exl3kit.cli", "verify", "symbols", IMAGE, "--nodes", "node1", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=REPOSITORY, env=rig.env)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_the_kernels_of_an_image_are_called_on_the_node(gb10: Rig, image: Callable[[str], None]) -> None:
    # given kernels that are right there, when they are verified, then the node's answer is told
    image(json.dumps(RIGHT))
    code, report = verified(gb10)
    assert (code, report["errors"]) == (0, [])
    assert report["nodes"] == {"node1": ["NVIDIA GB10 (12.1)"]} and report["called"]["node1"] == RIGHT
    # given some that are wrong, a torch that sees no GPU, an image without the check: 5, and what it was
    image(json.dumps(WRONG))
    code, report = verified(gb10)
    assert (code, report["errors"]) == (5, [f"node node1: {WRONG['errors'][0]}"])
    image(json.dumps({**RIGHT, "gpus": []}))
    code, report = verified(gb10)
    assert code == 5 and report["errors"][0].startswith("node node1: torch in the image sees no GPU")
    image("")
    code, report = verified(gb10)
    assert code == 5 and report["error"]["what"] == "the image's kernel check gave no report"
    assert gb10.docker("node1", "ps", "--all", "--quiet").stdout == ""


def test_the_bench_of_a_node_brings_its_files_back(gb10: Rig, image: Callable[[str], None], tmp_path: Path) -> None:
    # given
    image("")
    progress, out = Progress(Console(file=io.StringIO())), tmp_path / "node1"
    with nodes.open_nodes("node1") as (node,):
        # when
        told = kernel_bench.on_node(node, IMAGE, None, out, progress)
        # then
        assert told["valid"] and told["about"]["gpu"] == "NVIDIA GB10"
        assert told["table"] == {"capability": [12, 1], "sms": 48}
        assert sorted(path.name for path in out.iterdir()) == ["bench.json", "bench.txt", "table.json"]
        # and where the driver lists nothing, nothing is run
        gb10.exec("node1", "rm", "/usr/local/bin/nvidia-smi")
        with pytest.raises(KitError, match="has no NVIDIA GPU") as refused:
            kernel_bench.on_node(node, IMAGE, None, out, progress)
    assert refused.value.code == ExitCode.PREFLIGHT
    assert gb10.docker("node1", "ps", "--all", "--quiet").stdout == ""
