"""Does a kernel library hold what a deployment needs? Read from the file, without a GPU, for any host machine.

    python -m exl3_vllm.symbols FILE [--targets 12.0,12.1] [--rates 4] [--codebooks mcg] [--tier grouped] [--json]

The library says in its manifest what it holds; this module checks the claim against the file: exported symbols in the
ELF table, kernels of every target in the fat binary, and against what is asked. Exit codes: 0 fine (warnings included),
2 usage or not readable, 5 something is missing.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exl3_vllm import elf, fatbin

ABI = 1
"""Version of the C interface that this package calls; the same number as in csrc/abi.h."""

_INFORMATION = ("exl3_abi_version", "exl3_last_error", "exl3_instances", "exl3_manifest")
_THIN = (
    "exl3_rotate",
    "exl3_gemm",
    "exl3_gemm_workspace",
    "exl3_reconstruct",
    "exl3_finish",
    "exl3_moe",
    "exl3_moe_workspace",
)
_KERNEL = ("exl3_fat_gemm", "exl3_fat_gemm_scatter")
_GROUPED = (
    "exl3_fat_moe_gather",
    "exl3_fat_moe_gateup",
    "exl3_fat_moe_down",
    "exl3_fat_moe_tile_rows_gateup",
    "exl3_fat_moe_tile_rows_down",
)
REQUIRED = {
    "none": (),
    "legacy": _INFORMATION + _THIN,
    "sorted": _INFORMATION + _THIN,
    "batched": _INFORMATION + _THIN,
    "kernel": _INFORMATION + _THIN + _KERNEL,
    "grouped": _INFORMATION + _THIN + _KERNEL + _GROUPED,
    "auto": _INFORMATION + _THIN + _KERNEL + _GROUPED,
}
"""Exported symbols that each MoE tier calls. `auto` takes the highest, so it needs them all."""

ON_HOST = frozenset(
    (*_INFORMATION, "exl3_gemm_workspace", "exl3_moe_workspace", *(name for name in _GROUPED if "tile_rows" in name))
)
"""Those of them that launch nothing; every other one needs kernels on every target."""

# Symbols that the machine's C and C++ runtime or the torch that loads the library provide.
_RUNTIME_VERSION = re.compile(r"(GLIBC|GLIBCXX|CXXABI|GCC)_[\d.]+")
_TORCH_SYMBOL = re.compile(r"(aoti_torch_|torch_)")
_RUNTIME_LIBRARY = re.compile(r"(lib(stdc\+\+|gcc_s|c|m|dl|rt|pthread)|ld-linux-[\w-]+)\.so\.\d+")


@dataclass(frozen=True)
class Request:
    """What a deployment asks for; an empty tuple asks for what the manifest claims."""

    targets: tuple[str, ...] = ()
    rates: tuple[float, ...] = ()
    codebooks: tuple[str, ...] = ()
    tier: str = "auto"
    host: str = ""


@dataclass(frozen=True)
class Finding:
    """One thing wrong: `error` fails the check, `warning` does not."""

    level: str
    what: str


@dataclass(frozen=True)
class Library:
    """A library file as read: its ELF tables, its manifest, its GPU code."""

    path: Path
    elf: elf.SharedObject
    manifest: dict[str, Any]
    code: fatbin.GpuCode


class SymbolsError(Exception):
    """A file that cannot be checked at all."""


def read(path: Path, cuobjdump: Path) -> Library:
    """Read ``path``. Raises SymbolsError if it is no shared object or cuobjdump cannot read it.

    A library without a manifest is read as one that claims nothing, so that `check` can say what it lacks.
    """
    try:
        shared = elf.read(path)
        code = fatbin.read(path, cuobjdump)
    except (elf.ElfError, fatbin.FatbinError) as error:
        raise SymbolsError(str(error)) from error
    section = shared.section("exl3.manifest") or b""
    try:
        manifest = json.loads(section.split(b"\0")[0] or b"{}")
    except ValueError as error:
        raise SymbolsError(f"{path}: the manifest in section exl3.manifest is not JSON ({error})") from error
    return Library(path, shared, manifest, code)


def completed(request: Request, manifest: dict[str, Any]) -> Request:
    """``request`` with what it leaves open taken from the manifest."""
    return Request(
        targets=request.targets or tuple(manifest.get("targets", ())),
        rates=request.rates or tuple(manifest.get("rates", ())),
        codebooks=request.codebooks or tuple(manifest.get("codebooks", ())),
        tier=request.tier,
        host=request.host or manifest.get("host", ""),
    )


def check(library: Library, request: Request) -> list[Finding]:
    """All that keeps ``library`` from serving ``request``, errors first. A warning: a target that only PTX serves."""
    asked = completed(request, library.manifest)
    if asked.tier == "none":
        return []
    found = [*_check_file(library, asked), *_check_exports(library, asked)]
    if library.manifest:
        found += [*_check_claims(library, asked), *_check_kernels(library, asked)]
    found += _check_resources(library)
    return sorted(found, key=lambda finding: finding.level)


def _check_file(library: Library, asked: Request) -> list[Finding]:
    found = []
    if not library.manifest:
        found.append("no section exl3.manifest: not built by overlay/csrc/build.py, or its sections were removed")
    if not library.elf.has_symbol_table:
        found.append("no symbol table: the file was stripped after it was linked, so it is not the one that was built")
    if asked.host and library.elf.machine != asked.host:
        found.append(f"built for {library.elf.machine} hosts, {asked.host} asked")
    for wanted in library.elf.wanted:
        owned = _RUNTIME_VERSION.fullmatch(wanted.version) or _TORCH_SYMBOL.match(wanted.name) or wanted.weak
        if not owned:
            found.append(f"undefined symbol {wanted.name}: neither the C and C++ runtime nor torch provides it")
    for name in library.elf.needed:
        if not _RUNTIME_LIBRARY.fullmatch(name):
            found.append(f"needs the shared library {name}, which is not part of the C and C++ runtime")
    return [Finding("error", what) for what in found]


def _check_exports(library: Library, asked: Request) -> list[Finding]:
    missing = [name for name in REQUIRED[asked.tier] if name not in library.elf.exported]
    found = [f"symbol {name} is missing (tier {asked.tier} calls it)" for name in missing]
    for name in REQUIRED[asked.tier]:
        if name not in ON_HOST and not _kernels_of(library, name):
            found.append(f"symbol {name} has no kernels (the manifest names none for it)")
    return [Finding("error", what) for what in found]


def _kernels_of(library: Library, symbol: str) -> set[str]:
    units = set(library.manifest.get("ops", {}).get(symbol, ()))
    groups = library.manifest.get("kernels", ())
    return {name for group in groups if group["unit"] in units for name in group["names"]}


def _check_claims(library: Library, asked: Request) -> list[Finding]:
    claims = library.manifest
    found = []
    if claims.get("abi") != ABI:
        found.append(f"ABI version {claims.get('abi')}, this package calls {ABI}")
    if claims.get("defines"):
        found.append(f"built for measuring only, with {', '.join(claims['defines'])}: its results are wrong")
    for rate in asked.rates:
        if rate not in claims.get("rates", ()):
            found.append(f"{rate:g}-bit kernels are not compiled in (rates: {_listed(claims.get('rates', ()))})")
    for codebook in asked.codebooks:
        if codebook not in claims.get("codebooks", ()):
            found.append(f"codebook {codebook} is not compiled in (codebooks: {_listed(claims.get('codebooks', ()))})")
    return [Finding("error", what) for what in found]


def _listed(values: Any) -> str:
    return ", ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values) or "none"


def _check_kernels(library: Library, asked: Request) -> list[Finding]:
    found = []
    for target in asked.targets:
        missing = [name for name in _claimed(library, asked) if name not in library.code.kernels.get(target, {})]
        if not missing and target in library.code.kernels:
            continue
        if target not in library.code.kernels and (ptx := usable_ptx(library.code, target)):
            what = f"target {target} has no machine code, only PTX of {ptx}: the driver compiles it at every first load"
            found.append(Finding("warning", what))
        elif target not in library.code.kernels:
            there = _listed(sorted(library.code.kernels)) if library.code.kernels else "none"
            found.append(Finding("error", f"target {target} is missing (machine code: {there})"))
        else:
            for name in missing:
                ops = ", ".join(_ops_of(library, name)) or "no op"
                found.append(Finding("error", f"kernel {name} ({ops}) is missing on target {target}"))
    return found


def usable_ptx(code: fatbin.GpuCode, target: str) -> str | None:
    """The PTX that serves ``target``: of the same major version and not newer.

    A driver would take older PTX too; but code that was written for another family is not what was asked for.
    """
    major, minor = target.split(".")
    fitting = [ptx for ptx in code.ptx if ptx.split(".")[0] == major and int(ptx.split(".")[1]) <= int(minor)]
    return max(fitting, default=None)


def _claimed(library: Library, asked: Request) -> list[str]:
    """Kernels of the manifest that ``asked`` needs: those without a rate, and those of its rates and codebooks."""
    names: list[str] = []
    for group in library.manifest.get("kernels", ()):
        if group["rate"] in (None, *asked.rates) and group["codebook"] in (None, *asked.codebooks):
            names += group["names"]
    return sorted(set(names))


def _ops_of(library: Library, kernel: str) -> list[str]:
    units = {group["unit"] for group in library.manifest.get("kernels", ()) if kernel in group["names"]}
    return sorted(op for op, served in library.manifest.get("ops", {}).items() if units & set(served))


def _check_resources(library: Library) -> list[Finding]:
    found = []
    for target, kernels in sorted(library.code.kernels.items()):
        for name, use in sorted(kernels.items()):
            if use.stack:
                found.append(Finding("error", f"kernel {name} on {target} spills {use.stack} bytes per thread"))
    return found


def table(library: Library, request: Request) -> list[dict[str, str]]:
    """Symbol x target, a row per required symbol; cells: `yes` (machine code), `ptx`, `no`, or `host` (no kernel)."""
    asked = completed(request, library.manifest)
    wanted = set(_claimed(library, asked))
    rows = []
    for symbol in REQUIRED[asked.tier]:
        row = {"symbol": symbol, "exported": "yes" if symbol in library.elf.exported else "no"}
        kernels = _kernels_of(library, symbol) & wanted
        for target in asked.targets:
            row[target] = "host" if symbol in ON_HOST else _cell(library, target, kernels)
        rows.append(row)
    return rows


def _cell(library: Library, target: str, kernels: set[str]) -> str:
    there = library.code.kernels.get(target)
    if there is not None:
        return "yes" if kernels and kernels <= set(there) else "no"
    return "ptx" if usable_ptx(library.code, target) else "no"


def resources(library: Library) -> dict[str, dict[str, int]]:
    """Per target: kernels, the most registers, the most static shared memory in bytes, bytes spilled in all."""
    return {
        target: {
            "kernels": len(kernels),
            "max_registers": max((use.registers for use in kernels.values()), default=0),
            "max_static_shared": max((use.shared for use in kernels.values()), default=0),
            "spilled": sum(use.stack for use in kernels.values()),
        }
        for target, kernels in sorted(library.code.kernels.items())
    }


def runtime_needs(library: Library) -> dict[str, str]:
    """The newest version of each runtime that the file asks for, such as {"GLIBC": "2.34"}."""
    newest: dict[str, tuple[int, ...]] = {}
    for wanted in library.elf.wanted:
        if _RUNTIME_VERSION.fullmatch(wanted.version):
            name, _, number = wanted.version.partition("_")
            newest[name] = max(newest.get(name, ()), tuple(map(int, number.split("."))))
    return {name: ".".join(map(str, number)) for name, number in sorted(newest.items())}


def report(library: Library, request: Request) -> dict[str, Any]:
    """All of the above as one JSON-ready object; `ok` is false when an error was found."""
    findings = check(library, request)
    asked = completed(request, library.manifest)
    claims = library.manifest
    return {
        "file": str(library.path),
        "ok": all(finding.level != "error" for finding in findings),
        "asked": {
            "targets": list(asked.targets),
            "rates": list(asked.rates),
            "codebooks": list(asked.codebooks),
            "tier": asked.tier,
            "host": asked.host,
        },
        "abi": claims.get("abi"),
        "source": claims.get("source"),
        "host": library.elf.machine,
        "needs": runtime_needs(library),
        "ptx": sorted(library.code.ptx),
        "symbols": table(library, request),
        "resources": resources(library),
        "errors": [finding.what for finding in findings if finding.level == "error"],
        "warnings": [finding.what for finding in findings if finding.level == "warning"],
    }


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, _words(text)))


def _print(content: dict[str, Any]) -> None:
    columns = ["symbol", "exported", *content["asked"]["targets"]]
    lines = [columns, *([row[column] for column in columns] for row in content["symbols"])]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    for line in lines:
        print("  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip())
    for target, use in content["resources"].items():
        figures = f"<= {use['max_registers']} registers, {use['spilled']} bytes spilled"
        print(f"{target}: {use['kernels']} kernels, {figures}")
    needs = ", ".join(f"{name} {number}" for name, number in content["needs"].items())
    print(f"PTX {_listed(content['ptx'])}, ABI {content['abi']}, host {content['host']}, needs {needs or 'nothing'}")
    for kind in ("warnings", "errors"):
        for what in content[kind]:
            print(f"{kind[:-1]}: {what}", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """Check one file from the command line."""
    parser = argparse.ArgumentParser(prog="python -m exl3_vllm.symbols", description="Check a kernel library.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--targets", type=_words, default=(), help="compute capabilities, such as 12.0,12.1")
    parser.add_argument("--rates", type=_numbers, default=(), help="bits per weight, such as 4,2.5")
    parser.add_argument("--codebooks", type=_words, default=(), help="of 3inst, mcg, mul1")
    parser.add_argument("--tier", choices=sorted(REQUIRED), default="auto")
    parser.add_argument("--host", choices=sorted(elf.MACHINES.values()), default="")
    parser.add_argument("--cuobjdump", type=Path, help="the program to read with (default: looked for)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    request = Request(options.targets, options.rates, options.codebooks, options.tier, options.host)
    try:
        library = read(options.file, options.cuobjdump or fatbin.find_cuobjdump())
    except (SymbolsError, fatbin.FatbinError) as error:
        print(f"exl3_vllm.symbols: {error}", file=sys.stderr)
        return 2
    content = report(library, request)
    if options.json:
        print(json.dumps(content, indent=1))
    else:
        _print(content)
    return 0 if content["ok"] else 5


if __name__ == "__main__":
    sys.exit(main())
