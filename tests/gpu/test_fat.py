"""The fat symbols under their known names: values, wrong indices, duplicates, refusals."""

from __future__ import annotations

import pytest
import reference as ref
import torch
from conftest import INSTANCES
from exl3_vllm import kernels
from torch import Tensor

K, N, EXPERTS, HIDDEN = 384, 256, 5, 384
WHOLE = [
    (rate2, codebook) for rate2, codebook in INSTANCES if rate2 % 2 == 0
]  # these symbols count bits in whole numbers
ops = torch.ops.exl3


def flags(codebook: int) -> tuple[bool, bool]:
    return codebook == 1, codebook == 2


def ints(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=ref.DEVICE)


def plain(a: Tensor, m: kernels.Matrix) -> Tensor:
    """Rotated rows through the inner weight and the output rotation, fp64."""
    return ref.hadamard(a.double() @ ref.inner(m).double()) * m.svh.double()


@pytest.mark.parametrize("rate2, codebook", WHOLE)
@pytest.mark.parametrize("rows", [0, 1, 16, 17, 128, 129])
def test_fat_gemm(rate2: int, codebook: int, rows: int) -> None:
    m = ref.matrix(K, N, rate2, codebook)
    a = torch.randn(rows, K, device=ref.DEVICE, dtype=torch.float16)
    out = ref.poisoned((rows, N), torch.float32)
    ops.exl3_fat_gemm(a, m.trellis, out, m.svh, rate2 // 2, *flags(codebook))
    assert rows == 0 or ref.error(out, plain(a, m)) < ref.DENSE_LIMIT


def test_scatter_adds_with_weights_and_skips_what_lies_outside() -> None:
    rate2, codebook = WHOLE[0]
    m = ref.matrix(K, N, rate2, codebook)
    a = torch.randn(6, K, device=ref.DEVICE, dtype=torch.float16)
    weight = torch.rand(6, device=ref.DEVICE, dtype=torch.float16)
    token = ints(4, 4, 0, 7, -1, 1 << 40, dtype=torch.int64)  # a duplicate, the last token, three outside
    guarded = torch.full((10, N), 7.0, device=ref.DEVICE)
    out, fault = guarded[1:9], ints(0)
    ops.exl3_fat_gemm_scatter(a, m.trellis, out, m.svh, token, weight, rate2 // 2, *flags(codebook), fault)
    want = torch.full((8, N), 7.0, dtype=torch.float64, device=ref.DEVICE)
    want.index_add_(0, token[:4], plain(a, m)[:4] * weight[:4].double()[:, None])
    assert ref.error(out - 7, want - 7) < ref.DENSE_LIMIT
    assert (guarded[[0, 9]] == 7).all()
    assert fault.item() == 8


def tables(matrices: list[kernels.Matrix], name: str) -> Tensor:
    return ints(*[getattr(m, name).data_ptr() for m in matrices], dtype=torch.int64)


@pytest.mark.parametrize("rate2, codebook", WHOLE[:2])
def test_grouped_pipeline_with_empty_and_faulty_segments(rate2: int, codebook: int) -> None:
    # Given: rows grouped by expert, an empty segment, and segments with a wrong expert, wrong rows and a wrong start.
    suh = ref.signs(HIDDEN, HIDDEN**-0.5)
    gate, up = ([ref.matrix(HIDDEN, N, rate2, codebook, suh=suh) for _ in range(EXPERTS)] for _ in range(2))
    down = [ref.matrix(N, HIDDEN, rate2, codebook) for _ in range(EXPERTS)]
    tokens, rows = 40, 170
    x = torch.randn(tokens, HIDDEN, device=ref.DEVICE, dtype=torch.float16)
    row_token = torch.randint(0, tokens, (rows,), device=ref.DEVICE)
    counts = (3, 128, 39)
    row_expert = torch.repeat_interleave(ints(0, 2, 4), ints(*counts)).int()
    segments = ints(0, 2, 4, 1, 99, 1, 3, 0), ints(0, 3, 131, 5, 0, 0, 165, 0), ints(3, 128, 39, 0, 4, 200, 10, 3)
    live, fault = ints(7), ints(0)  # the eighth segment is beyond the live count
    weight = torch.rand(rows, device=ref.DEVICE, dtype=torch.float16)
    h13, h2 = ref.poisoned((rows, HIDDEN), torch.float16), ref.poisoned((rows, N), torch.float16)
    out = torch.zeros(tokens, HIDDEN, device=ref.DEVICE)
    kind = (rate2 // 2, *flags(codebook), fault)

    ops.exl3_fat_moe_gather(x, row_token, row_expert, tables(gate, "suh"), h13, ints(rows), fault)
    names = [
        tables(gate, "trellis"),
        tables(up, "trellis"),
        tables(gate, "svh"),
        tables(up, "svh"),
        tables(down, "suh"),
    ]
    ops.exl3_fat_moe_gateup(h13, *names, h2, *segments, live, 10.0, *kind)
    ops.exl3_fat_moe_down(
        h2, tables(down, "trellis"), tables(down, "svh"), out, row_token, weight, *segments, live, *kind
    )

    want = torch.zeros(tokens, HIDDEN, dtype=torch.float64, device=ref.DEVICE)
    for r in range(rows):
        e = int(row_expert[r])
        row = x[row_token[r]][None]
        h = ref.swiglu(ref.product(row, gate[e]), ref.product(row, up[e]), 10.0)
        want[row_token[r]] += ref.product(h, down[e])[0] * weight[r].double()
    assert ref.error(out, want) < ref.MOE_LIMIT
    assert fault.item() == 1 | 2


def test_gather_ignores_rows_beyond_the_live_count_and_tokens_outside() -> None:
    suh = ref.signs(HIDDEN, 1.0)
    x = torch.randn(4, HIDDEN, device=ref.DEVICE, dtype=torch.float16)
    pointers, fault = ints(suh.data_ptr(), dtype=torch.int64), ints(0)
    h13 = ref.poisoned((5, HIDDEN), torch.float16)
    ops.exl3_fat_moe_gather(
        x, ints(3, 4, -9, 0, 1, dtype=torch.int64), ints(0, 0, 0, 1, 0), pointers, h13, ints(4), fault
    )
    assert ref.error(h13[0], ref.hadamard(x[3].double() * suh.double())) < ref.DENSE_LIMIT
    assert h13[1:].isnan().all()
    assert fault.item() == 4 | 1


def test_refusals_name_the_symbol() -> None:
    rate2, codebook = WHOLE[0]
    m = ref.matrix(K, N, rate2, codebook)
    a, out = torch.randn(4, K, device=ref.DEVICE, dtype=torch.float16), torch.zeros(4, N, device=ref.DEVICE)
    bits, (mcg, mul1) = rate2 // 2, flags(codebook)
    for wrong in (
        (a.float(), m.trellis, out, m.svh, bits, mcg, mul1),
        (a[:, ::2], m.trellis, out, m.svh, bits, mcg, mul1),
        (a, m.trellis, out.half(), m.svh, bits, mcg, mul1),
        (a, m.trellis, out[:3], m.svh, bits, mcg, mul1),
        (a, m.trellis, out, m.svh[:128], bits, mcg, mul1),
        (a, m.trellis, out, m.svh, bits + 1, mcg, mul1),
        (a, m.trellis, out, m.svh, bits, True, True),
    ):
        with pytest.raises(RuntimeError, match="exl3_fat_gemm"):
            ops.exl3_fat_gemm(*wrong)
    with pytest.raises(RuntimeError, match="token_idx"):
        ops.exl3_fat_gemm_scatter(
            a, m.trellis, out, m.svh, ints(0, 1, 2), torch.ones(4, device=ref.DEVICE).half(), bits, mcg, mul1
        )
