"""Imports the kernel library as a server would and calls it once for every rate and codebook that it holds.

    python -m exl3_vllm.kernelcheck [--library FILE]

Prints one JSON object: `abi`, `instances` (such as "4 mcg"), `gpus` (name, capability, and the relative L2 error of
each instance's small product against the reference decoder), `errors`. Exit code 0, or 5 when `errors` is not empty.
Where torch sees no GPU the library is imported and nothing is called.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from exl3_vllm import decode, kernels

LIMIT = 6e-4  # relative L2: the first bar of accuracy (docs/kernels.md, K7)
FAILED = 5
NAMES = {number: name for name, number in kernels.CODEBOOKS.items()}
ROWS, K, N = 5, 256, 384


def check(library: Path) -> dict[str, Any]:
    """The report that `main` prints."""
    report: dict[str, Any] = {"library": str(library), "abi": None, "instances": [], "gpus": [], "errors": []}
    try:
        pairs = kernels.load(library)
    except kernels.KernelError as error:
        report["errors"].append(str(error))
        return report
    report["abi"] = kernels.ABI_VERSION
    report["instances"] = [_label(*pair) for pair in pairs]
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        gpu: dict[str, Any] = {"name": name, "capability": "{}.{}".format(*capability)}
        report["gpus"].append(gpu)
        where = f"{name} ({gpu['capability']})"
        try:
            gpu["error"] = {_label(*pair): product_error(device, *pair) for pair in pairs}
        except RuntimeError as error:  # one that the driver cannot load, or that faults: no later call would work
            report["errors"].append(f"{where}: {error}")
            break
        wrong = [f"{label} {error:.1e}" for label, error in gpu["error"].items() if not error <= LIMIT]
        if wrong:
            report["errors"].append(f"{where}: wrong products, relative error {', '.join(wrong)}")
    return report


def product_error(device: torch.device, rate2: int, codebook: int) -> float:
    """Relative L2 of one small fused product on ``device`` against the reference decoder on the CPU."""
    generator = torch.Generator().manual_seed(rate2 + 32 * codebook)
    shape = (K // 16, N // 16, 8 * rate2)
    trellis = torch.randint(-32768, 32768, shape, generator=generator, dtype=torch.int16)
    suh, svh, x = (torch.randn(size, generator=generator).half() for size in (K, N, ROWS * K))
    name, rows = NAMES[codebook], x.view(ROWS, K)
    want = decode.forward(rows, trellis, suh, svh, name).double()
    matrix = kernels.Matrix(trellis.to(device), suh.to(device), svh.to(device), name, N)
    got = kernels.linear(rows.to(device), [matrix], out_dtype=torch.float32).cpu().double()
    return float(((got - want).norm() / want.norm()).item())


def _label(rate2: int, codebook: int) -> str:
    return f"{rate2 / 2:g} {NAMES[codebook]}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m exl3_vllm.kernelcheck", description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=Path, default=kernels.LIBRARY)
    report = check(parser.parse_args(argv).library)
    print(json.dumps(report))
    return FAILED if report["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
