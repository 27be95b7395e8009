"""Tensors that upstream's own converter made, and the outputs that upstream computed from them.

EXL3_FIXTURES names the folder with singles_refs.json (default: tests/fixtures).
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference as ref
import torch
from conftest import INSTANCES
from exl3_vllm import kernels
from safetensors.torch import load_file

FOLDER = Path(os.environ.get("EXL3_FIXTURES", Path(__file__).parents[1] / "fixtures"))
PRESENT = (FOLDER / "singles_refs.json").is_file()
REFS: dict[str, Any] = (
    json.loads((FOLDER / "singles_refs.json").read_text()) if PRESENT else {"inner": {}, "forward": {}}
)
pytestmark = pytest.mark.skipif(not PRESENT, reason="no fixtures; set EXL3_FIXTURES")


def matrix_of(name: str) -> kernels.Matrix:
    codebook = name.split(".k")[0]
    tensors = load_file(FOLDER / f"single_{codebook}.safetensors", device=ref.DEVICE)
    trellis, suh, svh = (tensors[f"{name}.{part}"] for part in ("trellis", "suh", "svh"))
    m = kernels.Matrix(trellis, suh, svh, codebook, svh.numel())
    if (m.code & 31, m.code >> 5) not in INSTANCES:
        pytest.skip(f"the library has no {name}")
    return m


@pytest.mark.parametrize("name", sorted(REFS["inner"]))
def test_decodes_to_the_bytes_that_upstream_decoded(name: str) -> None:
    got = kernels.reconstruct(matrix_of(name), original_basis=False)
    assert hashlib.sha256(got.cpu().numpy().tobytes()).hexdigest() == REFS["inner"][name]["inner_sha256"]


@pytest.mark.parametrize("key", sorted(REFS["forward"]))
def test_forward_agrees_with_upstream(key: str) -> None:
    name, rows, kind = key.split("|")
    m = matrix_of(name)
    count = int(rows[1:])
    x = np.random.RandomState(70000 + count).standard_normal((count, m.suh.numel())).astype(np.float16)
    dtype = torch.float16 if kind == "half" else torch.float32
    got = kernels.linear(torch.from_numpy(x).to(ref.DEVICE), [m], out_dtype=dtype)
    want = torch.from_numpy(np.load(FOLDER / "singles_refs.npz")[f"y|{key}"]).to(ref.DEVICE)
    kept = REFS["forward"][key]["rows"]
    assert ref.error(got[kept], want) < 1.5e-3  # upstream's own error against fp64 is 0.4e-3 to 1.06e-3
