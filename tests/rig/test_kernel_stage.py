"""The kernels compiled on a real engine without a network: for this machine, cross for arm64, and what a spill does."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rig_hosts import REPOSITORY, Rig

from exl3kit import kernel_image, lock, nodes, offline, recipes, rootfs, symbols
from exl3kit.errors import ExitCode, KitError
from exl3kit.progress import Progress

pytestmark = pytest.mark.full  # a builder's rootfs and a compiler: minutes


@pytest.fixture
def node1(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Iterator[nodes.Node]:
    for name in ("EXL3KIT_SSH_CONFIG", "DOCKER_CONFIG", "PATH"):
        monkeypatch.setenv(name, rig.env[name])
    with nodes.open_nodes("node1") as (node,):
        yield node


def stage(host: str, files: list[dict[str, Any]] | None = None) -> kernel_image.Stage:
    """The kernels of a GB10 at 4 bits, as a recipe would have them compiled, on an x86 engine."""
    data = json.loads(lock.make_lock(recipes.load("demo", ["image.platform=linux/amd64"])).canonical())
    data |= {"arch": ["12.1"], "rates": [4], "codebooks": ["mcg"], "toolchain": lock.toolchain()}
    data["build_args"] = {"EXL3_ARCH": "12.1", "EXL3_RATES": "4", "EXL3_CODEBOOKS": "mcg"}
    data["files"] = files or [entry._asdict() for entry in lock.context_files()]
    return kernel_image.Stage(lock.Lock(data), "linux/amd64", host)


@pytest.mark.parametrize("host", ["linux/amd64", "linux/arm64"])
def test_kernels_are_compiled_without_a_network_and_verified(
    rig: Rig, node1: nodes.Node, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given what `kit fetch` brings, and then no network
    wanted, progress = stage(host), Progress(Console(file=io.StringIO(), width=200))
    kernel_image.fetch(wanted, progress)
    rootfs.make(wanted.builder, wanted.platform)
    symbols.install(progress)
    monkeypatch.setenv(offline.VARIABLE, "1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    # when
    tag = kernel_image.ensure(wanted, node1, progress)
    # then it holds the library alone, with every symbol for that host
    environment = {**rig.env, "DOCKER_HOST": rig.docker_host("node1")}
    argv = [sys.executable, "-m", "exl3kit.cli", "verify", "symbols", tag, "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=REPOSITORY, env=environment)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    machine = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}[host]
    assert (report["host"], report["asked"]["targets"], report["errors"]) == (machine, ["12.1"], [])
    assert node1.engine.images.get(tag).attrs["Size"] < 10_000_000
    # and a second time nothing is compiled
    again = Progress(Console(file=io.StringIO(), width=200))
    assert kernel_image.ensure(stage(host), node1, again) == tag and again.seconds["kernels"] == 0


def test_a_kernel_over_its_budget_stops_the_build_and_is_named(
    node1: nodes.Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a budget that no kernel can keep, in a file of the context
    wanted = stage("linux/amd64")
    entries = wanted.entries(kernel_image.fetch(wanted, Progress(Console(file=io.StringIO()))))
    rows = next(entry for entry in entries if entry.name == "overlay/csrc/rows.cu")
    assert not isinstance(rows.source, bytes)
    text = "// budget: exl3 registers=4\n" + rows.source.read_text()
    slow = "overlay/csrc/gemm.cu"  # not needed to see it
    tight = [e for e in entries if e is not rows and e.name != slow] + [type(rows)(rows.name, text.encode())]
    monkeypatch.setattr(kernel_image.Stage, "entries", lambda *_: tight)
    # when / then
    with pytest.raises(KitError, match="the build failed in") as refused:
        kernel_image.ensure(wanted, node1, Progress(Console(file=io.StringIO())))
    assert refused.value.code == ExitCode.BUILD
    log = Path(str(refused.value.next_step).removeprefix("read ")).read_text()
    assert "kernels over their budget" in log and "registers" in log
    assert not node1.engine.images.list(name=wanted.tag)
