"""Measures the kernels on this machine's GPU against the bars K1 to K10 and writes what it found.

    python -m exl3_vllm.bench --out DIR [--library FILE] [--only K1,K4] [--write-table FILE] [--slow-tensor]

DIR gets bench.json, bench.txt (the table) and roofline.png where matplotlib is installed. --write-table stores the tile
and crossover choices measured for this GPU; `plans.load_table` reads them. --slow-tensor: the library was built with
EXL3_MMA_REPEAT=3, measure K9 and nothing else. K10 is read from the binary by `exl3_vllm.symbols`, not timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from exl3_vllm import bench_cases, bench_peers, kernels, plans
from exl3_vllm.bench_cases import DENSE, Bench

Row = tuple[str, str, str, str]  # bar, what, measured, verdict
PREFILL = {
    "K1": (2048, ((2050, 0.91), (2350, 0.89)), (1800, 2100)),
    "K2": (7168, ((5700, 2.1), (5900, 1.65)), (5200, 5300)),
}
INVALID = 8  # exit code: a result that must not be trusted (accuracy or repeatability failed)


def measure(b: Bench, only: set[str], log: Callable[[str], None]) -> dict[str, Any]:
    """Every chosen bar's raw figures."""
    cases: dict[str, Callable[[], Any]] = {
        "ceilings": lambda: bench_cases.ceilings(b),
        "K1": lambda: {z: bench_cases.moe_prefill(b, 2048, z == "zipf") for z in ("uniform", "zipf")},
        "K2": lambda: {z: bench_cases.moe_prefill(b, 7168, z == "zipf") for z in ("uniform", "zipf")},
        "K3": lambda: bench_cases.moe_decode(b, range(1, 257)),
        "K4": lambda: {_name(shape): bench_cases.dense(b, shape, range(1, 33)) for shape in DENSE},
        "K5": lambda: {_name(shape): bench_cases.dense(b, shape, (64, 128)) for shape in DENSE},
        "K6": lambda: {_name(shape): bench_cases.dense(b, shape, (512, 1024, 2048, 4096)) for shape in DENSE},
        "K7": lambda: bench_cases.accuracy(b),
        "K8": lambda: bench_cases.repeatable(b),
    }
    results = {}
    for name, case in cases.items():
        if not only or name in only or name == "ceilings":
            start = time.monotonic()
            results[name] = case()
            log(f"{name}: {time.monotonic() - start:.1f} s")
    return results


def _name(shape: tuple[int, int, int]) -> str:
    return f"{shape[0]}x{shape[1]} {shape[2] / 2:g} bit"


def verdicts(results: dict[str, Any]) -> list[Row]:
    """The table: one row for each bar and geometry."""
    rows: list[Row] = []
    if "ceilings" in results:
        c = results["ceilings"]
        rows.append(("", "torch.mm 8192^3, device copy", f"{c['mm_tflops']:.0f} TFLOP/s, {c['copy_tbs']:.2f} TB/s", ""))
    for bar, (tokens, first, second) in PREFILL.items():
        for i, (routing, r) in enumerate(results.get(bar, {}).items()):
            met = "first" if r["us"] <= first[i][0] and r["ratio"] <= first[i][1] else "missed"
            met = "second" if met == "first" and r["us"] <= second[i] else met
            text = f"{r['us'] / 1e3:.2f} ms, {r['ratio']:.2f} of grouped_mm, {r['tflops']:.0f} TFLOP/s"
            rows.append((bar, f"MoE {tokens} tokens {routing}", text, met))
    if "K3" in results:
        rows.append(_against_peer("K3", "MoE 1..256 tokens", results["K3"], "us"))
    for shape, r in results.get("K4", {}).items():
        rows.append(_against_peer("K4", f"dense 1..32 rows, {shape}", r, "us"))
    for shape, rs in results.get("K5", {}).items():
        for r in rs:
            others = [r[key] for key in ("peer_us", "peer_reconstruct_us", "reconstruct_us") if key in r]
            ratio = min(others) / r["us"]
            met = "moonshot" if ratio >= 1.4 else "second" if ratio >= 1.3 else "first" if ratio >= 1.2 else "missed"
            text = f"{r['us']:.1f} us, {ratio:.2f}x the best other path"
            rows.append(("K5", f"dense {r['rows']} rows, {shape}", text, met))
    for shape, rs in results.get("K6", {}).items():
        for r in rs:
            best = min(r[key] for key in ("fused_us", "reconstruct_us", "peer_reconstruct_us") if key in r)
            fused = r["mm_us"] / r["fused_us"]
            met = "missed" if r["us"] > 1.03 * best else "second" if fused >= 0.43 else "first"
            text = f"{r['us']:.0f} us, {r['us'] / best:.3f} of the best path; fused {fused:.2f} of torch.mm"
            rows.append(("K6", f"dense {r['rows']} rows, {shape}", text, met))
    if "K7" in results:
        r = results["K7"]
        met = "first" if r["dense"] <= 6e-4 and r["moe"] <= 8e-4 else "missed"
        rows.append(("K7", "relative L2 to fp64", f"dense {r['dense']:.1e}, MoE {r['moe']:.1e}", met))
    if "K8" in results:
        rows.append(
            ("K8", "five runs bit-identical", "yes" if results["K8"] else "NO", "first" if results["K8"] else "missed")
        )
    rows += [("K9", key, f"{value:.3g}", "") for key, value in results.get("K9", {}).items()]
    return rows


def _against_peer(bar: str, what: str, points: list[dict[str, float]], key: str) -> Row:
    own = f"{points[0][key]:.1f} to {points[-1][key]:.1f} us"
    peer = "peer_us"
    if peer not in points[0]:
        return bar, what, own, "no exllamav3 here"
    ratios = [p[peer] / p[key] for p in points]
    middle, least = statistics.median(ratios), min(ratios)
    met = (
        "missed"
        if middle < 1 or least < 0.97
        else "moonshot"
        if middle >= 1.5
        else "second"
        if middle >= 1.2
        else "first"
    )
    return bar, what, f"{own}; median {middle:.2f}x, least {least:.2f}x exllamav3", met


def formatted(rows: list[Row]) -> str:
    """The rows as aligned text."""
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def plot(results: dict[str, Any], path: Path) -> bool:
    """Roofline: TFLOP/s of the fused dense path over operations per byte of trellis. False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 5))
    axes = figure.subplots()
    ceiling = results["ceilings"]
    intensity = [2.0**i for i in range(14)]
    axes.loglog(
        intensity, [min(ceiling["mm_tflops"], i * ceiling["copy_tbs"]) for i in intensity], "k-", label="this GPU"
    )
    for shape in DENSE:
        k, n, rate2 = shape
        points = [r for bar in ("K4", "K5", "K6") for r in results.get(bar, {}).get(_name(shape), [])]
        x = [2 * r["rows"] / (rate2 / 16) for r in points]
        y = [2 * r["rows"] * k * n / r["fused_us"] / 1e6 for r in points]
        axes.loglog(x, y, "o", markersize=3, label=_name(shape))
    axes.set_xlabel("operations per byte of trellis")
    axes.set_ylabel("TFLOP/s")
    axes.legend()
    figure.savefig(path, dpi=120)
    return True


def measured_table(b: Bench) -> plans.Table:
    """The built-in table with this GPU's own crossover: the smallest over the three dense layers."""
    return replace(b.table, fused_rows=min(bench_cases.crossover(b, shape) for shape in DENSE))


def write_table(table: plans.Table, gpu: plans.Gpu, path: Path) -> None:
    path.write_text(json.dumps({"capability": gpu.capability, "sms": gpu.sms, "table": asdict(table)}, indent=1) + "\n")


def about(b: Bench) -> dict[str, Any]:
    """What the figures belong to."""
    return {
        "gpu": torch.cuda.get_device_name(b.device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "exllamav3": b.peer is not None,
        "table": asdict(b.table),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m exl3_vllm.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for bench.json, bench.txt and roofline.png")
    parser.add_argument("--library", type=Path, default=kernels.LIBRARY)
    parser.add_argument("--only", default="", help="bars, comma-separated")
    parser.add_argument("--write-table", type=Path, help="store this GPU's choices")
    parser.add_argument("--slow-tensor", action="store_true", help="K9 with a library built with EXL3_MMA_REPEAT=3")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench: no GPU on this machine; run it where `nvidia-smi` shows one", file=sys.stderr)
        return 3
    kernels.load(options.library.resolve())
    torch.manual_seed(0)
    device = torch.device("cuda", torch.cuda.current_device())
    b = Bench(device, plans.table_for(kernels.gpu_of(device)), bench_peers.exllamav3())
    options.out.mkdir(parents=True, exist_ok=True)
    if options.slow_tensor:
        results: dict[str, Any] = {"K9": bench_cases.slow_tensor(b)}
    else:
        results = measure(b, set(filter(None, options.only.split(","))), lambda line: print(line, file=sys.stderr))
    text = formatted(verdicts(results))
    (options.out / "bench.json").write_text(json.dumps({"about": about(b), "results": results}, indent=1) + "\n")
    (options.out / "bench.txt").write_text(text + "\n")
    print(text)
    if "ceilings" in results and not plot(results, options.out / "roofline.png"):
        print("bench: no roofline.png, matplotlib is not installed", file=sys.stderr)
    if options.write_table:
        write_table(measured_table(b), kernels.gpu_of(device), options.write_table)
    wrong = (
        results.get("K8") is False
        or results.get("K7", {}).get("dense", 0) > 6e-4
        or results.get("K7", {}).get("moe", 0) > 8e-4
    )
    return INVALID if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
