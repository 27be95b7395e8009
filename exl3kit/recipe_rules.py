"""Rules of a recipe that a type cannot say: keys that exclude each other, arguments and environment names that the kit owns.

Pure functions of plain values; each returns faults with a path below the section that it was asked about.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pydantic_core import PydanticCustomError

from exl3kit.faults import Fault, did_you_mean

def model_faults(repo: str | None, revision: str | None, path: Path | None) -> list[Fault]:
    if repo is None and path is None:
        return [Fault((), "expected either repo and revision, or path", "name the weights")]
    if repo is not None and path is not None:
        return [Fault(("path",), "both repo and path are given", "keep one of them")]
    if repo is not None and revision is None:
        return [Fault(("repo",), "repo is given without revision", "add revision: the 40 hex digits of a commit")]
    if path is not None and revision is not None:
        return [Fault(("revision",), "revision belongs to repo, and this model is a path", "remove it")]
    return []


def image_faults(
    on_cpu: bool, arch: Sequence[str], rates: Sequence[float], codebooks: Sequence[str], rootfs: bool
) -> list[Fault]:
    if on_cpu and arch:
        return [Fault(("arch",), "a +cpu image compiles no GPU code", "write arch: []")]
    faults = []
    for key, values in (("rates", rates), ("codebooks", codebooks)):
        if arch and not values:
            faults.append(Fault((), f"arch is given without {key}", f"add {key}: what the checkpoint uses"))
        if values and not arch:
            faults.append(Fault((key,), f"{key} are compiled in only for an arch", f"add arch, or remove {key}"))
    return faults


def parallel_faults(nodes: int, tensor: int, pipeline: int, expert: bool) -> list[Fault]:
    faults = []
    if (tensor * pipeline) % nodes:
        ranks = f"tensor {tensor} x pipeline {pipeline} = {tensor * pipeline} ranks"
        faults.append(Fault(("nodes",), f"{ranks} do not divide over {nodes} nodes", "make them a multiple of nodes"))
    if expert and tensor == 1:
        faults.append(Fault(("expert",), "expert spreads experts over the tensor ranks, and there is one rank", "remove it"))
    return faults


def serve_faults(
    listen: str, key_file: Path | None, batched: int | None, sequences: int | None, length: int | None
) -> list[Fault]:
    faults = []
    if listen == "open" and key_file is None:
        faults.append(Fault(("listen",), "an open API needs a key", "set api_key_file, or listen: loopback"))
    if batched is not None and sequences is not None and batched < sequences:
        what = f"max_num_batched_tokens {batched} is less than max_num_seqs {sequences}"
        faults.append(Fault(("max_num_batched_tokens",), what, "each running request needs a token per step"))
    return faults


def memory_faults(share: float | None, size: int | None) -> list[Fault]:
    if share is not None and size is not None:
        what = "kv_cache_memory replaces gpu_memory_utilization, and both are given"
        return [Fault(("kv_cache_memory",), what, "remove one, or set it to null")]
    return []


def check_argument(argument: str) -> str:
    return argument


def environment_faults(env: Mapping[str, str]) -> list[Fault]:
    return []


def recipe_faults(
    *,
    on_cpu: bool,
    require: str,
    nodes: int,
    compiled: bool,
    tier: str,
    prefill_reconstruct_m: int | str,
    graph_decode: bool,
    env: Mapping[str, str],
) -> list[Fault]:
    return []
