"""A library cross-built for arm64 asks nothing of its host but the runtimes and torch, loads there and answers."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from exl3_vllm import elf
from workshop import REPO, Symbols, Workshop, wheels

CALLER = r"""
#include <dlfcn.h>
#include <stdio.h>
int main(int argc, char** argv) {
  void* library = dlopen(argv[1], RTLD_NOW);
  if (!library) return printf("%s\n", dlerror()), 1;
  printf("abi %d\n", ((int (*)(void)) dlsym(library, "exl3_abi_version"))());
  printf("%.8s\n", ((const char* (*)(void)) dlsym(library, "exl3_manifest"))());
  return 0;
}
"""


def emulator() -> str:
    found = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if not found:
        pytest.skip("no qemu-aarch64 on this machine; next: apt-get install qemu-user")
    return found


def c_compiler() -> str:
    for suffix in ("", "-12", "-13", "-14"):
        if found := shutil.which(f"aarch64-linux-gnu-gcc{suffix}"):
            return found
    pytest.skip("no C compiler for aarch64; next: apt-get install gcc-aarch64-linux-gnu")


def call(library: Path, folder: Path, *preload: Path) -> str:
    """What a program on an emulated arm64 host prints after loading ``library`` and calling it."""
    (folder / "caller.c").write_text(CALLER)
    subprocess.run([c_compiler(), folder / "caller.c", "-o", folder / "caller", "-ldl"], check=True)
    words = [word for file in preload for word in ("-E", f"LD_PRELOAD={file}")]
    argv = [emulator(), "-L", "/usr/aarch64-linux-gnu", *words, folder / "caller", library]
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout


def test_every_symbol_it_asks_for_has_an_owner(arm64: Path) -> None:
    shared = elf.read(arm64)
    assert shared.machine == "aarch64"
    foreign = [
        wanted.name
        for wanted in shared.wanted
        if not re.fullmatch(r"(GLIBC|GLIBCXX|CXXABI|GCC)_[\d.]+", wanted.version)
        and not re.match(r"aoti_torch_|torch_", wanted.name)
        and not wanted.weak
    ]
    assert foreign == []
    assert set(shared.needed) <= {"libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6", "ld-linux-aarch64.so.1"}


def test_it_needs_no_newer_runtime_than_ubuntu_22_04_has(arm64: Path) -> None:
    newest = {"GLIBC": (2, 35), "GLIBCXX": (3, 4, 30), "CXXABI": (1, 3, 13), "GCC": (12,)}
    for wanted in elf.read(arm64).wanted:
        name, _, number = wanted.version.partition("_")
        if name:
            assert tuple(map(int, number.split("."))) <= newest[name], wanted


def test_it_loads_and_answers_on_an_emulated_arm64_host(workshop: Workshop, tmp_path: Path) -> None:
    emulator()
    workshop.build(tmp_path / "x.so", workshop.request(host="aarch64", torch=False))
    assert call(tmp_path / "x.so", tmp_path) == 'abi 1\n{"abi":1\n'


def test_with_the_binding_it_loads_once_torch_is_there(arm64: Path, tmp_path: Path) -> None:
    # Given an arm64 host with a library that has torch's symbols by name (functions that do nothing and report success)
    emulator()
    owned = sorted(wanted.name for wanted in elf.read(arm64).wanted if re.match(r"aoti_torch_|torch_", wanted.name))
    (tmp_path / "torch.c").write_text("\n".join(f"int {name}(void) {{ return 0; }}" for name in owned))
    stand_in = tmp_path / "torch.so"
    subprocess.run([c_compiler(), "-shared", "-fPIC", tmp_path / "torch.c", "-o", stand_in], check=True)
    # When the library is loaded, then the loader misses nothing; without torch it says which symbol is not there
    assert call(arm64, tmp_path, stand_in).startswith("abi 1\n")
    assert "undefined symbol: " in call(arm64, tmp_path)


@pytest.mark.full
def test_the_shipped_kernels_cross_built_load_and_answer(workshop: Workshop, tmp_path: Path, symbols: Symbols) -> None:
    emulator()
    lasting = Workshop(workshop.toolchain, wheels.default_cache() / "kernels")
    asked = {"source": REPO / "overlay/csrc", "host": "aarch64"}
    lasting.build(tmp_path / "bound.so", lasting.request(**asked))
    lasting.build(tmp_path / "x.so", lasting.request(**asked, torch=False))
    assert symbols(tmp_path / "bound.so", "--host", "aarch64", "--targets", "12.0,12.1")[0] == 0
    assert call(tmp_path / "x.so", tmp_path) == 'abi 1\n{"abi":1\n'
