"""The GPU code inside a shared object, as NVIDIA's `cuobjdump` lists it (wheel `nvidia-cuda-cuobjdump`)."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_ARCH = re.compile(r"^arch = sm_(\d+)(\d)[af]?$")
_FUNCTION = re.compile(r"^\s*Function (\S+):$")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


class FatbinError(Exception):
    """cuobjdump is missing or cannot read the file."""


@dataclass(frozen=True)
class Use:
    """Resources of a kernel: registers per thread, bytes of stack and local memory per thread, static shared bytes.

    From sm_90 on, ``shared`` of a kernel that uses any includes the 1024 bytes that the system keeps per CTA.
    """

    registers: int
    stack: int
    shared: int


@dataclass(frozen=True)
class GpuCode:
    """Kernels per target ("12.0" -> mangled name -> resources), and the targets that PTX is there for."""

    kernels: dict[str, dict[str, Use]]
    ptx: frozenset[str]


def find_cuobjdump() -> Path:
    """cuobjdump beside the running Python, on PATH, or in the kit's cache. Raises FatbinError if there is none."""
    places = [Path(entry) / "nvidia/cu13/bin/cuobjdump" for entry in sys.path if entry]
    if on_path := shutil.which("cuobjdump"):
        places.append(Path(on_path))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "exl3kit/toolchain"
    machine = platform.machine()
    places += sorted(cache.glob(f"*/*{machine}/nvidia/cu13/bin/cuobjdump"))
    for place in places:
        if place.is_file():
            return place
    raise FatbinError("no cuobjdump on this machine; next: pip install nvidia-cuda-cuobjdump, or kit verify symbols")


def read(path: Path, cuobjdump: Path) -> GpuCode:
    """The GPU code of ``path``, of any host machine; none is an answer too. Raises FatbinError if cuobjdump fails.

    Device functions that were not inlined count as kernels too: they need the same resources.
    """
    done = subprocess.run([cuobjdump, "--dump-resource-usage", path], capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    if "does not contain device code" in said:
        return GpuCode({}, frozenset())
    if done.returncode:
        raise FatbinError(f"{path}: cuobjdump failed: {(said.strip().splitlines() or ['no message'])[-1]}")
    return parse(done.stdout)


def parse(text: str) -> GpuCode:
    """What `cuobjdump --dump-resource-usage` printed, as data."""
    kernels: dict[str, dict[str, Use]] = {}
    ptx: set[str] = set()
    in_ptx, target, name = False, "", ""
    for line in text.splitlines():
        if line.startswith("Fatbin "):
            in_ptx = line.startswith("Fatbin ptx")
        elif found := _ARCH.match(line):
            target = f"{found[1]}.{found[2]}"
            if in_ptx:
                ptx.add(target)
            else:
                kernels.setdefault(target, {})
        elif found := _FUNCTION.match(line):
            name = found[1]
        elif (found := _USAGE.search(line)) and name:
            registers, stack, shared, local = map(int, found.groups())
            kernels[target][name] = Use(registers, stack + local, shared)
            name = ""
    return GpuCode(kernels, frozenset(ptx))
