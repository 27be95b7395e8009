"""vLLM 0.33.0 small enough to carry (43 MB) to a Hopper host that has torch 2.11, CUDA 13.0 and Python 3.12.

The wheel's libraries are mostly machine code for other GPUs. Every entry of their fat binaries that is not for sm_90
becomes zeros, which compress to nothing; of FlashAttention 3 the kernels for bf16 and heads of 128 stay. So Marlin and
FlashAttention 2, which the wheel holds as PTX, do not run there. FlashInfer and what else is only imported on demand is
left out. Standard library and pip only; `c++filt` reads the names of kernels.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

VLLM = "vllm==0.33.0"
REQUIREMENTS = Path(__file__).with_name("gpu_host") / "vllm-0.33.0-py312.txt"
PLATFORMS = [*(f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 17, 24, 26, 31, 34)), "manylinux2014_x86_64"]
LIBRARIES = ("vllm/_C_stable_libtorch.abi3.so", "vllm/_moe_C_stable_libtorch.abi3.so")
FLASH_ATTENTION = "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
LEFT_OUT = re.compile(r".*\.so$|vllm/vllm-rs$|vllm/third_party/(deep_gemm|fmha_sm100)/|.*/RECORD$")

# NCCL older than 2.29.7 has no ncclCommSuspend and ncclCommResume, which vLLM skips for ROCm alone.
WRAPPER = "vllm/distributed/device_communicators/pynccl_wrapper.py"
BEFORE = "                        # calling either.\n                        if current_platform.is_rocm():\n    "
AFTER = "                        # calling either.\n"

MAGIC, HEADER, ENTRY = b"\x50\xed\x55\xba", struct.Struct("<IHHQ"), struct.Struct("<HHIQ")
ELF, SM_90 = 2, 90


class BundleError(Exception):
    """The wheel is not what this module knows."""


@dataclass(frozen=True)
class Entry:
    """One program of a fat binary: its place in the file, what it is, and for which architecture."""

    begin: int
    end: int
    kind: int
    architecture: int


def containers(data: bytes) -> Iterator[tuple[bytes, list[Entry]]]:
    """(content, entries) of every fat binary in a shared object."""
    at = data.find(MAGIC)
    while at >= 0:
        _, version, header, size = HEADER.unpack_from(data, at)
        end = at + header + size
        if version != 1 or header != HEADER.size or end > len(data):
            at = data.find(MAGIC, at + 4)
            continue
        entries, place = [], at + header
        while place < end:
            kind, _, skip, length = ENTRY.unpack_from(data, place)
            (architecture,) = struct.unpack_from("<I", data, place + 28)
            entries.append(Entry(place + skip, place + skip + length, kind, architecture))
            place += skip + length
        yield data[at + header : end], entries
        at = data.find(MAGIC, end)


def slim(source: Path, target: Path, wanted: Callable[[bytes], bool]) -> None:
    """A copy in which only sm_90 machine code of the wanted fat binaries is left.

    Raises
    ------
    BundleError: nothing would be left.
    """
    data = source.read_bytes()
    copy, kept = bytearray(data), 0
    for content, entries in containers(data):
        keep = wanted(content)
        for entry in entries:
            if keep and entry.kind == ELF and entry.architecture == SM_90:
                kept += entry.end - entry.begin
            else:
                copy[entry.begin : entry.end] = bytes(entry.end - entry.begin)
    if not kept:
        raise BundleError(f"{source.name} holds no machine code for sm_90 that is wanted")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(copy)


SECTION = re.compile(rb"\.text\.(_ZN[^\0]{20,4000})\0")
FORWARD = re.compile(
    r"CollectiveMainloopFwdSm90<\d+, cute::tuple<[^>]*>[^>]*>[^>]*>[^>]*>,"
    r" cute::tuple<cute::C<\d+>, cute::C<\d+>, cute::C<(\d+)> ?>, (\d+), cutlass::(\w+)"
)


def bf16_heads_of_128(content: bytes) -> bool:
    """Whether a fat binary of FlashAttention 3 serves bf16 heads of 128, or prepares or combines for them."""
    names = set(SECTION.findall(content))
    if not names:
        return False
    done = subprocess.run(["c++filt"], input=b"\n".join(names), capture_output=True, check=True)
    for name in done.stdout.decode().splitlines():
        combines = "FlashAttnFwdCombine" in name and "cute::C<128> >" in name and "bfloat16_t" in name
        found = FORWARD.search(name)
        if "prepare_varlen" in name or combines or (found and found.groups() == ("128", "128", "bfloat16_t")):
            return True
    return False


def pip(*words: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-q", *map(str, words)], check=True)


def fetch(wheels: Path) -> None:
    """Download what is missing: vLLM's wheel (336 MB) and its 72 requirements (36 MB)."""
    wheels.mkdir(parents=True, exist_ok=True)
    common = ["download", "--no-deps", "--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
    common += [word for name in PLATFORMS for word in ("--platform", name)]
    pip(*common, "-d", wheels, VLLM)
    pip(*common, "-d", wheels, "-r", REQUIREMENTS)


def lay_out(wheels: Path, site: Path) -> None:
    """Everything as a folder for PYTHONPATH."""
    shutil.rmtree(site, ignore_errors=True)
    (vllm,) = wheels.glob("vllm-0.33.0-*.whl")
    others = [path for path in sorted(wheels.glob("*.whl")) if path != vllm]
    options = ["--no-index", "--no-deps", "--no-compile", "--only-binary=:all:", "--python-version", "3.12"]
    options += [word for name in PLATFORMS for word in ("--platform", name)]
    pip("install", *options, "--implementation", "cp", "--target", site, *others)
    scratch = site.with_name("libraries")
    with zipfile.ZipFile(vllm) as archive:
        archive.extractall(site, [name for name in archive.namelist() if not LEFT_OUT.match(name)])
        archive.extractall(scratch, [*LIBRARIES, FLASH_ATTENTION])
    for name in LIBRARIES:
        slim(scratch / name, site / name, lambda _content: True)
    slim(scratch / FLASH_ATTENTION, site / FLASH_ATTENTION, bf16_heads_of_128)
    shutil.rmtree(scratch)
    text = (site / WRAPPER).read_text()
    if text.count(BEFORE) != 1:
        raise BundleError(f"{WRAPPER} of this wheel is not the known one")
    (site / WRAPPER).write_text(text.replace(BEFORE, AFTER))
    for path in site.glob("*.dist-info/direct_url.json"):
        path.unlink()  # names a folder of this machine
    for name in ("mistral_common/data", "bin"):
        shutil.rmtree(site / name, ignore_errors=True)


def bundle(into: Path, wheels: Path) -> Path:
    """Fills ``into`` with bundle.tar.xz; files of one kind lie side by side, as that compresses best."""
    fetch(wheels)
    site = into / "site"
    lay_out(wheels, site)
    files = [path.relative_to(site) for path in site.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    listing = into / "files.txt"
    listing.write_text("".join(f"{name}\n" for name in sorted(files, key=lambda name: (name.suffix, str(name)))))
    made = into / "bundle.tar.xz"
    xz = "xz -6 -T0 --block-size=200MiB"
    words = ["tar", "-C", str(site), "--owner=0", "--group=0", "-I", xz, "-cf", str(made), "-T", str(listing)]
    subprocess.run(words, check=True)
    shutil.rmtree(site)
    return made
