"""Tests that need a GPU: the real library against fp64 products of weights from the independent decoder.

EXL3_LIBRARY names the library (default: beside exl3_vllm). Rates and codebooks that it lacks are skipped, not passed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parents[2] / "overlay"), str(Path(__file__).parent)]

from exl3_vllm import kernels  # noqa: E402

INSTANCES: tuple[tuple[int, int], ...] = ()
if torch.cuda.is_available():
    INSTANCES = kernels.load(Path(os.environ.get("EXL3_LIBRARY", kernels.LIBRARY)).resolve())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="no GPU"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``instance``: every (rate2, codebook) that the library holds."""
    own = any("instance" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "instance" in metafunc.fixturenames and not own:
        metafunc.parametrize(
            "instance", INSTANCES, ids=[f"{r / 2:g}bit-{('3inst', 'mcg', 'mul1')[c]}" for r, c in INSTANCES]
        )


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(1)
