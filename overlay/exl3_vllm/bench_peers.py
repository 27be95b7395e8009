"""What the bench compares with: torch's own products, and exllamav3 where its extension is installed.

exllamav3's kernels are called through their Python binding with the argument order of version 1.6.5.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from exl3_vllm.kernels import Experts, Matrix

Call = Callable[[], Any]
COOP_TOKENS = 8  # exl3_moe_coop serves up to here
LIMIT = 10.0


def exllamav3() -> Any | None:
    """The extension module, with its int8 GEMV off (that path trades accuracy away), or None."""
    os.environ["EXL3_INT8_GEMV"] = "0"
    try:
        return importlib.import_module("exllamav3_ext")
    except ImportError:
        return None


def dense_call(ext: Any, x: Tensor, matrix: Matrix, out: Tensor) -> Call:
    """exl3_gemm: fp16 [M, K] to fp16 [M, N], input and output rotations included."""
    flags = matrix.codebook == "mcg", matrix.codebook == "mul1"
    rotated = torch.empty_like(x)
    return lambda: ext.exl3_gemm(x, matrix.trellis, out, matrix.suh, rotated, matrix.svh, -1, *flags, 0)


def reconstruct_call(ext: Any, x: Tensor, matrix: Matrix, out: Tensor, weight: Tensor) -> Call:
    """exllamav3's own path for many rows: decode (with the rotations from 1,024 rows on), then its cuBLAS wrapper."""
    flags = matrix.codebook == "mcg", matrix.codebook == "mul1"
    bits = matrix.trellis.shape[-1] // 16
    rotated = torch.empty_like(x)

    def folded() -> None:
        ext.reconstruct_had_slice(weight, matrix.trellis, matrix.suh, matrix.svh, bits, *flags, 0)
        ext.hgemm_recon(x, weight, out)

    def plain() -> None:
        ext.had_r_128(x, rotated, matrix.suh, None, 1.0)
        ext.reconstruct(weight, matrix.trellis, bits, *flags)
        ext.hgemm_recon(rotated, weight, out)
        ext.had_r_128(out, out, None, matrix.svh, 1.0)

    return folded if x.shape[0] >= 1024 else plain


class MoePeer:
    """exl3_moe and exl3_moe_coop over the same tables of experts; gate and up share one suh."""

    def __init__(self, ext: Any, layer: Experts, rows: int, topk: int) -> None:
        device, experts = layer.pointers.device, layer.pointers.shape[1]
        assert layer.suh is not None
        self.ext, self.layer, self.bits = ext, layer, float((layer.codes[0][0] & 31) // 2)
        suh = torch.full((experts,), layer.suh.data_ptr(), dtype=torch.int64, device=device)
        trellis, svh, down_suh = layer.pointers[:3], layer.pointers[3:6], layer.pointers[6]
        self.tables = [trellis[0], suh, svh[0], trellis[1], suh, svh[1], trellis[2], down_suh, svh[2]]
        width = ext.exl3_moe_max_concurrency(device.index or 0)

        def half(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float16, device=device)

        states, inters = (width, rows, layer.hidden), (width, rows, layer.inter)
        self.temporaries = [half(*states), half(*states), half(*inters), half(*inters)]
        slots = COOP_TOKENS * topk
        counters = slots * (layer.inter // 128) + COOP_TOKENS * (layer.hidden // 128) + 2 * slots + 3
        self.coop = [half(slots, layer.hidden), half(slots, layer.hidden), half(slots, layer.inter)]
        self.coop += [half(slots, layer.inter), half(slots, layer.inter)]
        self.coop.append(torch.empty((slots, layer.hidden), dtype=torch.float32, device=device))
        self.coop.append(torch.zeros((counters,), dtype=torch.int32, device=device))
        self.coop.append(torch.empty((COOP_TOKENS, layer.hidden), dtype=torch.float32, device=device))

    def grouped(self, x: Tensor, ids: Tensor, weights: Tensor) -> Call:
        """exl3_moe for every expert at once, its sorted tables made beforehand (its favour); sums into fp32."""
        experts = self.layer.pointers.shape[1]
        flat = ids.flatten().long()
        order = flat.argsort()
        tokens = torch.arange(x.shape[0], device=x.device).repeat_interleave(ids.shape[1])[order]
        count = torch.bincount(flat, minlength=experts + 1)
        sorted_weights = weights.flatten()[order].half()
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        busy = int((count > 0).sum())

        def call() -> Tensor:
            out.zero_()
            self.ext.exl3_moe(
                *(x, out, count, tokens, sorted_weights, *self.temporaries, 0, self.bits, self.bits, self.bits),
                *(*self.tables, True, False, True, False, True, False, LIMIT, busy, None, None, 1, 1 << 20, 16),
            )
            return out

        return call

    def cooperative(self, x: Tensor, ids: Tensor, weights: Tensor) -> Call:
        """exl3_moe_coop, up to 8 tokens."""
        selected, half_weights = ids.long(), weights.half()
        had_g, had_u, gu_g, gu_u, act, d_out, counters, out = self.coop

        def call() -> Tensor:
            self.ext.exl3_moe_coop(
                *(x, selected, half_weights, -1, -1, self.layer.hidden, *self.tables, None, None, None),
                *(self.bits, self.bits, self.bits, True, False, 0, LIMIT, True),
                *(had_g, had_u, gu_g, gu_u, act, d_out, counters, out, None, None),
            )
            return out

        return call


def grouped_mm(x: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Call:
    """torch._grouped_mm of dense bf16 weights [E, hidden, 2 inter] and [E, inter, hidden] over the same routing.

    Rows are gathered and sorted beforehand, and nothing is combined: only the two products and the activation.
    """
    flat = ids.flatten().long()
    order = flat.argsort()
    rows = x.to(torch.bfloat16).repeat_interleave(ids.shape[1], 0)[order].contiguous()
    ends = torch.cumsum(torch.bincount(flat, minlength=gate_up.shape[0]), 0).to(torch.int32)
    inter = down.shape[1]

    def call() -> Tensor:
        hidden = torch._grouped_mm(rows, gate_up, offs=ends)
        return torch._grouped_mm(torch.nn.functional.silu(hidden[:, :inter]) * hidden[:, inter:], down, offs=ends)

    return call
