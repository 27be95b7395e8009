"""The choice by rows is made inside the operator: under torch.compile, in captured graphs, and in a real engine.

The trap: a branch on the rows in Python is resolved once, when vLLM traces the model with the rows of its profile run
and drops the guards. Decode graphs then hold reconstruct + cuBLAS; decode at 40 % of its speed, prefill the better.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import reference
import torch
from exl3_vllm import arena, gpu_dense, kernels, packed_ops
from exl3_vllm.errors import LayoutError
from exl3_vllm.gpu_dense import DISPATCH
from exl3_vllm.packed_ops import PackedPart
from torch import Tensor

REPO = Path(__file__).parents[2]  # or the packed folder
THRESHOLD = 64
DECODE, PREFILL = 8, 256
HOST = next(path for path in (REPO / "gpu_host", REPO / "scripts" / "gpu_host") if path.is_dir())

Layer = Callable[[Tensor], Tensor]


def parts(k: int = 256, widths: tuple[int, ...] = (256, 128)) -> list[PackedPart]:
    rate2, codebook = next(
        pair for pair in kernels.load(Path(os.environ.get("EXL3_LIBRARY", kernels.LIBRARY)).resolve())
    )
    suh = reference.signs(k, k**-0.5)
    made = [reference.matrix(k, n, rate2, codebook, suh=suh) for n in widths]
    return [PackedPart(m.trellis, m.suh, m.svh, m.codebook, 0, m.columns) for m in made]


def inside(layer: list[PackedPart]) -> Layer:
    return lambda x: packed_ops.packed_layer(x, layer, True, 0, THRESHOLD, None) * 1.0


def outside(layer: list[PackedPart]) -> Layer:
    """The mistake."""

    def forward(x: Tensor) -> Tensor:
        if x.shape[0] >= THRESHOLD:
            return packed_ops.packed_layer(x, layer, True, 0, 1, None) * 1.0
        return packed_ops.packed_layer(x, layer, True, 0, 0, None) * 1.0

    return forward


def captured(forward: Layer, rows: int) -> tuple[set[str], Tensor, Tensor]:
    """(our kernels of one replay, its input, its output) of the function as vLLM compiles it: traced once, with the
    rows of a prefill, without guards."""
    compiled = torch.compile(
        forward,
        fullgraph=True,
        backend="aot_eager",
        options={"guard_filter_fn": lambda guards: [False for _ in guards]},
    )
    first = torch.randn(PREFILL, 256, device="cuda")
    torch._dynamo.mark_dynamic(first, 0)
    compiled(first)
    x = torch.randn(rows, 256, device="cuda")
    compiled(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = compiled(x)
    x.normal_()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        graph.replay()
        torch.cuda.synchronize()
    words = ("trellis_gemm", "reconstruct")
    return {word for event in profiler.events() for word in words if word in event.name}, x, y.clone()


@pytest.fixture(autouse=True)
def prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """An arena large enough for every layer here, as loading leaves it."""
    torch._dynamo.reset()
    memory = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    monkeypatch.setattr(arena.ARENA, "_memory", memory)


@pytest.mark.parametrize(("rows", "held"), [(DECODE, {"trellis_gemm"}), (PREFILL, {"reconstruct"})])
def test_vllm_graphs_of_both_sides_hold_their_own_kernel(rows: int, held: set[str]) -> None:
    layer = parts()
    found, x, y = captured(inside(layer), rows)
    assert found == held
    wanted = torch.cat(
        [reference.product(x, kernels.Matrix(p.trellis, p.suh, p.svh, p.codebook, p.columns)) for p in layer], 1
    )
    assert reference.error(y, wanted) < reference.DENSE_LIMIT


def test_vllm_a_branch_in_python_is_seen_by_this_check() -> None:
    """Given the planted mistake, then the decode graph holds what the test above says it must not."""
    found, _, _ = captured(outside(parts()), DECODE)
    assert found == {"reconstruct"}


def test_vllm_dispatch_off_is_the_undispatched_path_bit_for_bit() -> None:
    layer = parts()
    x = torch.randn(PREFILL, 256, device="cuda", dtype=torch.bfloat16)
    off = packed_ops.packed_layer(x, layer, True, 0, 0, None)
    gpu = kernels.gpu_of(x.device)
    direct = torch.empty_like(off)
    matrices = [kernels.Matrix(p.trellis, p.suh, p.svh, p.codebook, p.columns) for p in layer]
    plan = gpu_dense.plans.dense_plan(DISPATCH.of(gpu), gpu, PREFILL, 256, (256, 128))
    kernels.fused_linear(x, matrices, True, direct, plan)
    assert torch.equal(off, direct)


def test_vllm_capture_is_refused_where_graphs_are_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DISPATCH, "graphs", False)
    forward, x = inside(parts()), torch.randn(DECODE, 256, device="cuda")
    forward(x)
    with pytest.raises(LayoutError, match="VLLM_EXL3_GRAPH_DECODE=0"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        forward(x)


def test_vllm_capture_without_prepared_memory_names_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena.ARENA, "_memory", None)
    forward, x = inside(parts()), torch.randn(DECODE, 256, device="cuda")
    forward(x)
    with pytest.raises(LayoutError, match=r"256 -> 256\+128"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        forward(x)


def test_vllm_a_wide_head_is_kept_in_pieces_with_the_same_outputs() -> None:
    """Given a matrix wider than is written out whole, of which columns 40 on are wanted, then nothing changes."""
    from exl3_vllm import gpu

    (part,) = parts(128, (gpu_dense.WIDEST + 256,))
    wanted = PackedPart(part.trellis, part.suh, part.svh, part.codebook, 40, part.columns - 40)
    pieces = gpu.keep_dense([wanted], True, -1, PREFILL)
    x = torch.randn(PREFILL, 128, device="cuda")
    assert len(pieces) == 2
    for rows in (3, PREFILL):
        whole = packed_ops.packed_layer(x[:rows], [wanted], True, 0, 0, None)
        cut = packed_ops.packed_layer(x[:rows], pieces, True, 8, THRESHOLD, None)
        assert reference.error(cut[:, :-8], whole) < reference.DENSE_LIMIT
        assert not cut[:, -8:].any()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, int]]]:
    """Three real engines, started together, with the kernels that their decode and their prefill ran."""
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("engines")
    environment = {**os.environ, "OUT": str(folder), "GPU_WORK": str(folder)}
    model = folder / "models" / "tiny-dense"
    subprocess.run([sys.executable, HOST / "models.py", "tiny-dense", model], env=environment, check=True)
    kinds = {"right": [], "branch": ["--branch"], "decode-only": ["--mode", "FULL_DECODE_ONLY"]}
    running = {}
    for kind, words in kinds.items():
        own = {**environment, "VLLM_CACHE_ROOT": str(folder / f"cache-{kind}")}
        log = (folder / f"{kind}.log").open("wb")
        command = [sys.executable, HOST / "graphs.py", model, kind, *words]
        running[kind] = subprocess.Popen(command, env=own, stdout=log, stderr=log)
    for kind, process in running.items():
        assert process.wait(240) == 0, (folder / f"{kind}.log").read_text()[-3000:]
    return {kind: json.loads((folder / f"{kind}.json").read_text()) for kind in kinds}


@pytest.mark.parametrize("kind", ["right", "decode-only"])
def test_vllm_an_engine_decodes_with_the_decode_kernel(
    kind: str, engines: dict[str, dict[str, dict[str, int]]]
) -> None:
    assert engines[kind]["decode"]["trellis_gemm"] > 0
    assert "reconstruct" not in engines[kind]["decode"]
    assert engines[kind]["prefill"]["reconstruct"] > 0


def test_vllm_an_engine_with_a_branch_in_python_is_seen(engines: dict[str, dict[str, dict[str, int]]]) -> None:
    assert engines["branch"]["decode"].get("reconstruct", 0) > 0
