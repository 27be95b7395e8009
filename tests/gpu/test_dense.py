"""Dense layers: decoding, every tile class, splits, dtypes, fused parts."""

from __future__ import annotations

import pytest
import reference as ref
import torch
from conftest import INSTANCES
from exl3_vllm import kernels, plans
from exl3_vllm.plans import DensePlan

ROWS = (1, 15, 16, 17, 32, 33, 64, 65, 127, 128, 129, 300)
FIRST = INSTANCES[:1]


def fused(
    x: torch.Tensor,
    parts: list[kernels.Matrix],
    plan: DensePlan,
    dtype: torch.dtype = torch.float32,
    shared: bool = False,
) -> torch.Tensor:
    out = ref.poisoned((x.shape[0], sum(p.columns for p in parts)), dtype)
    kernels.fused_linear(x, parts, shared, out, plan)
    return out


def test_decodes_every_weight_to_the_reference_bits(instance: tuple[int, int]) -> None:
    m = ref.matrix(256, 384, *instance)
    got = kernels.reconstruct(m, ref.poisoned((256, 384), torch.float16), original_basis=False)
    assert torch.equal(got, ref.inner(m))


def test_reconstructs_the_original_basis_into_a_strided_buffer(instance: tuple[int, int]) -> None:
    m = ref.matrix(384, 256, *instance)
    buffer = ref.poisoned((384, 512), torch.float16)
    kernels.reconstruct(m, buffer[:, :256])
    assert ref.error(buffer[:, :256], ref.weight(m)) < 4e-4
    assert buffer[:, 256:].isnan().all()  # nothing beyond the rows' own columns


@pytest.mark.parametrize("tile", range(4), ids=["thin", "half", "wide", "narrow"])
def test_every_tile_class_and_number_of_rows(instance: tuple[int, int], tile: int) -> None:
    m = ref.matrix(640, 384, *instance)  # 384: the second stream of the last 256-wide tile is missing
    for rows in ROWS:
        x = torch.randn(rows, 640, device=ref.DEVICE, dtype=torch.float16)
        want = ref.product(x, m)
        row_tiles = -(-rows // plans.TILE_ROWS[tile])
        for splits in (0, 1, 3):
            got = fused(x, [m], DensePlan(tile, row_tiles, splits))
            assert ref.error(got, want) < ref.DENSE_LIMIT, (rows, splits)


@pytest.mark.parametrize("instance", FIRST)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_input_and_output_types(instance: tuple[int, int], dtype: torch.dtype) -> None:
    m = ref.matrix(512, 512, *instance)
    for rows in (1, 40, 200, 700):
        x = torch.randn(rows, 512, device=ref.DEVICE).to(dtype)
        assert ref.error(kernels.linear(x, [m], out_dtype=torch.float32), ref.product(x, m)) < ref.DENSE_LIMIT
        rounding = {torch.float16: 6e-4, torch.bfloat16: 2.5e-3, torch.float32: ref.DENSE_LIMIT}[dtype]
        assert ref.error(kernels.linear(x, [m]), ref.product(x, m)) < rounding


@pytest.mark.parametrize("instance", FIRST)
@pytest.mark.parametrize("rows", [3, 100, 700])
def test_large_bf16_rows_do_not_overflow(instance: tuple[int, int], rows: int) -> None:
    # Given: rows whose rotated values pass fp16's 65504 by far, among ordinary ones.
    m = ref.matrix(512, 256, *instance)
    x = torch.randn(rows, 512, device=ref.DEVICE, dtype=torch.bfloat16)
    x[::2] *= 1e9
    got = kernels.linear(x, [m], out_dtype=torch.float32)
    want = ref.product(x, m)
    for row in range(rows):
        assert ref.error(got[row], want[row]) < 2 * ref.DENSE_LIMIT, row


@pytest.mark.parametrize("instance", FIRST)
def test_nan_stays_in_its_row(instance: tuple[int, int]) -> None:
    m = ref.matrix(256, 256, *instance)
    x = torch.randn(5, 256, device=ref.DEVICE, dtype=torch.float16)
    x[2, 7] = float("nan")
    got = kernels.linear(x, [m])
    assert got[2].isnan().all() and not got[[0, 1, 3, 4]].isnan().any()


@pytest.mark.parametrize("shared", [False, True])
def test_fused_parts_of_different_rates_and_widths(shared: bool) -> None:
    suh = ref.signs(512, 512**-0.5) if shared else None
    kinds = [INSTANCES[i % len(INSTANCES)] for i in (0, 1, 0)]
    parts = [
        ref.matrix(512, n, *kind, suh=suh, columns=c)
        for n, kind, c in zip((640, 128, 256), kinds, (576, 128, 256), strict=True)
    ]
    for rows in (1, 20, 130, 700):
        x = torch.randn(rows, 512, device=ref.DEVICE, dtype=torch.float16)
        want = torch.cat([ref.product(x, p) for p in parts], 1)
        assert ref.error(kernels.linear(x, parts, shared_suh=shared, out_dtype=torch.float32), want) < ref.DENSE_LIMIT
        for splits in (0, 2):
            assert (
                ref.error(fused(x, parts, DensePlan(plans.NARROW, -(-rows // 128), splits), shared=shared), want)
                < ref.DENSE_LIMIT
            )


def test_padded_input_columns_count_as_zero() -> None:
    m = ref.matrix(384, 256, *INSTANCES[0])
    wide = torch.randn(9, 512, device=ref.DEVICE, dtype=torch.float16)
    x = wide[:, :320]  # strided rows, 320 of K = 384
    got = fused(x, [m], DensePlan(plans.THIN, 1, 2))
    assert ref.error(got, ref.product(x, m)) < ref.DENSE_LIMIT


def test_no_rows() -> None:
    m = ref.matrix(256, 256, *INSTANCES[0])
    assert kernels.linear(torch.empty(0, 256, device=ref.DEVICE, dtype=torch.float16), [m]).shape == (0, 256)


def test_runs_are_bit_identical() -> None:
    m = ref.matrix(2048, 1024, *INSTANCES[0])
    for rows in (1, 7, 64, 130):
        x = torch.randn(rows, 2048, device=ref.DEVICE, dtype=torch.bfloat16)
        first = kernels.linear(x, [m])
        assert all(torch.equal(kernels.linear(x, [m]), first) for _ in range(5))


def test_two_streams_at_once() -> None:
    m = ref.matrix(2048, 2048, *INSTANCES[0])
    inputs = [torch.randn(rows, 2048, device=ref.DEVICE, dtype=torch.float16) for rows in (1, 16, 48, 130)]
    wants = [kernels.linear(x, [m]) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    got: list[list[torch.Tensor]] = [[] for _ in inputs]
    for _ in range(20):
        for i, (x, stream) in enumerate(zip(inputs, streams, strict=True)):
            with torch.cuda.stream(stream):
                got[i].append(kernels.linear(x, [m]))
    torch.cuda.synchronize()
    assert all(torch.equal(y, want) for ys, want in zip(got, wants, strict=True) for y in ys)


def test_capture_and_replay() -> None:
    m = ref.matrix(1024, 1536, *INSTANCES[0])
    for rows in (1, 8, 100):
        x = torch.randn(rows, 1024, device=ref.DEVICE, dtype=torch.float16)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # no warm-up: nothing is tuned or allocated lazily
            y = kernels.linear(x, [m])
        for _ in range(3):
            x.copy_(torch.randn_like(x))
            y.fill_(float("nan"))
            graph.replay()
            assert torch.equal(y, kernels.linear(x, [m]))


REFUSALS = {
    "K not a multiple of 128": lambda m, x, o, w: (
        x,
        [m.trellis[:-1]],
        [m.suh[:-16]],
        [m.svh],
        [m.code],
        [256],
        False,
        o,
        w,
        0,
        1,
        0,
    ),
    "wrong trellis": lambda m, x, o, w: (
        x,
        [m.trellis[:, :-1].contiguous()],
        [m.suh],
        [m.svh],
        [m.code],
        [256],
        False,
        o,
        w,
        0,
        1,
        0,
    ),
    "uncompiled rate": lambda m, x, o, w: (
        x,
        [m.trellis[..., :72].contiguous()],
        [m.suh],
        [m.svh],
        [9],
        [256],
        False,
        o,
        w,
        0,
        1,
        0,
    ),
    "workspace too small": lambda m, x, o, w: (
        x,
        [m.trellis],
        [m.suh],
        [m.svh],
        [m.code],
        [256],
        False,
        o,
        w[:100],
        0,
        1,
        0,
    ),
    "too few row tiles": lambda m, x, o, w: (
        x.repeat(20, 1),
        [m.trellis],
        [m.suh],
        [m.svh],
        [m.code],
        [256],
        False,
        o.repeat(20, 1),
        w,
        0,
        1,
        0,
    ),
    "unknown tile": lambda m, x, o, w: (x, [m.trellis], [m.suh], [m.svh], [m.code], [256], False, o, w, 7, 1, 0),
    "int x": lambda m, x, o, w: (x.int(), [m.trellis], [m.suh], [m.svh], [m.code], [256], False, o, w, 0, 1, 0),
    "out too narrow": lambda m, x, o, w: (
        x,
        [m.trellis],
        [m.suh],
        [m.svh],
        [m.code],
        [256],
        False,
        o[:, :128],
        w,
        0,
        1,
        0,
    ),
    "columns beyond N": lambda m, x, o, w: (
        x,
        [m.trellis],
        [m.suh],
        [m.svh],
        [m.code],
        [260],
        False,
        o.repeat(1, 2)[:, :260],
        w,
        0,
        1,
        0,
    ),
    "x on the CPU with weights on the GPU": lambda m, x, o, w: (
        x,
        [m.trellis.cpu()],
        [m.suh],
        [m.svh],
        [m.code],
        [256],
        False,
        o,
        w,
        0,
        1,
        0,
    ),
}


@pytest.mark.parametrize("fault", REFUSALS)
def test_wrong_arguments_are_refused_before_anything_runs(fault: str) -> None:
    m = ref.matrix(256, 256, 8, 1)
    x = torch.randn(4, 256, device=ref.DEVICE, dtype=torch.float16)
    out = ref.poisoned((4, 256), torch.float16)
    arguments = REFUSALS[fault](m, x, out, torch.empty(1 << 20, dtype=torch.uint8, device=ref.DEVICE))
    with pytest.raises(RuntimeError, match="exl3::gemm"):
        torch.ops.exl3.gemm(*arguments)
    assert out.isnan().all()
