"""A fused layer of packed matrices on a GPU: the path is chosen by the number of rows, every buffer is the arena's.

Up to `fused_rows` rows the weights are decoded as the product needs them. Above, each matrix is written out as fp16 and
given to cuBLAS, which wins where tensor cores are fast. Which is which is data of the GPU (`plans.Table`): the file a
bench wrote on this machine, or the built-in table of the architecture.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from exl3_vllm import kernels, plans
from exl3_vllm.arena import ARENA, carve, padded_bytes
from exl3_vllm.errors import LayoutError, SettingError
from exl3_vllm.plans import Gpu, Table

TABLE_DECIDES = -1
"""Value of `reconstruct_rows`: the table of the GPU decides. 0: never reconstruct."""

NEVER = 1 << 40
MAX_PARTS = 4
"""Matrices of one launch, as in abi.h."""

WIDEST = 32768
"""Columns of the largest matrix that is written out whole: fp16 of 5120 x 32768 is 336 MB."""

CHUNK_ROWS, CHUNK_BYTES = 2048, 128 << 20
"""Rows per cuBLAS product, and bytes of its fp32 sums: that many rows already fill the GPU."""


@dataclass
class Dispatch:
    """Which path a number of rows takes on the GPU of this process, and whether graphs may hold it at all."""

    table: Table | None = None
    source: str = "none"
    graphs: bool = True

    def choose(self, gpu: Gpu, told: str | None) -> None:
        """Take the measured table that `told` is or names the file of, or the built-in one.

        Raises
        ------
        SettingError: it can not be read, or was measured on another GPU.
        """
        if told is None:
            self.table = plans.table_for(gpu)
            kind = "modelled" if self.table is plans.SM12X else "measured on an H200"
            self.source = f"built in, {kind}"
            return
        try:
            self.table = plans.load_table(told, gpu)
        except (OSError, ValueError, KeyError, TypeError) as error:
            where = f"EXL3_KERNEL_TABLE, {plans.name_of(told)}"
            raise SettingError(where, f"can not be used ({error})", "Run the bench here") from error
        self.source = f"measured here, {json.dumps(plans.name_of(told))}"

    def of(self, gpu: Gpu) -> Table:
        if self.table is None:
            self.choose(gpu, None)
        assert self.table is not None
        return self.table


DISPATCH = Dispatch()
"""The dispatch of this process: a rank has one GPU."""


@functools.lru_cache(64)
def with_threshold(table: Table, reconstruct_rows: int) -> Table:
    """The table with another crossover: reconstruct from this many rows on, 0 never."""
    if reconstruct_rows == TABLE_DECIDES:
        return table
    return replace(table, fused_rows=reconstruct_rows - 1 if reconstruct_rows else NEVER)


def pieces(columns: int) -> Iterator[tuple[int, int]]:
    """Block-aligned ranges of columns that a matrix is kept in: whole, or as up to four where it is too wide."""
    blocks, count = columns // 128, min(MAX_PARTS, -(-columns // WIDEST))
    for number in range(count):
        yield blocks * number // count * 128, blocks * (number + 1) // count * 128


@dataclass(frozen=True)
class Layer:
    """The matrices of a fused layer side by side; `widths` counts the columns of each that are computed."""

    trellis: Sequence[Tensor]
    suh: Sequence[Tensor]
    svh: Sequence[Tensor]
    codes: Sequence[int]
    widths: Sequence[int]
    shared_suh: bool

    @property
    def k(self) -> int:
        return self.suh[0].numel()

    def groups(self) -> Iterator[tuple[Layer, int]]:
        """Launches of at most four matrices, and the output column where each begins."""
        if len(self.trellis) <= MAX_PARTS:
            yield self, 0
            return
        first = 0
        for begin in range(0, len(self.trellis), MAX_PARTS):
            part = slice(begin, begin + MAX_PARTS)
            widths = self.widths[part]
            yield (
                Layer(self.trellis[part], self.suh[part], self.svh[part], self.codes[part], widths, self.shared_suh),
                first,
            )
            first += sum(widths)

    def __str__(self) -> str:
        sizes = "+".join(str(svh.numel()) for svh in self.svh)
        rates = ",".join(f"{(code & 31) / 2:g}" for code in sorted(set(self.codes)))
        return f"exl3 linear {self.k} -> {sizes}, {rates} bits"


def run(x: Tensor, layer: Layer, out: Tensor, reconstruct_rows: int) -> None:
    """out [rows, sum of widths] = x [rows, <=K] through the layer.

    Raises
    ------
    LayoutError: a graph is being captured, and either VLLM_EXL3_GRAPH_DECODE=0 or the arena is too small.
    """
    if not DISPATCH.graphs and torch.cuda.is_current_stream_capturing():
        refuse_capture(str(layer))
    gpu = kernels.gpu_of(x.device)
    table = DISPATCH.of(gpu)
    if reconstruct_rows != TABLE_DECIDES:
        table = with_threshold(table, reconstruct_rows)
    if x.shape[0] > table.fused_rows:
        _reconstructed(x, layer, out, table)
    elif x.shape[0]:
        _fused(x, layer, out, table, gpu)


def refuse_capture(where: str) -> None:
    what = "does not run under a CUDA graph, as VLLM_EXL3_GRAPH_DECODE=0 asks, and one is being captured"
    raise LayoutError(where, what, "Start with --enforce-eager, or remove the variable")


def _fused(x: Tensor, layer: Layer, out: Tensor, table: Table, gpu: Gpu) -> None:
    for group, first in layer.groups():
        sizes = tuple(svh.numel() for svh in group.svh)
        plan = plans.dense_plan(table, gpu, x.shape[0], group.k, sizes)
        nbytes = _fused_bytes(x.shape[0], group, sizes, plan.splits)
        torch.ops.exl3.gemm(
            x,
            group.trellis,
            group.suh,
            group.svh,
            group.codes,
            group.widths,
            group.shared_suh,
            out[:, first : first + sum(group.widths)],
            ARENA.take(nbytes, layer, x.shape[0], x.device),
            plan.tile,
            plan.row_tiles,
            plan.splits,
        )


def _fused_bytes(rows: int, group: Layer, sizes: tuple[int, ...], splits: int) -> int:
    return kernels.gemm_workspace(rows, group.k, sum(sizes), 1 if group.shared_suh else len(sizes), splits)


def _reconstructed(x: Tensor, layer: Layer, out: Tensor, table: Table) -> None:
    """Each matrix written out, multiplied by cuBLAS with fp32 sums, and rotated back; fp16 rows may skip rotations."""
    rows, k = x.shape[0], layer.k
    folded = rows >= table.folded_rows and x.dtype == torch.float16
    first = 0
    for trellis, suh, svh, code, width in zip(
        layer.trellis, layer.suh, layer.svh, layer.codes, layer.widths, strict=True
    ):
        n = svh.numel()
        memory = ARENA.take(_reconstructed_bytes(rows, k, n), layer, rows, x.device)
        chunk = chunk_rows(rows, n)
        halves = [((k, n), torch.float16), ((chunk, k), torch.float16)]
        weight, a, scale, sums = carve(memory, [*halves, ((chunk,), torch.float32), ((chunk, n), torch.float32)])
        torch.ops.exl3.reconstruct(trellis, suh, svh, code, folded, weight)
        columns = out[:, first : first + width]
        for begin in range(0, rows, chunk):
            part = slice(begin, min(rows, begin + chunk))
            count = part.stop - part.start
            if folded:
                torch.mm(x[part], weight[: x.shape[1], :width], out=columns[part])
                continue
            torch.ops.exl3.rotate(x[part], suh, a[:count], scale[:count])
            torch.ops.aten.mm.dtype_out(a[:count], weight, torch.float32, out=sums[:count])
            torch.ops.exl3.finish(sums[:count], scale[:count], svh, columns[part])
        first += width


def chunk_rows(rows: int, n: int) -> int:
    return min(rows, CHUNK_ROWS, max(256, CHUNK_BYTES // (4 * n) // 128 * 128))


def _reconstructed_bytes(rows: int, k: int, n: int) -> int:
    chunk = chunk_rows(rows, n)
    halves = padded_bytes(k * n, torch.float16) + padded_bytes(chunk * k, torch.float16)
    return halves + padded_bytes(chunk, torch.float32) + padded_bytes(chunk * n, torch.float32)


def expect(layer: Layer, reconstruct_rows: int, most_rows: int, gpu: Gpu) -> None:
    """Tell the arena the most that calls of up to `most_rows` rows will take."""
    table = with_threshold(DISPATCH.of(gpu), reconstruct_rows)
    fused = min(most_rows, table.fused_rows)
    for rows in {*range(1, min(fused, 256) + 1), *range(256, fused + 1, 128), fused}:
        for group, _ in layer.groups():
            sizes = tuple(svh.numel() for svh in group.svh)
            splits = plans.dense_plan(table, gpu, rows, group.k, sizes).splits
            ARENA.expect(_fused_bytes(rows, group, sizes, splits), f"{layer}, {rows} rows")
    if most_rows > table.fused_rows:
        widest = max(svh.numel() for svh in layer.svh)
        ARENA.expect(_reconstructed_bytes(most_rows, layer.k, widest), f"{layer}, {most_rows} rows, written out")
