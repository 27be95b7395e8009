"""Rules of a recipe that a type cannot say: keys that exclude each other, arguments and environment that the kit owns.

Pure functions of plain values; each returns faults with a path below the section that it was asked about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic_core import PydanticCustomError

from exl3kit.faults import Fault, did_you_mean

# vLLM's arguments that a recipe has a key for, or that differ per rank: two sources for one value would drift apart.
FLAGS = {
    "--api-key": "serve.api_key_file",
    "--dtype": "serve.dtype",
    "--enable-expert-parallel": "parallel.expert",
    "--enforce-eager": "serve.enforce_eager",
    "--gpu-memory-utilization": "serve.gpu_memory_utilization",
    "--host": "serve.listen",
    "--kv-cache-dtype": "serve.kv_cache_dtype",
    "--kv-cache-memory-bytes": "serve.kv_cache_memory",
    "--max-model-len": "serve.max_model_len",
    "--max-num-batched-tokens": "serve.max_num_batched_tokens",
    "--max-num-seqs": "serve.max_num_seqs",
    "--model": "model.repo or model.path",
    "--pipeline-parallel-size": "parallel.pipeline",
    "--port": "serve.port",
    "--revision": "model.revision",
    "--served-model-name": "model.served_name",
    "--speculative-config": "serve.speculative",
    "--tensor-parallel-size": "parallel.tensor",
}
PER_RANK_FLAGS = {
    "--": "the kit's own arguments come after these, and would no longer be read as options",
    "--data-parallel-size": "the kit starts one gang per recipe",
    "--distributed-executor-backend": "the kit chooses how ranks start",
    "--headless": "the kit gives each rank its place",
    "--master-addr": "the kit gives each rank its place",
    "--master-port": "the kit gives each rank its place",
    "--nnodes": "parallel.nodes says it",
    "--node-rank": "the kit gives each rank its place",
    "--config": "a second file of settings would escape every check of this one",
    "--ssl-certfile": "the kit probes the API over plain HTTP; put a proxy in front of it",
    "--ssl-keyfile": "the kit probes the API over plain HTTP; put a proxy in front of it",
    "--uds": "the kit probes the API on serve.port",
    "--quantization": "the checkpoint says how it is quantised; exl3.tier: none is the unquantised control arm",
}
SHORT_FLAGS = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-dp": "--data-parallel-size",
    "-n": "--nnodes",
    "-r": "--node-rank",
    "-q": "--quantization",
    "-sc": "--speculative-config",
}

# Names that the kit fills in per rank, or that must not stand in a file that people share.
_FROM_FABRIC = "the kit reads it from each node's network; nodes differ"
_PER_RANK = "the kit sets it for each rank"
_SECRET = "a secret in a recipe ends up in git, logs and images"
_IMAGE = "it belongs to the image, and changing it hides the image's own files"
ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": _FROM_FABRIC,
    "NCCL_IB_GID_INDEX": _FROM_FABRIC,
    "NCCL_IB_HCA": _FROM_FABRIC,
    "NCCL_SOCKET_IFNAME": _FROM_FABRIC,
    "LOCAL_RANK": _PER_RANK,
    "MASTER_ADDR": _PER_RANK,
    "MASTER_PORT": _PER_RANK,
    "RANK": _PER_RANK,
    "VLLM_HOST_IP": _PER_RANK,
    "WORLD_SIZE": _PER_RANK,
    "HF_TOKEN": _SECRET + "; log in on the machine that fetches the weights",
    "HUGGING_FACE_HUB_TOKEN": _SECRET + "; log in on the machine that fetches the weights",
    "VLLM_API_KEY": _SECRET + "; set serve.api_key_file",
    "LD_LIBRARY_PATH": _IMAGE,
    "LD_PRELOAD": _IMAGE,
    "PATH": _IMAGE,
    "PYTHONPATH": _IMAGE,
    "VLLM_PLUGINS": "a list without exl3 would serve the weights as another quantisation",
    "VLLM_EXL3_EXT_PATH": "no foreign extension is loaded: the kernels come with the image",
}
EXL3_FLAGS = ("EXL3_FAT_SORTED", "EXL3_FAT_BATCHED", "EXL3_FAT_KERNEL", "EXL3_FAT_GROUPED", "VLLM_EXL3_GRAPH_DECODE")
EXL3_NUMBERS = ("EXL3_MOE_ROW_TILE", "EXL3_TEMP_ROWS_FUSED", "VLLM_EXL3_PREFILL_RECONSTRUCT_M")
_FLAG_VALUES = ("0", "1", "true", "false")


def model_faults(repo: str | None, revision: str | None, path: Path | None) -> list[Fault]:
    """Exactly one of repo (with its commit) and path."""
    if repo is None and path is None:
        return [Fault((), "expected either repo and revision, or path", "name the weights")]
    if repo is not None and path is not None:
        return [Fault(("path",), "both repo and path are given", "keep one of them")]
    if repo is not None and revision is None:
        return [Fault(("repo",), "repo is given without revision", "add revision: the 40 hex digits of a commit")]
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


def check_argument(argument: str) -> str:
    """An argument of `vllm serve`, refused when the recipe has a key for it or the kit sets it.

    vLLM reads `--a-b=v`, `--a_b`, `--no-a-b`, `--a-b.key` and any unique beginning alike, and so does this.
    """
    word = argument.split("=", 1)[0].split(".", 1)[0]
    flag = SHORT_FLAGS.get(word, word.replace("_", "-"))
    flag = "--" + flag[5:] if flag.startswith("--no-") else flag
    owned = {**FLAGS, **PER_RANK_FLAGS}
    # Beginnings shorter than three letters fit several of vLLM's own arguments, and it refuses them itself.
    begun = [full for full in owned if full.startswith(flag)] if len(flag) >= len("--por") else []
    if flag.startswith("--data-parallel"):  # -rank, -address and so on are for gangs that the kit does not start
        flag = "--data-parallel-size"
    full = flag if flag in owned else begun[0] if len(begun) == 1 else None
    if full is None:
        return argument
    hint = f"set {FLAGS[full]} and remove it here" if full in FLAGS else PER_RANK_FLAGS[full]
    raise PydanticCustomError("refused", "{what}", {"what": f"{word} is not for args", "hint": hint})


def environment_faults(env: Mapping[str, str]) -> list[Fault]:
    """Names that a process can have, that the kit does not own, and strict values for the names that we read."""
    faults = []
    for name, value in env.items():
        if not (name.isascii() and name.isidentifier()):
            faults.append(Fault((name,), "expected a name of letters, digits and '_'", "no process can read this name"))
        elif "\n" in value or "\r" in value:
            faults.append(Fault((name,), "expected a value of one line", "the engine's env files cannot carry more"))
        elif name in ENVIRONMENT:
            faults.append(Fault((name,), f"{name} is not for a recipe", ENVIRONMENT[name]))
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


def recipe_faults(
    *,
    on_cpu: bool,
    require: str,
    compiled: bool,
    tier: str,
    prefill_reconstruct_m: int | str,
    graph_decode: bool,
    env: Mapping[str, str],
) -> list[Fault]:
    """What two sections say together."""
    faults = []
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
