"""The real toolchain builds a real library: cached per unit, within its limits, for this host and the other."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import build
import compiler
import pytest
import toolchain as wheels
from exl3_vllm import elf
from workshop import LOCK, REPO, SPECIMEN, Edited, Workshop


def test_a_library_builds_with_nothing_on_path_but_the_system(toolchain: Path, tmp_path: Path) -> None:
    # Given a machine without toolkit, driver, home folder or anything else in its environment
    out = tmp_path / "specimen.so"
    argv = [sys.executable, str(REPO / "overlay/csrc/build.py"), "library", "--source", str(SPECIMEN)]
    argv += ["--toolchain", str(toolchain), "--cache", str(tmp_path / "cache"), "--no-torch", "--out", str(out)]
    # When the library is built
    done = subprocess.run(argv, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False)
    # Then it is there, and exports the interface and nothing else
    assert done.returncode == 0, done.stderr
    assert all(name.startswith("exl3_") for name in elf.read(out).exported)
    # And it loads here, without a driver, and says what it is
    library = ctypes.CDLL(str(out))
    library.exl3_manifest.restype = ctypes.c_char_p
    claims = json.loads(library.exl3_manifest())
    assert library.exl3_abi_version() == claims["abi"] == 1
    assert claims["targets"] == ["12.0", "12.1"] and claims["ptx"] == "12.0" and claims["torch"] is False


def labels(text: str, *, cached: bool) -> set[str]:
    lines = [line.split("]", 1)[1].split() for line in text.splitlines() if line.startswith("[")]
    return {words[1 if cached else 2] for words in lines if (words[0] == "cached") is cached}


def test_only_units_that_include_an_edited_header_are_compiled_again(
    workshop: Workshop, edited: Edited, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workshop.build(tmp_path / "before.so", workshop.request())
    capsys.readouterr()
    source = edited({"registry.h": ("#pragma once", "#pragma once\n// a new remark")})

    workshop.build(tmp_path / "after.so", workshop.request(source))
    said = capsys.readouterr().err

    assert labels(said, cached=True) == {"grouped.cu", "bind.cpp"}
    assert labels(said, cached=False) == {"dense.cu", "dispatch.cpp"}


def test_the_same_sources_give_the_same_bytes_in_another_folder(workshop: Workshop, tmp_path: Path) -> None:
    files = []
    for name, workers in (("one", 1), ("other", 2)):
        shutil.copytree(SPECIMEN, tmp_path / name / "source")
        shutil.copytree(workshop.toolchain / "torch/include", tmp_path / name / "torch", symlinks=True)
        request = workshop.request(tmp_path / name / "source")
        tools = compiler.find_tools(workshop.toolchain, request.host, tmp_path / name / "torch")
        files.append(tmp_path / name / "x.so")
        build.build(request, tools, tmp_path / name / "cache", files[-1], workers)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert str(tmp_path).encode() not in files[0].read_bytes()


def test_objects_that_no_build_used_for_a_month_are_forgotten(workshop: Workshop, tmp_path: Path) -> None:
    mine = Workshop(workshop.toolchain, tmp_path / "cache")
    mine.build(tmp_path / "x.so", mine.request(torch=False))
    used = sorted((tmp_path / "cache").rglob("*.o"))
    stale = tmp_path / "cache/objects/00/stale.o"
    stale.parent.mkdir(exist_ok=True)
    stale.touch()
    for path in (*used, stale):
        os.utime(path, (0, 0))
    mine.build(tmp_path / "x.so", mine.request(torch=False))
    assert sorted((tmp_path / "cache").rglob("*.o")) == used


def test_the_sidecar_has_the_resources_of_every_kernel_and_target(native: Path) -> None:
    content = json.loads(native.with_name(native.name + ".json").read_text())
    rows = {(use["target"], "gemm" in use["kernel"]) for use in content["resources"]}
    assert rows == {(target, gemm) for target in ("sm_120", "sm_121") for gemm in (True, False)}
    assert all(use["spilled"] == 0 and 0 < use["registers"] <= 64 for use in content["resources"])
    assert content["sha256"] == wheels.sha256(native)


SPILLING = """__global__ void __launch_bounds__(1024) specimen_gather(const float* in, float* out) {
  float kept[96];
  for (int i = 0; i < 96; ++i) kept[i] = in[threadIdx.x + i * 1024];
  __syncthreads();
  for (int i = 0; i < 96; ++i) out[threadIdx.x + i * 1024] = kept[i] * kept[(i + 31) % 96];
}
"""


def test_a_spill_fails_the_build_with_target_and_number(workshop: Workshop, edited: Edited, tmp_path: Path) -> None:
    kernel = "__global__ void specimen_gather(const float* in, float* out) { out[threadIdx.x] = in[threadIdx.x ^ 1]; }"
    source = edited({"grouped.cu": (kernel, SPILLING)})
    with pytest.raises(compiler.BuildError, match=r"specimen_gather\w* on sm_120: \d+ bytes spilled, 0 allowed"):
        workshop.build(tmp_path / "x.so", workshop.request(source))


def test_a_kernel_over_its_budget_fails_the_build(workshop: Workshop, edited: Edited, tmp_path: Path) -> None:
    source = edited({"dense.cu": ("registers=64", "registers=4")})
    with pytest.raises(compiler.BuildError, match=r"specimen_gemm\w* on sm_121: \d+ registers, 4 allowed"):
        workshop.build(tmp_path / "x.so", workshop.request(source))
    assert not (tmp_path / "x.so").exists()


def test_a_function_that_nobody_defines_is_named_by_the_link(
    workshop: Workshop, edited: Edited, tmp_path: Path
) -> None:
    source = edited({"dispatch.cpp": ("{ return EXL3_ABI_VERSION; }", "{ extern int nowhere(); return nowhere(); }")})
    with pytest.raises(compiler.BuildError, match="undefined symbols that no runtime provides: nowhere"):
        workshop.build(tmp_path / "x.so", workshop.request(source))


def test_an_op_without_kernels_is_named_by_the_build(workshop: Workshop, edited: Edited, tmp_path: Path) -> None:
    source = edited({"dispatch.cpp": ("// unit: once", "// unit: once\n// ops: exl3_last_error")})
    with pytest.raises(compiler.BuildError, match=r"op exl3_last_error: no kernel in dispatch\.cpp"):
        workshop.build(tmp_path / "x.so", workshop.request(source))


def test_a_compiler_error_is_shown_with_the_unit_it_is_in(workshop: Workshop, edited: Edited, tmp_path: Path) -> None:
    source = edited({"grouped.cu": ("threadIdx.x ^ 1", "threadIdx.q")})
    with pytest.raises(compiler.BuildError, match=r"(?s)grouped\.cu: the compiler failed.*has no member \"q\""):
        workshop.build(tmp_path / "x.so", workshop.request(source))


def test_targets_decide_the_cubins_and_the_lowest_brings_the_ptx() -> None:
    request = compiler.Request(SPECIMEN, ("9.0", "12.1"), (4.0,), ("mcg",), "x86_64")
    assert request.gencode() == [
        "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_121,code=sm_121",
        "-gencode=arch=compute_90,code=compute_90",
    ]


@pytest.mark.parametrize(
    ("words", "said"), [(["--rates", "4.5"], "rate '4.5'"), (["--targets", "8.9"], "target '8.9'")]
)
def test_what_no_kernel_is_for_is_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        build.main(["library", "--toolchain", ".", "--out", "x.so", *words])
    assert stopped.value.code == 2 and said in capsys.readouterr().err


def test_a_folder_without_toolchain_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build.main(["library", "--toolchain", str(tmp_path), "--out", str(tmp_path / "x.so")]) == 4
    assert "no toolchain here; next: build.py toolchain" in capsys.readouterr().err


def altered_lock(folder: Path, **fields: Any) -> Path:
    lock = json.loads(LOCK.read_text())
    lock["wheels"] = [{**wheel, **fields} for wheel in lock["wheels"] if "cuobjdump" in wheel["name"]]
    path = folder / "lock.json"
    path.write_text(json.dumps(lock))
    return path


def test_a_wheel_that_is_not_the_locked_one_is_never_unpacked(tmp_path: Path) -> None:
    # Given a folder of wheels in which one is not what its name says
    lock = altered_lock(tmp_path)
    for wheel in json.loads(lock.read_text())["wheels"]:
        (tmp_path / wheel["filename"]).write_bytes(b"something else")
    # When the toolchain is laid out from it, then that wheel is named and nothing is left behind
    with pytest.raises(wheels.ToolchainError, match=r"nvidia_cuda_cuobjdump\S+: sha256 is \w{64}, the lock says"):
        wheels.install(lock, tmp_path / "tools", [], wheels=tmp_path, readers_only=True)
    assert list((tmp_path / "tools").iterdir()) == []


def test_a_version_that_the_index_no_longer_has_is_named(tmp_path: Path) -> None:
    lock = altered_lock(tmp_path, version="0.0.1", filename="nvidia_cuda_cuobjdump-0.0.1-py3-none-any.whl")
    with pytest.raises(wheels.ToolchainError, match=r"pip cannot fetch nvidia-cuda-cuobjdump==0\.0\.1"):
        wheels.install(lock, tmp_path / "tools", [], readers_only=True)


def test_a_toolchain_in_place_is_left_alone(toolchain: Path) -> None:
    tree = toolchain / wheels.build_machine()
    before = tree.stat().st_ino
    wheels.install(LOCK, toolchain, list(wheels.MACHINES), torch_headers=True)
    assert tree.stat().st_ino == before


@pytest.mark.parametrize("content", ["{", '{"lock": 2, "wheels": []}', '{"lock": 1}'])
def test_a_file_that_is_no_toolchain_lock_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "lock.json").write_text(content)
    with pytest.raises(wheels.ToolchainError, match=r"lock\.json: not a"):
        wheels.read_lock(tmp_path / "lock.json")
