"""Opaque operators over decoded weights: the reference backend, used on the CPU and as the oracle of every other one.

They are opaque so that no compiler traces into them: a branch on the number of rows then stays a branch at run time
(baked in at trace time it once cost a deployment 60 % of its decode speed). Routed experts need no operator of their
own: vLLM runs them inside its opaque `vllm::moe_forward`.
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
