"""The opaque operator over matrices that stay packed: kernels on a GPU, the reference decoder elsewhere.

One operator serves a whole fused layer. It decides by the number of rows, at run time and inside the operator, whether
weights are decoded on the fly or reconstructed first; decided outside, the choice would be baked in at trace time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from exl3_vllm import decode, gpu_dense
from exl3_vllm.format import CODEBOOKS
from exl3_vllm.gpu_dense import TABLE_DECIDES as TABLE_DECIDES


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


def _packed_linear(
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
    if x.is_cuda:
        y = _with_kernels(x, trellis, suh, svh, codebooks, first, columns, shared_suh, padding, reconstruct_rows)
        return y if bias is None else y.add_(bias)
    parts = [
        PackedPart(*values)
        for values in zip(trellis, suh, svh, [CODEBOOKS[code] for code in codebooks], first, columns, strict=True)
    ]
    y = functional.pad(_with_reference(x, parts, shared_suh, reconstruct_rows), (0, padding))
    return y if bias is None else y + bias.to(y.dtype)


def _fake(
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


def _with_kernels(
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
) -> Tensor:
    """By the kernels. A cut that begins inside a block is computed from the block's begin and trimmed."""
    codes = [one.shape[-1] // 8 | code << 5 for one, code in zip(trellis, codebooks, strict=True)]
    widths = [begin + count for begin, count in zip(first, columns, strict=True)]
    layer = gpu_dense.Layer(trellis, suh, svh, codes, widths, shared_suh)
    y = x.new_empty((x.shape[0], sum(widths) + padding))
    gpu_dense.run(x if x.stride(1) == 1 else x.contiguous(), layer, y, reconstruct_rows)
    if padding:
        y[:, sum(widths) :].zero_()
    if not any(first):
        return y
    kept, begin = [], 0
    for skipped, count in zip(first, columns, strict=True):
        kept.append(y[:, begin + skipped : begin + skipped + count])
        begin += skipped + count
    return torch.cat([*kept, y[:, begin:]], 1)


_LIBRARY = torch.library.Library("exl3", "FRAGMENT")
# Not `torch.library.custom_op`: its wrapper costs host time, and the head, outside of all graphs, pays it every step.
_LIBRARY.define(
    "packed_linear(Tensor x, Tensor[] trellis, Tensor[] suh, Tensor[] svh, int[] codebooks, int[] first, "
    "int[] columns, bool shared_suh, int padding, int reconstruct_rows, Tensor? bias=None) -> Tensor"
)
for _backend in ("CPU", "CUDA"):
    _LIBRARY.impl("packed_linear", _packed_linear, _backend)
torch.library.register_fake("exl3::packed_linear", _fake)
packed_linear = torch.ops.exl3.packed_linear.default
