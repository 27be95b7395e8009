"""A layer's routed experts over decoded weights: the reference of every tier.

Each tier computes the same sums in the same order; they differ in how rows are gathered and how many products are
made. The kernel and grouped tiers belong to the GPU and never get here (`tiers` refuses them without symbols).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from exl3_vllm.diagnostics import Diagnostics
from exl3_vllm.errors import LayoutError
from exl3_vllm.tiers import Resolution, rank_of


@dataclass(frozen=True)
class Plan:
    """How a deployment runs its experts; immutable once the weights are loaded."""

    resolution: Resolution
    cap: int
    row_tile: int


@dataclass(frozen=True)
class DecodedExperts:
    """gate_up [E, 2 I, H] holds gate above up, down [E, H, I]; limit clamps SwiGLU's inputs, None leaves them."""

    gate_up: Tensor
    down: Tensor
    limit: float | None

    @property
    def width(self) -> int:
        return self.down.shape[2]

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up, after clamping gate from above and up from both sides."""
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return functional.silu(gate) * up


class Scratch:
    """One buffer that grows to the largest request and stays; its allocations are counted."""

    def __init__(self, diagnostics: Diagnostics) -> None:
        self._diagnostics = diagnostics
        self._buffer: Tensor | None = None

    def take(self, rows: int, columns: int, like: Tensor) -> Tensor:
        """[rows, columns] of the buffer in the dtype and on the device of `like`; its content is undefined."""
        needed = rows * columns * like.element_size()
        if self._buffer is None or self._buffer.nbytes < needed or self._buffer.device != like.device:
            self._buffer = torch.empty(needed, dtype=torch.uint8, device=like.device)
            self._diagnostics.scratch_grew(needed)
        return self._buffer[:needed].view(like.dtype).view(rows, columns)


def run_experts(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    experts: DecodedExperts,
    plan: Plan,
    scratch: Scratch,
    diagnostics: Diagnostics,
) -> Tensor:
    """y [T, H] in the dtype of x: the weighted sum of each token's experts, summed in fp32 and rounded once.

    topk_weights and topk_ids [T, top-k]; an id of -1 is another rank's expert and contributes nothing. Up to `cap`
    tokens no expert can be fat, since a token's experts are distinct: that is the decode path, which counts nothing.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    call = _Call(x, topk_weights, topk_ids, experts, out, scratch)
    if x.shape[0] <= plan.cap:
        for expert in call.present():
            call.run_indexed(expert)
        return out.to(x.dtype)
    counts = torch.bincount(topk_ids.flatten() + 1, minlength=experts.down.shape[0] + 1)[1:].tolist()
    fat = [expert for expert, count in enumerate(counts) if count > plan.cap]
    tier, reason = label(plan, bool(fat))
    rows: dict[str, int] = {}
    if tier == "row_tile":
        rows[tier] = call.run_in_row_tiles(plan.row_tile)
    else:
        rows["thin"] = sum(call.run_indexed(expert) for expert, count in enumerate(counts) if 0 < count <= plan.cap)
        rows[tier] = rows.get(tier, 0) + call.run_fat(fat, tier)
    expected = sum(counts)
    if sum(rows.values()) != expected:
        what = f"handled {sum(rows.values())} rows of {expected}, so some expert was left out"
        raise LayoutError(f"tier {tier}", what, "Report this with the receipt of the rank")
    diagnostics.window.add_call(tier, reason, rows, max(counts, default=0), len(fat))
    diagnostics.window.fat_expert_runs += len(fat) if tier in ("sorted", "batched") else 0
    return out.to(x.dtype)


def label(plan: Plan, any_fat: bool) -> tuple[str, str]:
    """(tier, reason) of one prefill call of one layer, made anew for each call."""
    if plan.row_tile:
        return "row_tile", "row_tile_preempts_fat"
    if not any_fat:
        return "thin", "thin_only"
    resolution = plan.resolution
    if resolution.reason == "shared_suh_absent":
        return resolution.tier, "degraded_shared_suh"
    return resolution.tier, "legacy_default" if resolution.tier == "legacy" else f"{resolution.tier}_ok"


@dataclass
class _Call:
    """One call's inputs, and its sum so far."""

    x: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    experts: DecodedExperts
    out: Tensor
    scratch: Scratch

    def present(self) -> Iterator[int]:
        """The experts that have rows, ascending: every tier adds in this order."""
        for expert in torch.unique(self.topk_ids).tolist():
            if expert >= 0:
                yield expert

    def run_indexed(self, expert: int) -> int:
        """Legacy: find the expert's rows, and make gate and up one after the other."""
        tokens, slots = torch.where(self.topk_ids == expert)
        return self._run_apart(expert, tokens, self.topk_weights[tokens, slots])

    def run_fat(self, fat: list[int], tier: str) -> int:
        if not fat:
            return 0
        if rank_of(tier) < rank_of("sorted"):
            return sum(self.run_indexed(expert) for expert in fat)
        return sum(
            self._run_stacked(expert, tokens, weights)
            if rank_of(tier) >= rank_of("batched")
            else self._run_apart(expert, tokens, weights)
            for expert, tokens, weights in self._sorted_slices(fat)
        )

    def _sorted_slices(self, fat: list[int]) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Sort all rows by expert once; each fat expert is then one contiguous slice (expert, tokens, weights)."""
        flat = self.topk_ids.flatten()
        order = torch.argsort(flat, stable=True)
        bounds = torch.searchsorted(flat[order], torch.arange(self.experts.down.shape[0] + 1, device=flat.device))
        first = bounds.tolist()
        for expert in fat:
            picked = order[first[expert] : first[expert + 1]]
            yield expert, picked // self.topk_ids.shape[1], self.topk_weights.flatten()[picked]

    def _run_apart(self, expert: int, tokens: Tensor, weights: Tensor) -> int:
        rows, width = self.x[tokens], self.experts.width
        gate = functional.linear(rows, self.experts.gate_up[expert, :width])
        up = functional.linear(rows, self.experts.gate_up[expert, width:])
        return self._add(expert, tokens, weights, self.experts.swiglu(gate, up))

    def _run_stacked(self, expert: int, tokens: Tensor, weights: Tensor) -> int:
        """Batched: gate and up as one product into the persistent scratch."""
        width = self.experts.width
        both = self.scratch.take(len(tokens), 2 * width, self.x)
        torch.mm(self.x[tokens], self.experts.gate_up[expert].t(), out=both)
        return self._add(expert, tokens, weights, self.experts.swiglu(both[:, :width], both[:, width:]))

    def _add(self, expert: int, tokens: Tensor, weights: Tensor, inner: Tensor) -> int:
        routed = functional.linear(inner, self.experts.down[expert]).to(torch.float32)
        self.out.index_add_(0, tokens, routed * weights[:, None].to(torch.float32))
        return len(tokens)

    def run_in_row_tiles(self, rows: int) -> int:
        """All experts for a few tokens at a time; no expert is ever fat."""
        handled = 0
        for first in range(0, self.x.shape[0], rows):
            part = slice(first, first + rows)
            tile = _Call(
                self.x[part], self.topk_weights[part], self.topk_ids[part], self.experts, self.out[part], self.scratch
            )
            handled += sum(tile.run_indexed(expert) for expert in tile.present())
        return handled
