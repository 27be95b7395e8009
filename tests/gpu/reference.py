"""Random EXL3 matrices and their fp64 products, from exl3_vllm.decode alone."""

from __future__ import annotations

import torch
from exl3_vllm import decode
from exl3_vllm.kernels import Matrix
from torch import Tensor

DEVICE = "cuda"
NAMES = ("3inst", "mcg", "mul1")
DENSE_LIMIT, MOE_LIMIT = 6e-4, 8e-4  # relative L2, fp32 output (bar K7)


def signs(n: int, size: float) -> Tensor:
    """Random signs with magnitudes around ``size``, as a quantiser's suh and svh have them."""
    magnitude = size * (0.75 + 0.5 * torch.rand(n, device=DEVICE))
    return torch.where(torch.rand(n, device=DEVICE) < 0.5, -magnitude, magnitude).half()


def matrix(
    k: int, n: int, rate2: int, codebook: int, *, suh: Tensor | None = None, columns: int | None = None
) -> Matrix:
    """A random matrix: any bits are a valid trellis. Outputs of unit rows have about unit size."""
    trellis = torch.randint(-32768, 32768, (k // 16, n // 16, 8 * rate2), device=DEVICE, dtype=torch.int32).short()
    return Matrix(trellis, signs(k, k**-0.5) if suh is None else suh, signs(n, 1.0), NAMES[codebook], columns or n)


def inner(m: Matrix) -> Tensor:
    return decode.inner_weight(m.trellis, m.codebook)


def hadamard(x: Tensor) -> Tensor:
    """Blocks of 128 along the last dimension, fp64."""
    h = decode.hadamard(x.device).double() * decode.BLOCK**0.5
    h = torch.where(h > 0, 1.0, -1.0).double() / decode.BLOCK**0.5
    return (x.double().unflatten(-1, (-1, 128)) @ h).flatten(-2)


def weight(m: Matrix) -> Tensor:
    """The weight in the original basis, fp64 [K, N]."""
    w = hadamard(inner(m).double().T).T * m.suh.double()[:, None]
    return hadamard(w) * m.svh.double()


def product(x: Tensor, m: Matrix) -> Tensor:
    """fp64 [M, columns]."""
    k = x.shape[1]
    return (x.double() @ weight(m)[:k])[:, : m.columns]


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return torch.nn.functional.silu(gate) * up


def moe(
    x: Tensor, ids: Tensor, weights: Tensor, gate: list[Matrix], up: list[Matrix], down: list[Matrix], limit: float
) -> Tensor:
    """fp64 [T, hidden], expert by expert."""
    out = torch.zeros((x.shape[0], x.shape[1]), dtype=torch.float64, device=x.device)
    for e in range(len(gate)):
        token, slot = torch.where(ids == e)
        if len(token):
            h = swiglu(product(x[token], gate[e]), product(x[token], up[e]), limit)
            out.index_add_(0, token, product(h, down[e]) * weights[token, slot].double()[:, None])
    return out


def error(got: Tensor, want: Tensor) -> float:
    """Relative L2; NaN counts as infinite."""
    difference = ((got.double() - want.double()).norm() / want.double().norm()).item()
    return difference if difference == difference else float("inf")


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An output in which every element that a kernel forgets shows as NaN."""
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)
