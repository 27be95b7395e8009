"""Times one model in one engine: prefill of each arm, decode, memory; where asked, where the time goes.

`python arms.py MODEL LABEL [--dummy] [--eager] [--arms A,B,...] [--profile] [--tp N]`

Arms are switched inside the engine: what they change (the plan of the experts, the table of dense layers) is read at
every call of a layer, as it must be. `grouped`, `legacy`, ...: tier of the experts. `off`, `on`: dispatch of dense
layers by rows. An arm's counters prove that it ran. Every figure is a median; engines take turns on the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from on_gpu import STARTED, WORK, alone, generate, loading_of, open_engine, say, wait_for

PREFILL = ((1, 512), (1, 2048), (4, 2048), (1, 8192))
DECODE = (1, 8, 32)
DECODED = 128


class Timer:
    """Requests of random tokens, and how long they take."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.random = random.Random(1)

    def prompts(self, count: int, length: int) -> list[list[int]]:
        return [[self.random.randrange(1000, 150000) for _ in range(length)] for _ in range(count)]

    def once(self, prompts: list[list[int]], tokens: int) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        generate(self.llm, prompts, tokens)
        torch.cuda.synchronize()
        return time.perf_counter() - started

    def prefill(self, count: int, length: int, repeats: int) -> float:
        """ms until the first token of all prompts; the same ones for every arm."""
        self.random.seed(count * length)
        return 1e3 * statistics.median(self.once(self.prompts(count, length), 1) for _ in range(repeats))

    def decode(self, batch: int, repeats: int) -> float:
        """ms per step: a long generation less a short one of the same prompts."""
        self.random.seed(batch)  # the same prompts for every arm: where they go decides how many experts have rows
        prompts = self.prompts(batch, 128)
        self.once(prompts, 4)
        found = [self.once(prompts, DECODED + 1) - self.once(prompts, 1) for _ in range(repeats)]
        return 1e3 * statistics.median(found) / DECODED


def choose(arm: str, llm: Any) -> None:
    """Make the engine run this arm from its next step on."""
    from exl3_vllm.experts import Plan
    from exl3_vllm.gpu_dense import DISPATCH, NEVER
    from exl3_vllm.kernels import gpu_of
    from exl3_vllm.plans import table_for
    from exl3_vllm.tiers import Resolution

    table = table_for(gpu_of(torch.device("cuda", 0)))
    if arm in ("on", "off"):
        DISPATCH.table = table if arm == "on" else replace(table, fused_rows=NEVER)
        return
    loading = loading_of(llm)
    plan = Plan(Resolution(arm, arm, f"{arm}_ok"), loading.plan.cap, 0)
    if arm not in ("grouped",):
        loading.packed_experts[0].loops.reserve()
    loading.plan = plan


def measure(llm: Any, options: argparse.Namespace, record: dict[str, Any]) -> None:
    from exl3_vllm import diagnostics

    timer, arms = Timer(llm), options.arms.split(",")
    timer.once(timer.prompts(1, 8192), 1)
    record["arms"] = {}
    for arm in arms:
        if arm != "plain":
            choose(arm, llm)
        diagnostics.reset_exl3_fat_diag_counters()
        found: dict[str, Any] = {}
        timer.once(timer.prompts(1, 2048), 1)
        for count, length in PREFILL:
            repeats = options.repeats if arm in (arms[0], arms[-1]) else 2
            found[f"prefill_{count}x{length}_ms"] = round(timer.prefill(count, length, repeats), 2)
        receipt = diagnostics.exl3_fat_diag()
        for batch in DECODE if arm in (arms[0], arms[-1]) else ():
            found[f"decode_{batch}_ms"] = round(timer.decode(batch, 2), 3)
        counted = ("prefill_layer_calls", "fallback_calls", "rows_handled", "rows_expected", "direct_calls", "max_rows")
        found["counted"] = {key: receipt[key] for key in counted}
        record["arms"][arm] = found
        say(record, options.label)
        print("RESULT", options.label, arm, {k: v for k, v in found.items() if k.endswith("_ms")}, flush=True)


def attribute(llm: Any, options: argparse.Namespace, record: dict[str, Any]) -> None:
    """Where the time of the chosen arms goes; after all timing, as each takes seconds on the host."""
    timer = Timer(llm)
    for arm in filter(None, options.profile.split(",")):
        if arm != "plain":
            choose(arm, llm)
        found = record["arms"][arm]["profile"] = {}
        for length in (2048, 8192):
            found[f"prefill_1x{length}"] = profile(timer, 1, length, 1)
            say(record, options.label)
    for batch in (1, 8) if options.profile else ():
        found[f"decode_{batch}"] = profile(timer, batch, 128, 25)
        say(record, options.label)


KINDS = (
    ("exl3 products", ("trellis_gemm",)),
    ("exl3 reconstruct", ("reconstruct",)),
    ("Triton fused_moe", ("fused_moe",)),
    ("exl3 rotations, sums, routing", ("exl3::",)),
    ("attention", ("flash", "attention", "fmha", "reshape_and_cache", "prepare_varlen")),
    ("cuBLAS", ("nvjet", "cutlass", "gemm", "cublas", "splitK")),
    ("NCCL", ("nccl",)),
)


def kind_of(kernel: str) -> str:
    return next((kind for kind, words in KINDS if any(word in kernel for word in words)), "other")


def profile(timer: Timer, count: int, length: int, tokens: int) -> dict[str, Any]:
    """us of GPU time by kind of kernel, the host's gaps, and the largest kernels by name."""
    prompts = timer.prompts(count, length)
    timer.once(prompts, tokens)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        wall = timer.once(prompts, tokens)
    by_name: Counter[str] = Counter()
    spans = []
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            by_name[event.name] += event.time_range.elapsed_us()
            spans.append((event.time_range.start, event.time_range.end))
    by_kind: Counter[str] = Counter()
    for name, spent in by_name.items():
        by_kind[kind_of(name)] += spent
    return {
        "wall_us": round(wall * 1e6),
        "busy_us": round(covered(spans)),
        "kinds_us": {kind: round(spent) for kind, spent in by_kind.most_common()},
        "largest_us": {name[:90]: round(spent) for name, spent in by_name.most_common(14)},
    }


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of time spans: kernels that run side by side count once."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("label")
    parser.add_argument("--dummy", action="store_true", help="unquantised dummy weights: the control")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--arms", default="plain")
    parser.add_argument("--profile", default="", metavar="ARM,...", help="also say where the time of these goes")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--backend", default="FLASH_ATTN")
    options = parser.parse_args()
    record: dict[str, Any] = {"label": options.label, "model": options.model.name, "eager": options.eager}
    changes: dict[str, Any] = {
        "eager": options.eager,
        "tensor_parallel_size": options.tp,
        "attention_backend": options.backend,
    }
    if options.dummy:
        changes["load_format"] = "dummy"
    folder = WORK / f"receipts-{options.label}"
    os.environ["EXL3_RECEIPT_DIR"] = str(folder)
    from vllm import LLM  # noqa: F401  (the slow import: before the start's clock, while the checkpoint is written)

    wait_for(options.model)
    imported = time.monotonic() - STARTED
    started = time.monotonic()
    llm = open_engine(options.model, dtype="bfloat16", **changes)
    record |= {"import_s": round(imported, 1), "start_s": round(time.monotonic() - started, 1)}
    record["allocated_gib"] = round(torch.cuda.memory_allocated() / 2**30, 2)
    record["reserved_gib"] = round(torch.cuda.memory_reserved() / 2**30, 2)
    if not options.dummy:
        from exl3_vllm import diagnostics, gpu_dense

        record["receipt"], record["table"] = diagnostics.exl3_fat_diag(), gpu_dense.DISPATCH.source
    say(record, options.label)
    with alone(options.label):
        measure(llm, options, record)
    with alone(options.label):
        attribute(llm, options, record)
    record["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    if options.tp > 1 and not options.dummy:
        time.sleep(6)  # receipts are written every 5 s
        record["receipts"] = [json.loads(file.read_text()) for file in sorted(folder.glob("rank*.json"))]
    record["total_s"] = round(time.monotonic() - STARTED, 1)
    say(record, options.label)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
