#!/usr/bin/env python3
"""Build the kernel library from the units of this folder with nvcc out of PyPI wheels. Standard library only.

    build.py toolchain --lock LOCK --into DIR [--host aarch64] [--wheels DIR] [--torch-headers]
    build.py wheels --lock LOCK --into DIR [--machine aarch64] [--host aarch64]
    build.py library --toolchain DIR --targets 12.0,12.1 --rates 4 --codebooks mcg --host x86_64 --out FILE

Exit codes: 0 fine, 2 usage, 4 the build failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import units
from compiler import BuildError, Request, Tools, compile_all, find_tools, forget_unused
from link import link, manifest, write_sidecar
from toolchain import MACHINES, ToolchainError, build_machine, default_cache, fetch, install

CSRC = Path(__file__).resolve().parent


def build(request: Request, tools: Tools, cache: Path, out: Path, workers: int) -> dict[str, Any]:
    """Compile what is not cached, link, and return the sidecar's content. Raises BuildError or UnitError."""
    found = [unit for unit in units.read_units(request.source) if request.torch or not unit.torch]
    jobs = units.expand(found, list(request.rates), list(request.codebooks))
    built = compile_all(jobs, request, tools, cache, workers)
    claims = manifest(built, request, tools)
    link(built, claims, tools, out)
    forget_unused(cache)
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
    tool.add_argument("--readers-only", action="store_true", help="only cuobjdump and nvdisasm, for this machine")
    tool.add_argument("--torch-headers", action="store_true", help="also torch's stable-ABI headers")
    wheels = verbs.add_parser("wheels", help="fetch the locked wheels into a folder, for a machine without an index")
    wheels.add_argument("--lock", type=Path, required=True)
    wheels.add_argument("--into", type=Path, required=True)
    wheels.add_argument("--machine", choices=MACHINES, help="machine that will compile (default: this kind)")
    wheels.add_argument("--host", choices=MACHINES, help="machine that will load the library (default: the same)")
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
        if options.verb == "wheels":
            machine = options.machine or build_machine()
            fetch(options.lock, options.into, [options.host or machine], machine)
            return 0
        host = options.host or build_machine()
        if options.verb == "toolchain":
            extent = {"torch_headers": options.torch_headers, "readers_only": options.readers_only}
            install(options.lock, options.into, [host], wheels=options.wheels, **extent)
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
    print(f"{options.out}: {size:.1f} MB in {took:.1f} s, source {content['source'][:12]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
