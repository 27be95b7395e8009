"""The image of the kernels alone: what it is named by, what it is built from, and what stays out of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from docker.errors import ImageNotFound
from rich.console import Console

from exl3kit import (
    bundle,
    context,
    image,
    kernel_builder,
    kernel_image,
    lock,
    offline,
    paths,
    pins,
    recipes,
    rootfs,
    symbols,
    wheelhouse,
)
from exl3kit.errors import ExitCode, KitError
from exl3kit.nodes import Node
from exl3kit.progress import Progress, Stage

CSRC = paths.OVERLAY / "csrc"


def gpu_lock(**changes: Any) -> lock.Lock:
    """The demo's lock, as if its recipe named Blackwell GPUs (no pins of a CUDA vLLM are needed for that)."""
    data = json.loads(lock.make_lock(recipes.load("demo", ["image.platform=linux/amd64"])).canonical())
    data |= {"arch": ["12.0", "12.1"], "rates": [2.5, 4], "codebooks": ["mcg"], "toolchain": lock.toolchain()}
    data["build_args"] = {"EXL3_ARCH": "12.0;12.1", "EXL3_RATES": "2.5;4", "EXL3_CODEBOOKS": "mcg"}
    data["files"] = [entry._asdict() for entry in lock.context_files()]
    return lock.Lock(data | changes)


def stage(platform: str = "linux/amd64", host: str = "linux/amd64", **changes: Any) -> kernel_image.Stage:
    return kernel_image.Stage(gpu_lock(**changes), platform, host)


def with_other(path: str) -> list[dict[str, Any]]:
    """The lock's files with another content of one."""
    return [f | {"sha256": "0" * 64} if f["path"] == path else f for f in gpu_lock().data["files"]]


def test_only_what_decides_the_library_decides_its_name() -> None:
    key = stage().key
    assert stage(files=with_other("overlay/exl3_vllm/linear.py")).key == key  # Python: nothing is compiled
    assert stage(wheels=[], base={}, vllm={}).key == key
    assert stage(files=with_other("overlay/csrc/mainloop.cuh")).key != key
    assert stage(build_args=gpu_lock().data["build_args"] | {"EXL3_ARCH": "12.1"}).key != key
    assert stage(host="linux/arm64").key != key != stage("linux/arm64", "linux/arm64").key


def test_the_context_holds_sources_compiler_and_pins_and_no_python_of_the_overlay() -> None:
    names = [entry.name for entry in stage().entries(Path("/wheelhouse"))]
    assert {"Dockerfile", "toolchain.json", "overlay/csrc/build.py", "overlay/csrc/gemm.cu"} <= set(names)
    assert sum(name.startswith("wheels/nvidia_cuda_nvcc-") for name in names) == 1
    assert not any(name.startswith(("overlay/exl3_vllm/", "overlay/patches/")) for name in names)


def test_a_cross_build_takes_the_compiler_of_the_builder_and_the_runtime_of_the_host() -> None:
    names = [wheel.filename or "" for wheel in stage(host="linux/arm64").wheels]
    assert [name for name in names if "nvcc" in name and "aarch64" in name] == []
    assert sum("runtime" in name for name in names) == 2


def test_the_image_gets_the_library_and_neither_sources_nor_compiler() -> None:
    entries = context.for_image(gpu_lock())
    assert not any(entry.name.startswith(context.SOURCES) for entry in entries)
    labels = image.labels(gpu_lock())
    assert labels[symbols.KERNELS_LABEL] == "/opt/exl3/kernels/exl3_kernels.abi3.so"
    assert symbols.KERNELS_LABEL not in image.labels(lock.make_lock(recipes.load("demo")))


def test_the_builder_is_pinned_for_both_platforms_and_the_cross_build() -> None:
    for platform, host in (("linux/amd64",) * 2, ("linux/arm64",) * 2, ("linux/amd64", "linux/arm64")):
        packages = kernel_builder.load(platform, host).packages
        assert {"g++", "python3", "libc6"} <= set(packages)
        assert ("g++-aarch64-linux-gnu" in packages) == (platform != host)
    with pytest.raises(KitError, match="no builder of kernels is pinned for linux/arm64 for linux/amd64") as refused:
        kernel_builder.load("linux/arm64", "linux/amd64")
    assert refused.value.code == ExitCode.PREFLIGHT


def test_case_7_what_is_fetched_for_a_node_suffices_to_compile_its_kernels_and_to_read_them_here() -> None:
    # given an image with kernels for an arm64 node
    recipe = recipes.load("demo", ["image.platform=linux/arm64"])
    pinned = pins.load(recipe.image)
    # when
    names = {path.name for path in wheelhouse.Sources(recipe, gpu_lock(), pinned).files()}
    # then its compiler, torch's headers and both root file systems are fetched and bundled, and what reads the result
    assert any(name.startswith("nvidia_cuda_nvcc-") and "aarch64" in name for name in names)
    assert lock.toolchain()["torch_headers"]["filename"] in names
    builder = kernel_builder.load("linux/arm64", "linux/arm64")
    assert rootfs.place(builder, "linux/arm64").name in names
    assert isinstance(pinned.base, pins.Rootfs) and rootfs.place(pinned.base, "linux/arm64").name in names
    here = symbols.this_machine()
    assert any(name.startswith("nvidia_cuda_cuobjdump-") and here in name for name in names)
    # and an image without kernels needs none of it
    assert not wheelhouse.of(recipes.load("demo")).kernels


def node_with_room(free: int) -> Node:
    """An engine without any image, whose disk is as full as no disk of a test is."""

    def missing(*_: Any) -> None:
        raise ImageNotFound("none")  # type: ignore[no-untyped-call]

    def run(argv: list[str], *_: Any, **__: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(argv, 0, f"head\n/dev/sda 9 1 {free} 1% /\n", "")

    images = SimpleNamespace(list=lambda **_: [], get=missing)
    engine = SimpleNamespace(images=images, info=lambda: {"Architecture": "x86_64", "DockerRootDir": "/var/lib/docker"})
    return Node("n", engine, "unix:///played", "10.0.0.1", False, run, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("free", "environment", "what"),
    [
        (5_000_000_000, None, "the build needs 5.3 GB and 5.0 GB are free"),
        (2_000_000_000, "exl3kit-env:1", "compiling the kernels needs 3 GB and 2.0 GB are free"),
    ],
)
def test_a_disk_without_room_refuses_a_build_before_anything_is_fetched(
    free: int, environment: str | None, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given an empty cache and no network, then the room is refused, and a fetch only where there is room."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(offline.VARIABLE, "1")
    monkeypatch.setattr(image, "_find_environment", lambda *_: environment)
    recipe = recipes.load("demo", ["image.platform=linux/amd64"])
    with pytest.raises(KitError, match=re.escape(what)) as refused:
        image.build(recipe, gpu_lock(), node_with_room(free), progress=Progress(Console(quiet=True)))
    assert refused.value.code == ExitCode.PREFLIGHT
    with pytest.raises(KitError, match="nothing may be fetched"):
        image.build(recipe, gpu_lock(), node_with_room(10 * free), progress=Progress(Console(quiet=True)))


@pytest.mark.full
def test_case_7_a_bundle_brings_the_kernels_sources_to_a_machine_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given what the kernels of a recipe for GPUs are compiled from, fetched (the rest of its image is left out)
    gpu = wheelhouse.of(recipes.load("qwen3.8-27b-rtx-pro-6000"))
    sources = replace(gpu, pinned=replace(gpu.pinned, wheels=(), base=pins.Registry("example/vllm:1", None)))
    quiet = Progress(Console(quiet=True))
    wheelhouse.fetch(sources, quiet)
    # and a bundle of it
    file, cache = tmp_path / "site.tar", paths.cache_dir()
    with bundle.beside(file) as out:
        writer = bundle.Writer(out, Stage("bundle"))
        for path in sorted({*sources.files()}):
            writer.add_file(f"cache/{path.relative_to(cache)}", path)
        writer.finish([], [])
    # when a machine with an empty cache and no network has nothing but the bundle
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "site"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv(offline.VARIABLE, "1")
    with pytest.raises(KitError, match="nothing may be fetched"):
        wheelhouse.fetch(sources, quiet)
    bundle.unpack(bundle.read(file), "cache", paths.cache_dir(), Stage("cache"))
    # then compiler, root file system and readers are there
    wheelhouse.fetch(sources, quiet)
    assert list(symbols.install(quiet).glob("inspect-*/nvidia/cu13/bin/cuobjdump"))


def test_fetched_wheels_are_kept_and_a_damaged_one_is_fetched_anew(tmp_path: Path) -> None:
    # given the wheels of the cheapest pair: everything is there but one, which is damaged
    lock_file = tmp_path / "lock.json"
    small = next(w for w in lock.toolchain()["wheels"] if w["name"] == "nvidia-cuda-crt" and w["machine"] == "x86_64")
    lock_file.write_text(json.dumps({"lock": 1, "wheels": [small], "torch_headers": small}))
    (tmp_path / small["filename"]).write_bytes(b"damaged")
    # when
    argv = [sys.executable, CSRC / "build.py", "wheels", "--lock", lock_file, "--into", tmp_path]
    done = subprocess.run([*argv, "--machine", "x86_64"], capture_output=True, text=True, check=False)
    # then
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["lock.json", small["filename"]])
    assert (tmp_path / small["filename"]).stat().st_size > 1000
