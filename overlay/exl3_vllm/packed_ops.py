"""The opaque operator over matrices that stay packed: kernels on a GPU, the reference decoder elsewhere.

One operator serves a whole fused layer. It decides by the number of rows, at run time and inside the operator, whether
weights are decoded on the fly or reconstructed first; decided outside, the choice would be baked in at trace time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from exl3_vllm import decode
from exl3_vllm.format import CODEBOOKS

TABLE_DECIDES = -1
"""Value of `reconstruct_rows`: the table of the GPU decides. 0: never reconstruct."""

NEVER = 1 << 40


@dataclass(frozen=True)
class PackedPart:
    """One cut of a stored matrix, in whole blocks; its outputs are columns [first, first + columns) of it.

    trellis int16 [K/16, N/16, 8 * half_bits], suh fp16 [K], svh fp16 [N].
    """

    trellis: Tensor
    suh: Tensor
    svh: Tensor
    codebook: str
    first: int
    columns: int


def packed_layer(
    x: Tensor, parts: Sequence[PackedPart], shared_suh: bool, padding: int, reconstruct_rows: int, bias: Tensor | None
) -> Tensor:
    """y [..., sum of columns + padding] of x [..., <=K]: the parts side by side, then `padding` zero columns."""
    y: Tensor = torch.ops.exl3.packed_linear(
        x.reshape(-1, x.shape[-1]),
        [part.trellis for part in parts],
        [part.suh for part in parts],
        [part.svh for part in parts],
        [CODEBOOKS.index(part.codebook) for part in parts],
        [part.first for part in parts],
        [part.columns for part in parts],
        shared_suh,
        padding,
        reconstruct_rows,
        bias,
    )
    return y.reshape(*x.shape[:-1], y.shape[-1])


@torch.library.custom_op("exl3::packed_linear", mutates_args=())
def packed_linear(
    x: Tensor,
    trellis: list[Tensor],
    suh: list[Tensor],
    svh: list[Tensor],
    codebooks: list[int],
    first: list[int],
    columns: list[int],
    shared_suh: bool,
    padding: int,
    reconstruct_rows: int,
    bias: Tensor | None = None,
) -> Tensor:
    """See `packed_layer`; x [rows, <=K], result [rows, columns] in the dtype of x, always a fresh tensor."""
    parts = [
        PackedPart(*values)
        for values in zip(trellis, suh, svh, [CODEBOOKS[code] for code in codebooks], first, columns, strict=True)
    ]
    run = _with_kernels if x.is_cuda else _with_reference
    y = run(x, parts, shared_suh, reconstruct_rows)
    if padding:
        y = functional.pad(y, (0, padding))
    return y if bias is None else y + bias.to(y.dtype)


@packed_linear.register_fake
def _(
    x: Tensor,
    trellis: list[Tensor],
    suh: list[Tensor],
    svh: list[Tensor],
    codebooks: list[int],
    first: list[int],
    columns: list[int],
    shared_suh: bool,
    padding: int,
    reconstruct_rows: int,
    bias: Tensor | None = None,
) -> Tensor:
    return x.new_empty((x.shape[0], sum(columns) + padding))


def _with_reference(x: Tensor, parts: Sequence[PackedPart], shared_suh: bool, reconstruct_rows: int) -> Tensor:
    """By the reference decoder, in fp32. Rows of padding in the matrix meet zeros in x."""
    reconstruct = 0 < reconstruct_rows <= x.shape[0]
    outputs = []
    for part in parts:
        stored = (part.trellis, part.suh, part.svh, part.codebook)
        if reconstruct:
            y = x.to(torch.float32) @ decode.dequantise(*stored)[: x.shape[1]]
        else:
            y = decode.forward(functional.pad(x, (0, part.suh.numel() - x.shape[1])), *stored)
        outputs.append(y[:, part.first : part.first + part.columns])
    return torch.cat(outputs, 1).to(x.dtype)


def _with_kernels(x: Tensor, parts: Sequence[PackedPart], shared_suh: bool, reconstruct_rows: int) -> Tensor:
    """By the kernels. A cut that begins inside a block is computed from the block's begin and trimmed."""
    from exl3_vllm import kernels, plans

    table = plans.table_for(kernels.gpu_of(x.device))
    if reconstruct_rows != TABLE_DECIDES:
        table = replace(table, fused_rows=reconstruct_rows - 1 if reconstruct_rows else NEVER)
    matrices = [
        kernels.Matrix(part.trellis, part.suh, part.svh, part.codebook, part.first + part.columns) for part in parts
    ]
    y = kernels.linear(x.contiguous(), matrices, shared_suh=shared_suh, table=table)
    if not any(part.first for part in parts):
        return y
    kept, begin = [], 0
    for part in parts:
        kept.append(y[:, begin + part.first : begin + part.first + part.columns])
        begin += part.first + part.columns
    return torch.cat(kept, 1)
