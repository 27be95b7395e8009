"""Fat experts one after another on a GPU: the tiers legacy, sorted, batched and kernel.

They are what a deployment compares the grouped tier with, and what stays where a symbol is missing. Each looks at the
number of rows per expert on the host, once per call of a layer, so none of them can be captured into a graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from exl3_vllm import kernels
from exl3_vllm.arena import carve, padded_bytes
from exl3_vllm.experts import Scratch
from exl3_vllm.kernels import Matrix

TIERS = ("legacy", "sorted", "batched", "kernel")

CHUNK_ROWS = 2048
"""Rows of an expert that are done at once: bounds the scratch, whatever the routing."""


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return functional.silu(gate) * up


class FatExperts:
    """A layer's experts, run one by one.

    Parameters
    ----------
    gate, up, down: the matrices of each expert.
    limit: clamp of SwiGLU's inputs, 0 for none.
    scratch: the persistent buffer; `reserve` makes it as large as it will ever be.
    """

    def __init__(
        self, gate: Sequence[Matrix], up: Sequence[Matrix], down: Sequence[Matrix], limit: float, scratch: Scratch
    ) -> None:
        self.gate, self.up, self.down = gate, up, down
        self.limit = limit
        self.scratch = scratch
        self.hidden, self.inter = gate[0].suh.numel(), down[0].suh.numel()

    def reserve(self) -> None:
        """Take the scratch now, before memory is profiled."""
        self._buffers(0)

    def run(self, tier: str, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, fat: Sequence[int], out: Tensor) -> int:
        """Add the weighted outputs of the experts `fat` to out fp32 [T, hidden]; gives the rows that were done."""
        forward = {"legacy": self._apart, "sorted": self._apart, "batched": self._stacked, "kernel": self._fused}[tier]
        found = _indexed if tier == "legacy" else _sorted
        handled = 0
        for expert, tokens, weights in found(topk_ids, topk_weights, fat):
            for begin in range(0, len(tokens), CHUNK_ROWS):
                part = slice(begin, begin + CHUNK_ROWS)
                forward(expert, x[tokens[part]], tokens[part], weights[part], out)
            handled += len(tokens)
        return handled

    def _apart(self, expert: int, rows: Tensor, tokens: Tensor, weights: Tensor, out: Tensor) -> None:
        """Each of the three matrices written out and multiplied on its own."""
        gate, up = self._linear(rows, self.gate[expert]), self._linear(rows, self.up[expert])
        y = self._linear(swiglu(gate, up, self.limit), self.down[expert])
        out.index_add_(0, tokens, y.mul_(weights[:, None]))

    def _stacked(self, expert: int, rows: Tensor, tokens: Tensor, weights: Tensor, out: Tensor) -> None:
        """Gate and up side by side: one rotation of the input, one product."""
        gate, up, inter = self.gate[expert], self.up[expert], self.inter
        weight, a, scale, sums = self._buffers(len(rows))
        both = weight[: self.hidden * 2 * inter].view(self.hidden, 2 * inter)
        kernels.reconstruct(gate, both[:, :inter], original_basis=False)
        kernels.reconstruct(up, both[:, inter:], original_basis=False)
        turned = a[: len(rows) * self.hidden].view(len(rows), self.hidden)
        torch.ops.exl3.rotate(rows, gate.suh, turned, scale)
        product = sums[: len(rows) * 2 * inter].view(len(rows), 2 * inter)
        torch.ops.aten.mm.dtype_out(turned, both, torch.float32, out=product)
        gated = torch.empty_like(product)
        torch.ops.exl3.finish(product, scale, torch.cat([gate.svh, up.svh]), gated)
        y = self._linear(swiglu(gated[:, :inter], gated[:, inter:], self.limit), self.down[expert])
        out.index_add_(0, tokens, y.mul_(weights[:, None]))

    def _fused(self, expert: int, rows: Tensor, tokens: Tensor, weights: Tensor, out: Tensor) -> None:
        """The fat symbols: decoded inside the product; down adds into `out` with the route weight.

        They take no row scale, a power of two, 1 but for rows beyond fp16's range: it is multiplied in after gate
        and up, and into the route weight (fp16, so rows up to 2^30) for down.
        """
        gate, up, down = self.gate[expert], self.up[expert], self.down[expert]
        _, a, scale, sums = self._buffers(len(rows))
        turned, size = a[: len(rows) * self.hidden].view(len(rows), self.hidden), len(rows) * self.inter
        torch.ops.exl3.rotate(rows, gate.suh, turned, scale)
        products = [sums[begin : begin + size].view(len(rows), self.inter) for begin in (0, size)]
        for one, product in zip((gate, up), products, strict=True):
            torch.ops.exl3.exl3_fat_gemm(turned, one.trellis, product, one.svh, *_fat_code(one))
            product.mul_(scale[:, None])
        inner = swiglu(products[0], products[1], self.limit)
        h = a[:size].view(len(rows), self.inter)
        torch.ops.exl3.rotate(inner, down.suh, h, scale)
        route = (weights * scale).half()
        torch.ops.exl3.exl3_fat_gemm_scatter(h, down.trellis, out, down.svh, tokens, route, *_fat_code(down))

    def _linear(self, x: Tensor, matrix: Matrix) -> Tensor:
        """y fp32 [rows, N]: the matrix written out, cuBLAS, rotations in fp32."""
        k, n = matrix.suh.numel(), matrix.svh.numel()
        weight, a, scale, sums = self._buffers(len(x))
        dense = kernels.reconstruct(matrix, weight[: k * n].view(k, n), original_basis=False)
        turned = a[: len(x) * k].view(len(x), k)
        torch.ops.exl3.rotate(x, matrix.suh, turned, scale)
        product = sums[: len(x) * n].view(len(x), n)
        torch.ops.aten.mm.dtype_out(turned, dense, torch.float32, out=product)
        y = torch.empty_like(product)
        torch.ops.exl3.finish(product, scale, matrix.svh, y)
        return y

    def _buffers(self, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Flat fp16 weight and activations, fp32 [rows] scale, flat fp32 sums; the same memory in every call."""
        widest = max(2 * self.inter, self.hidden)
        sizes = [
            (self.hidden * 2 * self.inter, torch.float16),
            (CHUNK_ROWS * max(self.hidden, self.inter), torch.float16),
            (CHUNK_ROWS, torch.float32),
            (CHUNK_ROWS * widest, torch.float32),
        ]
        needed = sum(padded_bytes(count, dtype) for count, dtype in sizes)
        like = torch.empty(0, dtype=torch.uint8, device=self.gate[0].suh.device)
        memory = self.scratch.take(1, needed, like).view(-1)
        weight, a, scale, sums = carve(memory, [((count,), dtype) for count, dtype in sizes])
        return weight, a, scale[:rows], sums


def _fat_code(matrix: Matrix) -> tuple[int, bool, bool]:
    """Bits and codebook as the fat symbols take them."""
    return matrix.trellis.shape[-1] // 16, matrix.codebook == "mcg", matrix.codebook == "mul1"


Slices = Iterator[tuple[int, Tensor, Tensor]]
"""(expert, tokens, route weights) of each fat expert."""


def _indexed(topk_ids: Tensor, topk_weights: Tensor, fat: Sequence[int]) -> Slices:
    for expert in fat:
        tokens, slots = torch.where(topk_ids == expert)
        yield expert, tokens, topk_weights[tokens, slots]


def _sorted(topk_ids: Tensor, topk_weights: Tensor, fat: Sequence[int]) -> Slices:
    """All rows sorted by expert once; each expert is then one contiguous slice."""
    flat, wanted = topk_ids.flatten(), torch.tensor([[expert, expert + 1] for expert in fat], device=topk_ids.device)
    order = torch.argsort(flat, stable=True)
    bounds = torch.searchsorted(flat[order], wanted.to(flat.dtype)).tolist()
    tokens, weights = order // topk_ids.shape[1], topk_weights.flatten()[order]
    for expert, (begin, end) in zip(fat, bounds, strict=True):
        yield expert, tokens[begin:end], weights[begin:end]
