"""The GPU backend: which kernels are there, for which rates, and a layer of experts run by them.

On a GPU matrices stay packed, and a layer's experts are one launch over rows that the device sorts by expert: the tier
`grouped`, or `sorted` where gate and up have scales of their own. A rate that the kernels lack stops the start before
weights are read, a tier that they do not run at the end of loading.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from exl3_vllm import elf, kernels
from exl3_vllm.diagnostics import Diagnostics, Facts
from exl3_vllm.errors import LayoutError, TierError
from exl3_vllm.experts import Plan, label
from exl3_vllm.format import CODEBOOKS, TrellisMatrix
from exl3_vllm.packed_ops import PackedPart
from exl3_vllm.tiers import GROUPED_SYMBOLS, KERNEL_SYMBOLS, REBUILD, Resolution


def require_kernels(matrices: Iterable[TrellisMatrix]) -> None:
    """Load the kernels and hold them against the checkpoint.

    Raises
    ------
    KernelError: there is no usable library.
    LayoutError: it lacks a rate and codebook; the message names the first matrix that needs it.
    """
    held = set(kernels.load())
    for matrix in matrices:
        if (matrix.half_bits, CODEBOOKS.index(matrix.codebook)) not in held:
            known = ", ".join(f"{half / 2:g} bits {CODEBOOKS[code]}" for half, code in sorted(held))
            what = f"has {matrix.bits:g} bits {matrix.codebook}, and the kernels were built for {known}"
            raise LayoutError(f"matrix {matrix.name}", what, REBUILD)


def describe(facts: Facts) -> None:
    """Fill in what only a GPU has: capability, and the symbols and targets of the library."""
    library = elf.read(kernels.LIBRARY)
    manifest = json.loads((library.section("exl3.manifest") or b"").split(b"\0")[0] or b"{}")
    facts.backend = "cuda"
    facts.symbols = frozenset(library.exported) & {"exl3_moe", *KERNEL_SYMBOLS, *GROUPED_SYMBOLS}
    facts.kernel_targets = tuple(manifest.get("targets", ()))
    facts.capability = torch.cuda.get_device_capability()


def require_runnable(resolution: Resolution, row_tile: int) -> None:
    """Raises TierError for a tier that no kernel runs as such, and for row tiles."""
    if row_tile:
        what = f"asks for tiles of {row_tile} rows, and on a GPU experts run in one launch"
        raise TierError("EXL3_MOE_ROW_TILE", what, "Remove it")
    if resolution.tier not in ("sorted", "grouped"):
        what = f"is what the request comes to ({resolution.reason}), and on a GPU experts run sorted or grouped"
        raise TierError(f"tier {resolution.tier}", what, "Ask for auto")


class PackedExperts:
    """A layer's experts as the kernels take them: pointers to packed matrices, in order of the local experts.

    Raises
    ------
    LayoutError: an expert's gate and up differ in rate or codebook, or experts differ in shape.
    """

    def __init__(
        self, gate: Sequence[PackedPart], up: Sequence[PackedPart], down: Sequence[PackedPart], limit: float | None
    ) -> None:
        groups = [[_matrix(part) for part in group] for group in (gate, up, down)]
        try:
            self.stacked = kernels.experts(*groups)
        except ValueError as error:
            next_step = "Quantise gate and up of an expert at one rate"
            raise LayoutError("experts", f"can not run in one launch ({error})", next_step) from error
        self.limit = limit or 0.0

    def run(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, plan: Plan, diagnostics: Diagnostics) -> Tensor:
        """y [T, H] of x [T, H]; no host synchronisation, so rows are counted as routed, not looked at."""
        y = kernels.moe(x, topk_ids.to(torch.int32), topk_weights.to(torch.float32), self.stacked, limit=self.limit)
        if x.shape[0] > plan.cap:
            diagnostics.window.add_launched_call(*label(plan, True), topk_ids.numel())
        return y


def _matrix(part: PackedPart) -> kernels.Matrix:
    return kernels.Matrix(part.trellis, part.suh, part.svh, part.codebook, part.columns)
