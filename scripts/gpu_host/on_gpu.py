"""A real vLLM engine in this process on a GPU, and the ways into it that the jobs share."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

WORK = Path(os.environ.get("GPU_WORK", "/tmp/exl3-gpu"))
OUT = Path(os.environ.get("OUT", "out"))
STARTED = time.monotonic()


def say(record: Mapping[str, Any], label: str) -> None:
    """Keep a job's record, each time anew: what a later failure cuts off is not lost."""
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / f"{label}.json").write_text(json.dumps(record, indent=1) + "\n")


def settings(**changes: Any) -> dict[str, Any]:
    """What all engines have in common; `eager` and `sizes` stand for their longer forms."""
    eager, sizes = changes.pop("eager", False), changes.pop("sizes", [1, 2, 4, 8, 16, 32])
    chosen: dict[str, Any] = {
        "max_model_len": 9216,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 64,
        "enforce_eager": eager,
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": 2 << 30,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "disable_custom_all_reduce": True,
        "seed": 0,
    }
    if not eager:
        chosen["compilation_config"] = {"cudagraph_capture_sizes": sizes, **changes.pop("compilation", {})}
    changes.pop("compilation", None)
    return {**chosen, **changes}


def open_engine(model: Path, **changes: Any) -> Any:
    from vllm import LLM

    wait_for(model)
    return LLM(model=str(model), **settings(**changes))


def runner_of(llm: Any) -> Any:
    """The model runner of an engine in this process."""
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    return executor.driver_worker.worker.model_runner


def loading_of(llm: Any) -> Any:
    """The plugin's account of the model's loading, from any of its layers."""
    for module in runner_of(llm).model.modules():
        found = getattr(getattr(module, "quant_method", None), "loading", None)
        if found is not None:
            return found
    raise RuntimeError("no layer of this model is EXL3")


def sampling(tokens: int, **changes: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        **{"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "detokenize": False, **changes}
    )


def generate(llm: Any, prompts: list[list[int]], tokens: int, **changes: Any) -> Any:
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling(tokens, **changes), use_tqdm=False)


@contextmanager
def alone(label: str) -> Iterator[None]:
    """Wait until every job of the group has started or ended (GPU_BARRIER, GPU_WAIT_FOR), then hold the GPU against the
    others. Each leaves a file; `run.py` leaves it for a job that has ended."""
    group = os.environ.get("GPU_BARRIER") or "alone"
    folder, wanted = WORK / "barrier" / group, int(os.environ.get("GPU_WAIT_FOR", "0"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / label).touch()
    limit = time.monotonic() + 150
    while len(list(folder.iterdir())) < wanted and time.monotonic() < limit:
        time.sleep(0.2)
    with (WORK / f"{group}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def wait_for(model: Path, seconds: float = 120) -> None:
    """Until the checkpoint is complete: it may still be written."""
    limit = time.monotonic() + seconds
    while not (model / "config.json").is_file() and time.monotonic() < limit:
        time.sleep(0.2)
