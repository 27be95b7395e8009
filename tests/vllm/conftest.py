"""vLLM's tests run in the environment of `scripts/vllm-env`, in process: an engine is ready in 3 s after the import."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    raise pytest.UsageError("tests/vllm needs vLLM's environment: $(scripts/vllm-env) -m pytest tests/vllm")

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


def pytest_configure(config: pytest.Config) -> None:
    # Warnings of torch and vLLM about themselves; ours would come from exl3_vllm.
    for module in ("torch", "vllm", "transformers"):
        config.addinivalue_line("filterwarnings", f"ignore:::{module}")


REPO = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="session")
def models() -> Path:
    """The folder of the committed demo models."""
    return REPO / "models"


@pytest.fixture(scope="session")
def upstream() -> Path:
    """The checkpoints made by exllamav3's own converter; they are not part of the repository."""
    folder = Path(os.environ.get("EXL3_FIXTURES") or REPO.parent / "shared" / "fixtures")
    if not (folder / "singles_refs.json").is_file():
        pytest.skip(f"no upstream-made checkpoints in {folder}; name their folder in EXL3_FIXTURES")
    return folder


@pytest.fixture
def engine() -> Callable[..., AbstractContextManager[Any]]:
    return open_engine


@contextmanager
def open_engine(model: Path, dtype: str = "bfloat16", **options: Any) -> Iterator[Any]:
    """A real vLLM engine on the CPU, eager as in the demo recipes."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    settings = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 26, "max_model_len": 256, **options}
    try:
        yield LLM(model=str(model), dtype=dtype, **settings)
    finally:
        cleanup_dist_env_and_memory()
