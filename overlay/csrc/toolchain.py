"""The CUDA toolchain out of locked PyPI wheels: no toolkit, no driver and no root needed. Standard library only.

A toolchain folder holds one tree per machine (``x86_64/nvidia/cu13``, ``aarch64/nvidia/cu13``) and, on request, torch's
stable-ABI headers (``torch/include``). The build machine's tree has the compiler; the other one only what the host side
of a cross build includes and links. The lock (``locks/cuda-13.0-toolchain.json``) names every wheel with its sha256.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

MACHINES = ("x86_64", "aarch64")
STAMP = "toolchain.json"


class ToolchainError(Exception):
    """A toolchain that cannot be had; the text says what, why and the way out."""


def build_machine() -> str:
    """This machine in the words of the lock. Raises ToolchainError where NVIDIA has no compiler wheels for it."""
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    if machine not in MACHINES or sys.platform != "linux":
        raise ToolchainError(f"nvcc's wheels exist for Linux on x86_64 and aarch64, not for {sys.platform} {machine}")
    return machine


def default_cache() -> Path:
    """Where toolchains and objects are kept: ``$XDG_CACHE_HOME/exl3kit`` or ``~/.cache/exl3kit``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "exl3kit"


def read_lock(lock: Path) -> dict[str, Any]:
    """The lock's JSON. Raises ToolchainError if it is not a schema 1 toolchain lock."""
    try:
        content: dict[str, Any] = json.loads(lock.read_text())
    except (OSError, ValueError) as error:
        raise ToolchainError(f"{lock}: not a readable toolchain lock ({error})") from error
    if content.get("lock") != 1 or "wheels" not in content:
        raise ToolchainError(f"{lock}: not a toolchain lock of schema 1")
    return content


def wanted(lock: dict[str, Any], machine: str, *, building: bool) -> list[dict[str, str]]:
    """The lock's wheels for ``machine``: if ``building`` happens there, with compiler and readers."""
    roles = ("build", "host", "inspect") if building else ("host",)
    return [wheel for wheel in lock["wheels"] if wheel["machine"] == machine and wheel["role"] in roles]


def fetch(lock_file: Path, into: Path, hosts: list[str], machine: str | None = None) -> None:
    """Have in ``into`` every wheel that `install` takes on ``machine`` (default: this one) for ``hosts``.

    Raises ToolchainError if a wheel cannot be had or is not the locked one.
    """
    lock, machine = read_lock(lock_file), machine or build_machine()
    wheels = [wheel for one in sorted({machine, *hosts}) for wheel in wanted(lock, one, building=one == machine)]
    for wheel in [*wheels, lock["torch_headers"]]:
        file = into / str(wheel["filename"])
        if file.is_file() and sha256(file) == wheel["sha256"]:
            continue
        file.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory(dir=into, prefix=".fetch-") as downloads:
            _fetch(wheel, None, Path(downloads)).replace(file)


def install(
    lock_file: Path,
    into: Path,
    hosts: list[str],
    *,
    wheels: Path | None = None,
    torch_headers: bool = False,
    readers_only: bool = False,
) -> Path:
    """Lay the toolchain out under ``into`` and return that folder; a tree whose stamp matches is left alone.

    Parameters
    ----------
    lock_file: the toolchain lock.
    into: folder to fill; other versions of a tree in it are replaced.
    hosts: machines that libraries will be linked for, of ``MACHINES``.
    wheels: folder with the wheels; without it, or for a wheel that it lacks, pip downloads from its configured index.
    torch_headers: also lay out torch's stable-ABI headers.
    readers_only: only the readers (cuobjdump, nvdisasm) for this machine.

    Raises ToolchainError if a wheel cannot be had or is not the locked one.
    """
    lock = read_lock(lock_file)
    here = build_machine()
    into.mkdir(parents=True, exist_ok=True)
    if readers_only:
        readers = [wheel for wheel in wanted(lock, here, building=True) if wheel["role"] == "inspect"]
        _lay_out(readers, into / f"inspect-{here}", wheels)
        return into
    for machine in sorted({here, *hosts}):
        _lay_out(wanted(lock, machine, building=machine == here), into / machine, wheels)
    if torch_headers:
        _lay_out_torch(lock["torch_headers"], into / "torch", wheels)
    return into


def _lay_out(wheels: list[dict[str, str]], tree: Path, folder: Path | None) -> None:
    stamp = json.dumps(sorted(wheels, key=lambda wheel: wheel["filename"]), indent=1)
    if _stamped(tree, stamp):
        return
    with _replacing(tree) as fresh, tempfile.TemporaryDirectory() as downloads:
        for wheel in wheels:
            unpack(_fetch(wheel, folder, Path(downloads)), fresh)
        (fresh / STAMP).write_text(stamp)


def _stamped(tree: Path, stamp: str) -> bool:
    return (tree / STAMP).is_file() and (tree / STAMP).read_text() == stamp


class _replacing:
    """A fresh folder that takes ``tree``'s place when the block ends well; two builds at once each see a whole tree."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree

    def __enter__(self) -> Path:
        self.fresh = Path(tempfile.mkdtemp(dir=self.tree.parent, prefix=f".{self.tree.name}-"))
        self.fresh.chmod(0o755)
        return self.fresh

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            old = Path(tempfile.mkdtemp(dir=self.tree.parent, prefix=f".{self.tree.name}-old-"))
            if self.tree.exists():
                self.tree.rename(old / "tree")
            self.fresh.rename(self.tree)
            shutil.rmtree(old)
        else:
            shutil.rmtree(self.fresh)


def _fetch(wheel: dict[str, Any], folder: Path | None, downloads: Path) -> Path:
    """The file of ``wheel``: from ``folder`` if it lies there, else by pip; its sha256 is the locked one."""
    file = (folder or downloads) / str(wheel["filename"])
    if not file.is_file():
        _pip_download(wheel, downloads)
        file = downloads / file.name
    found = sha256(file) if file.is_file() else "absent"
    if found != wheel["sha256"]:
        raise ToolchainError(f"{file.name}: sha256 is {found}, the lock says {wheel['sha256']}; refusing to run it")
    return file


def _pip_download(wheel: dict[str, Any], downloads: Path) -> None:
    python, abi, platforms = wheel["filename"].removesuffix(".whl").split("-")[-3:]
    options = [word for tag in platforms.split(".") for word in ("--platform", tag)]
    if python.startswith("cp"):
        options += ["--implementation", "cp", "--python-version", python.removeprefix("cp"), "--abi", abi]
    requirement = f"{wheel['name']}=={wheel['version']}"
    listing = downloads / "requirement.txt"
    listing.write_text(f"{requirement} --hash=sha256:{wheel['sha256']}\n")
    argv = [*pip(), "download", "--no-deps", "--only-binary", ":all:", "--require-hashes", *options]
    done = subprocess.run([*argv, "-d", downloads, "-r", listing], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        remedy = f"put {wheel['filename']} into a folder and pass --wheels"
        raise ToolchainError(f"pip cannot fetch {requirement}: {last}; next: {remedy}")


def pip() -> list[str]:
    """argv of a pip: this interpreter's, one on PATH, or uv's. Raises ToolchainError if there is none."""
    probe = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False)
    if probe.returncode == 0:
        return [sys.executable, "-m", "pip"]
    for name in ("pip3", "pip"):
        if shutil.which(name):
            return [name]
    if shutil.which("uv"):
        return ["uv", "tool", "run", "pip"]
    raise ToolchainError("no pip and no uv on this machine; next: apt-get install python3-pip")


def sha256(file: Path) -> str:
    """Hex digest of a file of any size."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def unpack(wheel: Path, tree: Path, prefixes: tuple[str, ...] = ("",)) -> None:
    """Extract ``wheel``'s members under ``prefixes`` into ``tree``; keeps the executable bits, which nvcc needs."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            if member.filename.startswith(prefixes) and not member.is_dir():
                written = Path(archive.extract(member, tree))
                written.chmod(0o755 if (member.external_attr >> 16) & 0o111 else 0o644)


def _lay_out_torch(wheel: dict[str, Any], tree: Path, folder: Path | None) -> None:
    """The stable-ABI headers, from the smallest wheel of that torch: they are the same bytes in all of them."""
    stamp = json.dumps(wheel, indent=1)
    if _stamped(tree, stamp):
        return
    with _replacing(tree) as fresh, tempfile.TemporaryDirectory() as downloads:
        prefixes = tuple(f"torch/include/{prefix}" for prefix in wheel["prefixes"])
        unpack(_fetch(wheel, folder, Path(downloads)), fresh, prefixes)
        (fresh / "torch/include").rename(fresh / "include")
        (fresh / "torch").rmdir()
        (fresh / STAMP).write_text(stamp)
