"""Arguments of `vllm serve` that a recipe may not pass on: those that it has a key for, and those that the kit sets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from exl3kit.faults import Fault, printable

# vLLM's arguments that a recipe has a key for: two sources for one value would drift apart.
KEYS = {
    "--api-key": "serve.api_key_file",
    "--device-memory-utilization": "serve.gpu_memory_utilization",  # vLLM's second name for it
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
    "--spec-method": "serve.speculative",
    "--spec-model": "serve.speculative",
    "--spec-tokens": "serve.speculative",
    "--speculative-config": "serve.speculative",
    "--tensor-parallel-size": "parallel.tensor",
}
_PLACE = "the kit gives each rank its place"
_PROBE = "the kit probes the API over plain HTTP"
_QUANTISED = "the checkpoint says how it is quantised; exl3.tier: none is the unquantised control arm"
_ENDS = "vLLM prints it and ends, and nothing would serve"
# And those that the kit sets itself or cannot work with, each with the reason.
REASONS = {
    "--": "the kit's own arguments come after these, and would no longer be read as options",
    "--api-server-count": "the gang's liveness reads the counters of one API server; a second would hide a stall",
    "--config": "a second file of settings would escape every check of this one",
    "--data-parallel-size": "the kit starts one gang per recipe",
    "--disable-access-log-for-endpoints": "the kit sets it, so that its own questions stay out of the log",
    "--disable-log-stats": "the gang's liveness reads these counters: without them a stall would never be seen",
    "--distributed-executor-backend": "the kit chooses how ranks start",
    "--enable-prompt-tokens-details": "the kit sets it, and counts cached tokens by it",
    "--grpc": _PROBE,
    "--headless": _PLACE,
    "--help": _ENDS,
    "--hf-token": "a secret in a recipe ends up in git, logs and images; the weights are fetched before vLLM starts",
    "--master-addr": _PLACE,
    "--master-port": _PLACE,
    "--nnodes": "parallel.nodes says it",
    "--node-rank": _PLACE,
    "--prefill-context-parallel-size": "it multiplies the ranks, and the kit starts tensor x pipeline of them",
    "--quantization": _QUANTISED,
    "--quantization-config": _QUANTISED,
    "--shutdown-timeout": "requests in flight are answered before vLLM is told to stop; they have 20 s",
    "--skip-tokenizer-init": "the kit's probe is text, and needs the tokenizer",
    "--ssl-certfile": _PROBE + "; put a proxy in front of it",
    "--ssl-keyfile": _PROBE + "; put a proxy in front of it",
    "--uds": "the kit probes the API on serve.port",
    "--version": _ENDS,
}
SHORT = {
    "-dp": "--data-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-h": "--help",
    "-n": "--nnodes",
    "-pcp": "--prefill-context-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-q": "--quantization",
    "-r": "--node-rank",
    "-sc": "--speculative-config",
    "-tp": "--tensor-parallel-size",
}
_OWNED = {**KEYS, **REASONS}
_TWO_IN_ONE = re.compile(r"(--?[A-Za-z][\w.-]*)\s+(.*)", re.DOTALL)


def faults(arguments: Sequence[str]) -> Iterator[Fault]:
    """What is wrong with `serve.args`, each fault with the argument's position as path."""
    for position, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        full = owner(option)
        both = _TWO_IN_ONE.fullmatch(argument)
        if position == 0 and not argument.startswith("-"):
            what = f'expected an option first, found "{printable(argument, 40)}"'
            yield Fault((position,), what, "an option begins with --, and its value is an entry of its own")
        elif both is not None:
            hint = f"write two entries: {both[1]}, {printable(both[2].strip(), 40)}"
            yield Fault((position,), "option and value stand in one entry, and vLLM would not find the option", hint)
        elif full is not None:
            plain = option in SHORT or option.replace("_", "-") == full
            what = f"{option} is not for args" if plain else f"vLLM reads {option} as {full}, which is not for args"
            hint = f"set {KEYS[full]} and remove it here" if full in KEYS else REASONS[full]
            yield Fault((position,), what, hint)
        elif option.replace("_", "-") == "--load-format":
            given = value if equals else "".join(arguments[position + 1 : position + 2])
            if given == "dummy":
                yield Fault((position,), "--load-format dummy serves random weights", "remove it")


def owner(option: str) -> str | None:
    """The option of the kit's that vLLM would read `option` as, None when it is the recipe's own business.

    vLLM reads `--a_b`, `--no-a-b`, `--a-b.key`, `-a` with its value behind it, and any unique beginning alike.
    """
    if not option.startswith("--"):
        return _short(option)
    flag = option.split(".", 1)[0].replace("_", "-")
    flag = "--" + flag[5:] if flag.startswith("--no-") else flag
    if flag in _OWNED:
        return flag
    if flag.startswith("--data-parallel"):  # -rank, -address and so on are for gangs that the kit does not start
        return "--data-parallel-size"
    # A single letter fits several of vLLM's own arguments, and it refuses that itself; `--ho` is unique.
    begun = [full for full in _OWNED if full.startswith(flag)] if len(flag) >= len("--ho") else []
    return begun[0] if len(begun) == 1 else None


def _short(option: str) -> str | None:
    word = option.split(".", 1)[0]
    if word.startswith("-dp"):
        return "--data-parallel-size"
    if word[:2] in SHORT:  # -n2, -r1
        return SHORT[word[:2]]
    begun = [full for short, full in SHORT.items() if len(word) > 1 and short.startswith(word)]
    return begun[0] if len(begun) == 1 else None
