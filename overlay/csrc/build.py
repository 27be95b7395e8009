#!/usr/bin/env python3
"""Build the kernel library from the units of this folder with nvcc out of PyPI wheels. Standard library only.

    build.py toolchain --lock LOCK --into DIR [--host aarch64] [--wheels DIR] [--torch-headers]
    build.py library --toolchain DIR --targets 12.0,12.1 --rates 4 --codebooks mcg --host x86_64 --out FILE

Every object is cached under a hash of all that went into it, so a second build of the same tree only links.
Exit codes: 0 fine, 2 usage, 4 the build failed.
"""

from __future__ import annotations

import argparse
import contextlib
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
from typing import Any

import ptxas
import units
from toolchain import MACHINES, STAMP, ToolchainError, build_machine, default_cache, install, sha256

CSRC = Path(__file__).resolve().parent
TORCH_TARGET = "0x020a000000000000"  # stable ABI of torch 2.10: the oldest with raw data pointers of a tensor
TORCH_SYMBOL = re.compile(r"(aoti_torch_|torch_)")  # what the binding may leave to the torch that loads it
OBJECT_SCHEMA = "1"  # bump when the way objects are made changes without a flag saying so
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
            raise BuildError(f"{toolchain}/{machine}: no toolchain here; next: build.py toolchain --host {host} --into {toolchain}")
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
    """argv that compiles ``job``, without the output file."""
    defines = [f"-D{name}={value}" for name, value in job.defines]
    include = [f"-I{request.source}"]
    if job.rate is not None:
        defines += [f"-D{define}" for define in request.defines]
    if job.unit.path.suffix == ".cu":
        host = [f"-Xcompiler={','.join(HOST_FLAGS)}", f"-ccbin={tools.cxx}", f"-I{tools.host_tree}/include"]
        return [str(tools.nvcc), *NVCC_FLAGS, *request.gencode(), *host, *include, *defines, "-c", str(job.unit.path)]
    if job.unit.torch:
        if tools.torch_include is None:
            raise BuildError(f"{job.unit.name} needs torch's headers; next: pass --torch-include, or toolchain --torch-headers")
        include += ["-isystem", str(tools.torch_include)]
        defines += [f"-DTORCH_TARGET_VERSION={TORCH_TARGET}", "-DUSE_CUDA"]
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", *HOST_FLAGS]
    return [tools.cxx, *flags, *include, f"-I{tools.host_tree}/include", *defines, "-c", str(job.unit.path)]


def object_key(job: units.Job, request: Request, tools: Tools) -> str:
    """Content address of a job's object: sources with their includes, flags, compilers, and torch's headers if used."""
    files = units.sources(job.unit.path)
    paths = {str(request.source): "CSRC", str(tools.tree): "TOOLS", str(tools.host_tree): "HOST"}
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


def compile_job(job: units.Job, request: Request, tools: Tools, cache: Path) -> Built:
    """The object of ``job``, from the cache or compiled. Raises BuildError with the compiler's words."""
    key = object_key(job, request, tools)
    target = cache / "objects" / key[:2] / f"{key}.o"
    report = target.with_suffix(".json")
    if target.is_file() and report.is_file():
        return Built(job, target, [ptxas.KernelUse(**use) for use in json.loads(report.read_text())], 0.0, True)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        fresh = Path(scratch) / "unit.o"
        argv = [*compile_argv(job, request, tools), "-o", str(fresh)]
        began = time.monotonic()
        done = subprocess.run(argv, capture_output=True, text=True, check=False, env={**os.environ, "TMPDIR": scratch})
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
    with ThreadPoolExecutor(workers) as pool:
        waiting = {pool.submit(compile_job, job, request, tools, cache): job for job in jobs}
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


def _tell(one: Built, done: int, total: int) -> None:
    took = "cached" if one.cached else f"{one.seconds:.1f} s"
    print(f"[{done:3}/{total}] {took:>8}  {one.job.label}", file=sys.stderr, flush=True)


def abi_number(source: Path) -> int:
    """The value of EXL3_ABI_VERSION in abi.h. Raises BuildError if it is not there."""
    header = source / "abi.h"
    found = re.search(r"^#define\s+EXL3_ABI_VERSION\s+(\d+)", header.read_text(), re.MULTILINE) if header.is_file() else None
    if not found:
        raise BuildError(f"{header}: no `#define EXL3_ABI_VERSION N`")
    return int(found[1])


def manifest(built: list[Built], request: Request, tools: Tools) -> dict[str, Any]:
    """What the library claims of itself; embedded in it, and the claim that `exl3_vllm.symbols` checks."""
    ops: dict[str, dict[str, Any]] = {}
    kernels: list[dict[str, Any]] = []
    for one in built:
        unit = one.job.unit
        for op in unit.ops:
            entry = ops.setdefault(op, {"units": []})
            if unit.name not in entry["units"]:
                entry["units"].append(unit.name)
        names = sorted({use.kernel for use in one.uses})
        if names:
            kernels.append({"unit": unit.name, "rate": one.job.rate, "codebook": one.job.codebook, "names": names})
    used = {path for one in built for path in units.sources(one.job.unit.path)}
    return {
        "manifest": 1,
        "abi": abi_number(request.source),
        "targets": list(request.targets),
        "ptx": request.ptx,
        "rates": list(request.rates),
        "codebooks": list(request.codebooks),
        "host": request.host,
        "torch": request.torch,
        "defines": list(request.defines),
        "source": units.digest(sorted(used)),
        "compilers": tools.versions,
        "ops": ops,
        "kernels": kernels,
    }


MANIFEST_SOURCE = """\
// The section is what a reader of the file looks for; it is loaded with the library, so stripping leaves it in place.
extern "C" {{
__attribute__((section("exl3.manifest"), used)) extern const char exl3_manifest_text[] = R"EXL3({text})EXL3";
__attribute__((visibility("default"))) const char* exl3_manifest() {{ return exl3_manifest_text; }}
}}
"""


def link(built: list[Built], claims: dict[str, Any], tools: Tools, out: Path) -> None:
    """Link the objects and the manifest into ``out``. Raises BuildError on an undefined symbol that torch does not own.

    g++ links, not nvcc: nvcc -shared adds a device-link cubin for sm_75 that nobody asked for.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".link-") as scratch:
        source, fresh = Path(scratch) / "manifest.cpp", Path(scratch) / "library.so"
        text = json.dumps(claims, separators=(",", ":"), sort_keys=True)
        source.write_text(MANIFEST_SOURCE.format(text=text))
        objects = [str(one.object) for one in built]
        libraries = [f"-L{tools.host_tree}/lib", "-lcudart_static", "-lpthread", "-ldl", "-lrt"]
        strict = ["-Wl,--exclude-libs,ALL", "-Wl,-z,defs", "-Wl,--warn-unresolved-symbols", "-Wl,-z,noexecstack"]
        argv = [tools.cxx, "-shared", *HOST_FLAGS, "-O2", str(source), *objects, *libraries, *strict, "-o", str(fresh)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        undefined = set(re.findall(r"undefined reference to `([^']+)'", done.stderr))
        foreign = sorted(name for name in undefined if not TORCH_SYMBOL.match(name))
        if foreign:
            raise BuildError(f"{out.name}: undefined symbols that no runtime provides: {', '.join(foreign)}")
        if done.returncode:
            raise BuildError(f"{out.name}: the linker failed\n{done.stderr.strip()}")
        fresh.replace(out)


def write_sidecar(built: list[Built], claims: dict[str, Any], out: Path) -> dict[str, Any]:
    """FILE.json beside the library: the manifest, the file's sha256, resources of every kernel, seconds of every unit."""
    uses = [use.as_json() for one in built for use in one.uses]
    times = {one.job.label: round(one.seconds, 1) for one in built if not one.cached}
    content = {**claims, "sha256": sha256(out), "resources": uses, "compiled_seconds": times}
    out.with_name(out.name + ".json").write_text(json.dumps(content, indent=1) + "\n")
    return content


def build(request: Request, tools: Tools, cache: Path, out: Path, workers: int) -> dict[str, Any]:
    """Compile what is not cached, link, and return the sidecar's content. Raises BuildError or UnitError."""
    found = [unit for unit in units.read_units(request.source) if request.torch or not unit.torch]
    jobs = units.expand(found, list(request.rates), list(request.codebooks))
    built = compile_all(jobs, request, tools, cache, workers)
    claims = manifest(built, request, tools)
    link(built, claims, tools, out)
    return write_sidecar(built, claims, out)


def _list(values: tuple[str, ...], kind: str) -> Any:
    def parse(text: str) -> list[str]:
        picked = [word.strip() for word in text.split(",")]
        for word in picked:
            if word not in values:
                raise argparse.ArgumentTypeError(f"{kind} {word!r} is not one of {', '.join(values)}")
        return sorted(set(picked), key=values.index)

    return parse


TARGETS = ("9.0", "12.0", "12.1")
RATE_WORDS = tuple(f"{rate:g}" for rate in units.RATES)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="build.py", description="Build the EXL3 kernel library.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    tool = verbs.add_parser("toolchain", help="lay the CUDA toolchain out from locked wheels")
    tool.add_argument("--lock", type=Path, required=True, help="locks/cuda-13.0-toolchain.json")
    tool.add_argument("--into", type=Path, required=True)
    tool.add_argument("--host", choices=MACHINES, help="machine that will load the library (default: this kind)")
    tool.add_argument("--wheels", type=Path, help="folder with the wheels, for a machine without an index")
    tool.add_argument("--torch-headers", action="store_true", help="also torch's stable-ABI headers")
    library = verbs.add_parser("library", help="compile and link")
    library.add_argument("--toolchain", type=Path, required=True, help="folder that `build.py toolchain` filled")
    library.add_argument("--source", type=Path, default=CSRC, help="folder of the units (default: this one)")
    library.add_argument("--targets", type=_list(TARGETS, "target"), default=["12.0", "12.1"])
    library.add_argument("--rates", type=_list(RATE_WORDS, "rate"), default=["4"])
    library.add_argument("--codebooks", type=_list(tuple(units.CODEBOOKS), "codebook"), default=["mcg"])
    library.add_argument("--host", choices=MACHINES, help="machine that will load the library (default: this kind)")
    library.add_argument("--no-torch", action="store_true", help="leave the torch binding out: the C interface alone")
    library.add_argument("--define", action="append", default=[], metavar="NAME=VALUE", help="for measurement builds")
    library.add_argument("--torch-include", type=Path, help="torch's include folder (default: the toolchain's)")
    library.add_argument("--cache", type=Path, default=default_cache() / "kernels")
    library.add_argument("-j", "--jobs", type=int, default=len(os.sched_getaffinity(0)))
    library.add_argument("--out", type=Path, required=True)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one verb; the exit code says how it went."""
    options = _parser().parse_args(argv)
    try:
        host = options.host or build_machine()
        if options.verb == "toolchain":
            install(options.lock, options.into, [host], wheels=options.wheels, torch_headers=options.torch_headers)
            return 0
        request = Request(
            source=options.source.resolve(),
            targets=tuple(options.targets),
            rates=tuple(map(float, options.rates)),
            codebooks=tuple(options.codebooks),
            host=host,
            torch=not options.no_torch,
            defines=tuple(options.define),
        )
        tools = find_tools(options.toolchain.resolve(), host, options.torch_include)
        began = time.monotonic()
        content = build(request, tools, options.cache.resolve(), options.out.resolve(), max(1, options.jobs))
    except (BuildError, ToolchainError, units.UnitError) as error:
        print(f"build.py: {error}", file=sys.stderr)
        return 4
    except KeyboardInterrupt:
        return 130
    took = time.monotonic() - began
    size = options.out.stat().st_size / 1e6
    with contextlib.suppress(BrokenPipeError):
        print(f"{options.out}: {size:.1f} MB in {took:.1f} s, source {content['source'][:12]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
