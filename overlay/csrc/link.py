"""From objects to the library: its manifest, the link, and the JSON beside it. Standard library only."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import units
from compiler import HOST_FLAGS, BuildError, Built, Request, Tools
from toolchain import sha256

TORCH_SYMBOL = re.compile(r"(aoti_torch_|torch_)")  # what the binding may leave to the torch that loads it


def abi_number(source: Path) -> int:
    """The value of EXL3_ABI_VERSION in abi.h. Raises BuildError if it is not there."""
    header = source / "abi.h"
    text = header.read_text() if header.is_file() else ""
    found = re.search(r"^#define\s+EXL3_ABI_VERSION\s+(\d+)", text, re.MULTILINE)
    if not found:
        raise BuildError(f"{header}: no `#define EXL3_ABI_VERSION N`")
    return int(found[1])


def manifest(built: list[Built], request: Request, tools: Tools) -> dict[str, Any]:
    """What the library claims of itself; embedded in it, and the claim that `exl3_vllm.symbols` checks."""
    ops: dict[str, list[str]] = {}
    kernels: list[dict[str, Any]] = []
    for one in built:
        unit = one.job.unit
        for op in unit.ops:
            if unit.name not in ops.setdefault(op, []):
                ops[op].append(unit.name)
        names = sorted({use.kernel for use in one.uses})
        if names:
            kernels.append({"unit": unit.name, "rate": one.job.rate, "codebook": one.job.codebook, "names": names})
    with_kernels = {group["unit"] for group in kernels}
    for op, names in ops.items():
        if not with_kernels & set(names):
            raise BuildError(f"op {op}: no kernel in {', '.join(names)}; next: name it in the .cu that has its kernels")
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
        source, fresh, exports = (Path(scratch) / name for name in ("manifest.cpp", "library.so", "exports"))
        exports.write_text("{ global: exl3_*; local: *; };")  # else libstdc++'s inline typeinfo is exported too
        text = json.dumps(claims, separators=(",", ":"), sort_keys=True)
        source.write_text(MANIFEST_SOURCE.format(text=text))
        objects = [str(one.object) for one in built]
        libraries = [f"-L{tools.host_tree}/lib", "-lcudart_static", "-lpthread", "-ldl", "-lrt"]
        # discard-all: names of nvcc's temporary files are local symbols; without them a build repeats to the byte.
        strict = [
            "--discard-all",
            "--exclude-libs,ALL",
            "-z,defs",
            "--warn-unresolved-symbols",
            f"--version-script={exports}",
        ]
        argv = [tools.cxx, "-shared", *HOST_FLAGS, "-O2", str(source), *objects, *libraries, "-o", str(fresh)]
        argv += [f"-Wl,{word}" for word in strict]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        undefined = set(re.findall(r"undefined reference to `([^']+)'", done.stderr))
        foreign = sorted(name for name in undefined if not TORCH_SYMBOL.match(name))
        if foreign:
            raise BuildError(f"{out.name}: undefined symbols that no runtime provides: {', '.join(foreign)}")
        if done.returncode:
            raise BuildError(f"{out.name}: the linker failed\n{done.stderr.strip()}")
        fresh.replace(out)


def write_sidecar(built: list[Built], claims: dict[str, Any], out: Path) -> dict[str, Any]:
    """FILE.json beside the library: manifest, the file's sha256, resources of every kernel, seconds of every unit."""
    uses = [use.as_json() for one in built for use in one.uses]
    times = {one.job.label: round(one.seconds, 1) for one in built if not one.cached}
    content = {**claims, "sha256": sha256(out), "resources": uses, "compiled_seconds": times}
    out.with_name(out.name + ".json").write_text(json.dumps(content, indent=1) + "\n")
    return content
