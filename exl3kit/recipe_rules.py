"""Rules of a recipe that a type cannot say: keys that exclude each other, and environment that the kit owns.

Pure functions of plain values; each returns faults with a path below the section that it was asked about.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from exl3kit.faults import Fault, did_you_mean

# Names that the kit fills in per rank, or that must not stand in a file that people share. What the kit reads from each
# node's network (NCCL_IB_HCA, NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME, ...) is not among them: the recipe's value wins.
_PER_RANK = "the kit sets it for each rank"
_SECRET = "a secret in a recipe ends up in git, logs and images"
_IMAGE = "it belongs to the image, and changing it hides the image's own files"
_ENVIRONMENT = {
    **dict.fromkeys(("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "RANK", "WORLD_SIZE"), _PER_RANK),
    **dict.fromkeys(("MASTER_ADDR", "MASTER_PORT", "VLLM_HOST_IP"), _PER_RANK),
    **dict.fromkeys(("EXL3_API", "EXL3_GENERATION", "EXL3_MODEL_DIR", "EXL3_RANK", "EXL3_RECEIPT_DIR"), _PER_RANK),
    **dict.fromkeys(("EXL3_API_KEY_FILE", "EXL3_RUN_DIR", "EXL3_STAMP"), _PER_RANK),
    "EXL3_KERNEL_TABLE": "set exl3.kernel_table",
    "EXL3_TIER": "set exl3.tier",
    "VLLM_API_KEY": _SECRET + "; set serve.api_key_file",
    **dict.fromkeys(("PATH", "PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP"), _IMAGE),
    "VLLM_PLUGINS": "a list without exl3 would serve the weights as another quantisation",
    "VLLM_EXL3_EXT_PATH": "no foreign extension is loaded: the kernels come with the image",
}
_BEGINNINGS = {
    "LD_": _IMAGE,
    "VLLM_DP_": "the kit starts one gang per recipe",
}
_SECRETS = re.compile(
    r"(.*_)?(TOKEN|SECRET|SECRET_KEY|API_?KEY|ACCESS_KEY|ACCESS_KEY_ID|PASSWORD|PASSWD)", re.IGNORECASE
)
_UPPER_CASE = ("CUDA_", "EXL3_", "GLOO_", "HF_", "NCCL_", "VLLM_")  # whose names exist in upper case only
EXL3_FLAGS = ("EXL3_FAT_SORTED", "EXL3_FAT_BATCHED", "EXL3_FAT_KERNEL", "EXL3_FAT_GROUPED", "VLLM_EXL3_GRAPH_DECODE")
EXL3_NUMBERS = ("EXL3_MOE_ROW_TILE", "EXL3_TEMP_ROWS_FUSED", "VLLM_EXL3_PREFILL_RECONSTRUCT_M")
_FLAG_VALUES = ("0", "1", "true", "false")


def model_faults(repo: str | None, revision: str | None, path: Path | None) -> list[Fault]:
    """Exactly one of repo and path; a repo without its commit can be planned with, and `weights.pinned` refuses it."""
    if repo is None and path is None:
        return [Fault((), "expected either repo and revision, or path", "name the weights")]
    if repo is not None and path is not None:
        return [Fault(("path",), "both repo and path are given", "keep one; null takes back an inherited value")]
    if path is not None and revision is not None:
        return [Fault(("revision",), "revision belongs to repo, and this model is a path", "remove it")]
    return []


def image_faults(on_cpu: bool, arch: Sequence[str], rates: Sequence[float], codebooks: Sequence[str]) -> list[Fault]:
    """arch, rates and codebooks say together what is compiled: all of them or none."""
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
    """Every node runs the same number of ranks."""
    faults = []
    if (tensor * pipeline) % nodes:
        ranks = f"tensor {tensor} x pipeline {pipeline} = {tensor * pipeline} ranks"
        faults.append(Fault(("nodes",), f"{ranks} do not divide over {nodes} nodes", "make them a multiple of nodes"))
    if expert and tensor == 1:
        faults.append(Fault(("expert",), "experts spread over the tensor ranks, and there is one rank", "remove it"))
    return faults


def serve_faults(listen: str, key_file: Path | None, batched: int | None, sequences: int | None) -> list[Fault]:
    """An open API has a key, and a step has room for one token of each running request."""
    faults = []
    if listen == "open" and key_file is None:
        faults.append(Fault(("listen",), "an open API needs a key", "set api_key_file, or listen: loopback"))
    if batched is not None and sequences is not None and batched < sequences:
        what = f"max_num_batched_tokens {batched} is less than max_num_seqs {sequences}"
        faults.append(Fault(("max_num_batched_tokens",), what, "each running request needs a token per step"))
    return faults


def memory_faults(share: float | None, size: int | None) -> list[Fault]:
    """The KV cache is sized one way only: vLLM drops the share without a word when a size is given."""
    if share is not None and size is not None:
        what = "kv_cache_memory replaces gpu_memory_utilization, and both are given"
        return [Fault(("kv_cache_memory",), what, "remove one of them; null takes back an inherited value")]
    return []


def environment_faults(env: Mapping[str, str]) -> list[Fault]:
    """Names that a process can have, that the kit does not own, and strict values for the names that we read."""
    faults = []
    for name, value in env.items():
        if not (name.isascii() and name.isidentifier()):
            faults.append(Fault((name,), "expected a name of letters, digits and '_'", "no process can read this name"))
        elif "\n" in value or "\r" in value:
            faults.append(Fault((name,), "expected a value of one line", "the engine's env files cannot carry more"))
        elif reason := _not_for_a_recipe(name):
            faults.append(Fault((name,), f"{name} is not for a recipe", reason))
        elif name != name.upper() and name.upper().startswith(_UPPER_CASE):
            faults.append(Fault((name,), f"nothing reads {name}", f"did you mean {name.upper()}?"))
        elif name in EXL3_FLAGS and value not in _FLAG_VALUES:
            faults.append(Fault((name,), f'expected 0, 1, true or false, found "{value}"', "anything else is refused"))
        elif name in EXL3_NUMBERS and not (value.isascii() and value.isdigit() and len(value) < 8):
            faults.append(Fault((name,), f'expected a number of rows, found "{value}"', "0 or more, digits only"))
        elif name.startswith(("EXL3_", "VLLM_EXL3_")) and name not in (*EXL3_FLAGS, *EXL3_NUMBERS):
            near = did_you_mean(name, (*EXL3_FLAGS, *EXL3_NUMBERS))
            known = ", ".join((*EXL3_FLAGS, *EXL3_NUMBERS))
            faults.append(
                Fault((name,), f"unknown setting {name}", f"did you mean {near}?" if near else f"known: {known}")
            )
    return faults


def is_secret(name: str) -> bool:
    """Whether a variable of this name holds what nobody else should read."""
    return _SECRETS.fullmatch(name) is not None


def _not_for_a_recipe(name: str) -> str | None:
    """Why this name may not stand in `serve.env`, or None."""
    if name in _ENVIRONMENT:
        return _ENVIRONMENT[name]
    if is_secret(name):
        return _SECRET + "; weights are fetched before the ranks start, and these need no log-in"
    return next((reason for beginning, reason in _BEGINNINGS.items() if name.startswith(beginning)), None)


def recipe_faults(
    *,
    on_cpu: bool,
    require: str,
    compiled: bool,
    tier: str,
    prefill_reconstruct_m: int | str,
    graph_decode: bool,
    kernel_table: bool,
    eager: bool,
    max_model_len: int | None,
    answer: int,
    env: Mapping[str, str],
) -> list[Fault]:
    """What two sections say together; `answer` is the probe's number of tokens."""
    faults = []
    if graph_decode and (eager or on_cpu):
        why = "serve.enforce_eager turns them off" if eager else "a +cpu image has none"
        faults.append(Fault(("exl3", "graph_decode"), f"decode is captured in CUDA graphs, and {why}", "remove it"))
    if kernel_table and (on_cpu or tier == "none"):
        why = "a +cpu image has none" if on_cpu else "exl3.tier none runs none"
        faults.append(Fault(("exl3", "kernel_table"), f"it is for the EXL3 kernels, and {why}", "remove it"))
    if max_model_len is not None and answer >= max_model_len:
        what = f"{answer} tokens and the prompt do not fit into serve.max_model_len {max_model_len}"
        faults.append(Fault(("probe", "max_tokens"), what, "ask for fewer"))
    if on_cpu and require == "rdma":
        faults.append(Fault(("fabric", "require"), "a +cpu image talks over TCP only", "write require: any"))
    if tier in ("kernel", "grouped") and not (compiled or on_cpu):
        what = f"tier {tier} needs the fat symbols, and image.arch compiles none"
        faults.append(Fault(("exl3", "tier"), what, "add image.arch, image.rates and image.codebooks"))
    named = {
        "VLLM_EXL3_PREFILL_RECONSTRUCT_M": prefill_reconstruct_m != "auto" and "exl3.prefill_reconstruct_m",
        "VLLM_EXL3_GRAPH_DECODE": graph_decode and "exl3.graph_decode",
        **{name: tier != "auto" and "exl3.tier" for name in EXL3_FLAGS if name.startswith("EXL3_FAT_")},
    }
    for name in env:
        if named.get(name):
            faults.append(Fault(("serve", "env", name), f"{name} and {named[name]} say the same thing", "remove one"))
    return faults
