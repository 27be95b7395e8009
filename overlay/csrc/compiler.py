"""Compiling units: the compilers, the words they are called with, and a cache that knows what went into each object.

Standard library only. Every object is cached under a hash of all that decides its content, so a second build of the
same tree compiles nothing.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import ptxas
import units
from toolchain import STAMP, build_machine, sha256

TORCH_TARGET = "0x020a000000000000"  # stable ABI of torch 2.10: the oldest with raw data pointers of a tensor
OBJECT_SCHEMA = "1"  # bump when the way objects are made changes without a flag saying so
KEPT_DAYS = 30
NVCC_FLAGS = ("-std=c++17", "-O3", "--use_fast_math", "-Xptxas", "-v")
HOST_FLAGS = ("-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden")


class BuildError(Exception):
    """A build that cannot go on; the text says where and why."""


@dataclass(frozen=True)
class Request:
    """What to build.

    ``targets`` are compute capabilities ("12.0"), ``rates`` bits per weight, ``host`` the machine that will load it.
    ``defines`` go to the units that have a rate: a library with any is for measuring and says so in its manifest.
    """

    source: Path
    targets: tuple[str, ...]
    rates: tuple[float, ...]
    codebooks: tuple[str, ...]
    host: str
    torch: bool = True
    defines: tuple[str, ...] = ()

    @property
    def ptx(self) -> str:
        """The capability whose PTX is added, so that a later GPU can still compile it: the lowest."""
        return min(self.targets, key=_capability)

    def gencode(self) -> list[str]:
        """nvcc's words for one cubin per target and the PTX of the lowest."""
        numbers = [target.replace(".", "") for target in self.targets]
        cubins = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in numbers]
        lowest = self.ptx.replace(".", "")
        return [*cubins, f"-gencode=arch=compute_{lowest},code=compute_{lowest}"]


@dataclass(frozen=True)
class Tools:
    """Where the compilers are, and one hash that changes when any of them does."""

    tree: Path
    host_tree: Path
    cxx: str
    torch_include: Path | None
    identity: str
    versions: dict[str, str]

    @property
    def nvcc(self) -> Path:
        return self.tree / "bin/nvcc"


@dataclass(frozen=True)
class Built:
    """An object file and what ptxas said of its kernels."""

    job: units.Job
    object: Path
    uses: list[ptxas.KernelUse]
    seconds: float
    cached: bool


def _capability(target: str) -> tuple[int, int]:
    major, minor = target.split(".")
    return int(major), int(minor)


def find_tools(toolchain: Path, host: str, torch_include: Path | None) -> Tools:
    """The compilers of a toolchain folder for libraries of ``host``. Raises BuildError for what is missing."""
    here = build_machine()
    for machine in (here, host):
        if not (toolchain / machine / STAMP).is_file():
            remedy = f"build.py toolchain --host {host} --into {toolchain}"
            raise BuildError(f"{toolchain}/{machine}: no toolchain here; next: {remedy}")
    tree, host_tree = toolchain / here / "nvidia/cu13", toolchain / host / "nvidia/cu13"
    cxx = find_cxx(here, host)
    include = torch_include or (toolchain / "torch/include" if (toolchain / "torch/include").is_dir() else None)
    versions = {"nvcc": _version([str(tree / "bin/nvcc"), "--version"]), "cxx": _version([cxx, "--version"])}
    stamps = [toolchain / machine / STAMP for machine in sorted({here, host})]
    identity = units.digest([], *(sha256(stamp) for stamp in stamps), *versions.values())
    return Tools(tree, host_tree, cxx, include, identity, versions)


def find_cxx(here: str, host: str) -> str:
    """The C++ compiler for ``host`` on this machine. Raises BuildError naming the Debian package that brings it."""
    names = ["g++"] if here == host else [f"{host}-linux-gnu-g++{suffix}" for suffix in ("", "-12", "-13", "-14")]
    for name in names:
        if path := shutil.which(name):
            return path
    package = "g++" if here == host else f"g++-{host.replace('_', '-')}-linux-gnu"
    raise BuildError(f"no C++ compiler for {host} on PATH (tried {', '.join(names)}); next: apt-get install {package}")


def _version(argv: list[str]) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{argv[0]} does not run: {done.stderr.strip() or done.returncode}")
    found = re.findall(r"V(\d+\.\d+\.\d+)", done.stdout) or re.findall(r"\b\d+\.\d+\.\d+\b", done.stdout)
    return found[-1] if found else done.stdout.splitlines()[0]


def compile_argv(job: units.Job, request: Request, tools: Tools) -> list[str]:
    """argv that compiles ``job`` in the folder of the sources, without the output file.

    The same sources give the same bytes anywhere: no path of this machine gets in, and no random names.
    """
    defines = [f"-D{name}={value}" for name, value in job.defines]
    if job.rate is not None:
        defines += [f"-D{define}" for define in request.defines]
    include = [f"-I{tools.host_tree}/include"]
    host = [*HOST_FLAGS, f"-ffile-prefix-map={tools.host_tree}=cuda"]
    if job.unit.path.suffix == ".cu":
        kernels = [*NVCC_FLAGS, *request.gencode(), f"-frandom-seed={job.label}"]
        passed = [f"-Xcompiler={','.join(host)}", f"-ccbin={tools.cxx}"]
        return [str(tools.nvcc), *kernels, *passed, *include, *defines, "-c", job.unit.name]
    if job.unit.torch:
        if tools.torch_include is None:
            remedy = "build.py toolchain --torch-headers, or pass --torch-include"
            raise BuildError(f"{job.unit.name} needs torch's headers; next: {remedy}")
        include += ["-isystem", str(tools.torch_include)]
        host += [f"-ffile-prefix-map={tools.torch_include}=torch"]
        defines += [f"-DTORCH_TARGET_VERSION={TORCH_TARGET}", "-DUSE_CUDA"]
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", *host]
    return [tools.cxx, *flags, *include, *defines, "-c", job.unit.name]


def object_key(job: units.Job, request: Request, tools: Tools) -> str:
    """Content address of a job's object: sources with their includes, flags, compilers, and torch's headers if used."""
    files = units.sources(job.unit.path)
    paths = {str(tools.tree): "TOOLS", str(tools.host_tree): "HOST"}
    torch = ""
    if job.unit.torch and tools.torch_include:
        paths[str(tools.torch_include)] = "TORCH"
        torch = _torch_identity(tools.torch_include)
    words = []
    for word in compile_argv(job, request, tools):
        for path, name in paths.items():
            word = word.replace(path, name)
        words.append(word)
    return units.digest(files, OBJECT_SCHEMA, tools.identity, torch, *words)


def _torch_identity(include: Path) -> str:
    """A hash of the stable-ABI headers; a few dozen files, read in milliseconds."""
    return units.digest(sorted((include / "torch/csrc/stable").rglob("*.h")))


def compile_job(job: units.Job, request: Request, tools: Tools, cache: Path, threads: int) -> Built:
    """The object of ``job``, from the cache or compiled on ``threads`` cores; BuildError has the compiler's words."""
    key = object_key(job, request, tools)
    target = cache / "objects" / key[:2] / f"{key}.o"
    report = target.with_suffix(".json")
    if target.is_file() and report.is_file():
        target.touch()
        return Built(job, target, [ptxas.KernelUse(**use) for use in json.loads(report.read_text())], 0.0, True)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        fresh = Path(scratch) / "unit.o"
        side_by_side = ["--threads", str(threads)] if job.unit.path.suffix == ".cu" else []
        argv = [*compile_argv(job, request, tools), *side_by_side, "-o", str(fresh)]
        began = time.monotonic()
        environment = {**os.environ, "TMPDIR": scratch}
        done = subprocess.run(argv, capture_output=True, text=True, check=False, env=environment, cwd=request.source)
        seconds = time.monotonic() - began
        if done.returncode:
            lines = [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("ptxas info")]
            raise BuildError(f"{job.label}: the compiler failed\n" + "\n".join(lines[-40:]))
        uses = ptxas.parse(done.stderr)
        (Path(scratch) / "report").write_text(json.dumps([use.as_json() for use in uses]))
        (Path(scratch) / "report").replace(report)
        fresh.replace(target)
    return Built(job, target, uses, seconds, False)


def compile_all(jobs: list[units.Job], request: Request, tools: Tools, cache: Path, workers: int) -> list[Built]:
    """Compile ``jobs`` on ``workers`` cores, telling progress on stderr. Raises BuildError with every fault found."""
    built: list[Built] = []
    # One slow unit alone would leave cores idle, so it compiles its targets side by side.
    slow = sum(job.rate is not None for job in jobs)
    threads = max(1, workers // max(1, slow))
    with ThreadPoolExecutor(workers) as pool:
        waiting = {pool.submit(compile_job, job, request, tools, cache, threads): job for job in jobs}
        try:
            for done in as_completed(waiting):
                built.append(done.result())
                _tell(built[-1], len(built), len(jobs))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    found = [fault for one in built for fault in ptxas.faults(one.uses, one.job.unit.budgets)]
    if found:
        raise BuildError("kernels over their budget:\n  " + "\n  ".join(sorted(found)))
    return sorted(built, key=lambda one: one.job.label)


def forget_unused(cache: Path) -> None:
    """Delete objects that no build has used for ``KEPT_DAYS``: a changed header leaves every older object behind."""
    oldest = time.time() - KEPT_DAYS * 86400
    for target in (cache / "objects").glob("*/*.o"):
        if target.stat().st_mtime < oldest:
            target.with_suffix(".json").unlink(missing_ok=True)
            target.unlink(missing_ok=True)


def _tell(one: Built, done: int, total: int) -> None:
    took = "cached" if one.cached else f"{one.seconds:.1f} s"
    print(f"[{done:3}/{total}] {took:>8}  {one.job.label}", file=sys.stderr, flush=True)
