"""Real vLLM engines on the CPU, in this process: ready in 3 s once vLLM is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

KV_MEMORY = 64 << 20  # bytes, as in the demo recipes
REPO = Path(__file__).resolve().parent.parent.parent

# Set before vLLM is imported: one process, one thread (two would wait for each other on two busy cores), no network,
# no compiler (the image has none either).
os.environ.update(
    OMP_NUM_THREADS="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="ERROR",
    TORCH_COMPILE_DISABLE="1",
)


@contextmanager
def open_engine(model: Path, dtype: str = "bfloat16", **options: Any) -> Iterator[Any]:
    """A real vLLM engine on the CPU, eager as in the demo recipes."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    settings = {"enforce_eager": True, "kv_cache_memory_bytes": KV_MEMORY, "max_model_len": 256, **options}
    llm = None
    try:
        llm = LLM(model=str(model), dtype=dtype, **settings)
        yield llm
    finally:
        if llm is not None:
            # Now, and not when the engine is collected: by then the next one may be up, and lose its process groups.
            llm.llm_engine.engine_core._finalizer()
        cleanup_dist_env_and_memory()


def held_bytes(llm: Any) -> int:
    """Bytes of the parameters of a model, each piece of memory once; not of tables that vLLM computes (rotary)."""
    return sum(llm.apply_model(_parameter_bytes))


def _parameter_bytes(model: Any) -> int:
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in model.parameters()}
    return sum(storage.nbytes() for storage in storages.values())


def kv_tokens(llm: Any) -> int:
    """Tokens that the KV cache holds, as vLLM's log tells them at the start."""
    cache = llm.llm_engine.vllm_config.cache_config
    return int(cache.num_gpu_blocks * cache.block_size)
