"""The shipped kernels build on a host with Python, pip and g++ and nothing of CUDA: no toolkit, no driver, no GPU."""

from __future__ import annotations

import json

import pytest
from rig_hosts import REPOSITORY, Rig, rig_script

BUILD = f"{REPOSITORY}/overlay/csrc/build.py"
LOCK = f"{REPOSITORY}/locks/cuda-13.0-toolchain.json"


@pytest.mark.full
@pytest.mark.parametrize(("host", "compiler"), [("x86_64", "g++"), ("aarch64", "g++-12-aarch64-linux-gnu")])
def test_the_kernels_build_and_verify_on_a_bare_host(no_rig: None, host: str, compiler: str) -> None:
    # Given a bare host, and what Debian's packages bring
    bare = ["--no-engine", "--release", "bookworm", "--nodes", "bare", "--nat", "--bind", str(REPOSITORY)]
    rig_script("up", *bare, timeout=600)
    rig = Rig()
    rig.exec("bare", "apt-get", "update", "--error-on=any", timeout=120)
    packages = ["python3-pip", "g++", compiler]
    rig.exec("bare", "apt-get", "install", "-qy", "--no-install-recommends", *packages, timeout=300)
    assert rig.exec("bare", "sh", "-c", "command -v nvcc nvidia-smi", check=False).returncode
    # When the toolchain comes from the locked wheels and the headline set is built for a host
    tools = ["--lock", LOCK, "--into", "/tmp/tools", "--host", host, "--torch-headers"]
    rig.exec("bare", "python3", BUILD, "toolchain", *tools, timeout=300)
    words = ["--toolchain", "/tmp/tools", "--host", host, "--cache", "/tmp/cache", "--out", "/tmp/x.so"]
    rig.exec("bare", "python3", BUILD, "library", *words, timeout=900)
    # Then the library holds every symbol for both targets, for that host
    reader = "/tmp/tools/x86_64/nvidia/cu13/bin/cuobjdump"
    check = f"cd {REPOSITORY}/overlay && python3 -m exl3_vllm.symbols /tmp/x.so --cuobjdump {reader} --json"
    report = json.loads(rig.exec("bare", "sh", "-c", check, timeout=120).stdout)
    assert report["ok"] and report["host"] == host and report["asked"]["targets"] == ["12.0", "12.1"]
