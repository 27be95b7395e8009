"""vLLM's tests run in the environment of `scripts/vllm-env`."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from engines import REPO, open_engine

if importlib.util.find_spec("vllm") is None:
    raise pytest.UsageError("tests/vllm needs vLLM's environment: $(scripts/vllm-env) -m pytest tests/vllm")


def pytest_configure(config: pytest.Config) -> None:
    # Warnings of torch and vLLM about themselves; ours would come from exl3_vllm.
    for module in ("torch", "vllm", "transformers"):
        config.addinivalue_line("filterwarnings", f"ignore:::{module}")


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
