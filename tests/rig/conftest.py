"""The rig for tests: two real hosts with engines and sshd, brought up once per session by scripts/rig.

A test takes `rig` to share those two hosts, or `no_rig` to bring up hosts of its own; the latter run first, as there is
only one rig at a time. When the session ends, the rig is taken down and must have left nothing on the machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))  # for rig_lib

from rig_hosts import REPOSITORY, TINY_IMAGE, Rig, import_tiny, rig_script, rig_status, room, traces


def need_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("the rig makes network namespaces and mounts, which needs root")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with hosts of their own first, while the session's are not yet up."""
    items.sort(key=lambda item: "no_rig" not in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def rig() -> Iterator[Rig]:
    """Two hosts, node1 and node2, without a network but their own. One that was up already is used and left up."""
    need_root()
    was_up = rig_status()["up"]
    before = traces()
    try:
        if not was_up:
            rig_script("up", *room())
        yield Rig()
    finally:
        if not was_up:
            rig_script("down")
    if not was_up:
        assert sorted(traces() - before) == [], "the rig left something behind"


@pytest.fixture
def no_rig() -> Iterator[None]:
    """No rig is up, so the test may bring one up; it is taken down after the test."""
    need_root()
    if rig_status()["up"]:
        pytest.skip("a rig is up that this test did not start, and there is one at a time: `scripts/rig down`")
    try:
        yield
    finally:
        rig_script("down")


@pytest.fixture(scope="session")
def specimen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small kernel library for this machine's hosts, with the symbols of the real one, for both Blackwell targets."""
    folder = tmp_path_factory.mktemp("kernels")
    build = [sys.executable, str(REPOSITORY / "overlay/csrc/build.py")]
    tools = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "exl3kit/toolchain/cuda-13.0"
    lock = REPOSITORY / "locks/cuda-13.0-toolchain.json"
    subprocess.run([*build, "toolchain", "--lock", lock, "--into", tools], check=True)
    words = ["library", "--source", REPOSITORY / "tests/specimen", "--toolchain", tools, "--no-torch"]
    subprocess.run([*build, *words, "--cache", folder / "cache", "--out", folder / "x.so"], check=True)
    return folder / "x.so"


@pytest.fixture(scope="session")
def tiny_image(rig: Rig) -> str:
    """The name of a 2 MB image with a shell, present on both hosts."""
    for node in rig.status["nodes"]:
        import_tiny(rig, node["name"])
    return TINY_IMAGE
