"""Opaque operators over decoded weights: the reference backend, used on the CPU and as the oracle of every other one.

They are opaque so that no compiler traces into them: a branch on the number of rows then stays a branch at run time
(baked in at trace time it once cost a deployment 60 % of its decode speed).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


@torch.library.custom_op("exl3::dense_linear", mutates_args=())
def dense_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y [..., N] of x [..., K] with a decoded weight [N, K]; dtype of x, always a fresh tensor."""
    return functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


@dense_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@torch.library.custom_op("exl3::dense_moe", mutates_args=())
def dense_moe(x: Tensor, gate_up: Tensor, down: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
    """y [T, H] of x [T, H] through the chosen experts, one expert after another (the legacy tier).

    gate_up [E, 2 I, H] holds gate above up, down [E, H, I]; topk_weights and topk_ids [T, top-k]; an id of -1 is an
    expert of another rank and is left out. Sums over experts are kept in fp32 and rounded once.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    width = down.shape[2]
    for expert in torch.unique(topk_ids).tolist():
        if expert < 0:
            continue
        tokens, slots = torch.where(topk_ids == expert)
        hidden = functional.linear(x[tokens], gate_up[expert])
        hidden = functional.silu(hidden[:, :width]) * hidden[:, width:]
        routed = functional.linear(hidden, down[expert]).to(torch.float32)
        out.index_add_(0, tokens, routed * topk_weights[tokens, slots, None].to(torch.float32))
    return out.to(x.dtype)


@dense_moe.register_fake
def _(x: Tensor, gate_up: Tensor, down: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
    return torch.empty_like(x)
