"""Cutting a trellis matrix W[K, N] for one rank: rows and columns, in blocks of 128.

The Hadamard transforms mix 128 neighbouring rows (or columns). Columns may be cut anywhere: the blocks that cover them
are loaded and the surplus output is dropped. Rows may not: half a block of inputs says nothing about the other half.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from exl3_vllm.errors import LayoutError
from exl3_vllm.format import BLOCK, TILE, TrellisMatrix

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Cut:
    """Rows [row_begin, row_end) and columns [column_begin, column_end) of a stored matrix that one rank computes."""

    row_begin: int
    row_end: int
    column_begin: int
    column_end: int

    @property
    def covering(self) -> tuple[int, int]:
        """The columns in whole blocks that hold the wanted ones."""
        return self.column_begin // BLOCK * BLOCK, -(-self.column_end // BLOCK) * BLOCK

    @property
    def columns(self) -> int:
        return self.column_end - self.column_begin


def check_rows(matrix: TrellisMatrix, begin: int, end: int, features: int) -> tuple[int, int]:
    """The stored rows for the inputs [begin, end) of `features` inputs.

    The last rank also gets the padding rows of the stored matrix: their scales are not zero, so the input must be.

    Raises
    ------
    LayoutError: a boundary inside a block, or more inputs than the matrix has rows.
    """
    where = f"matrix {matrix.name}"
    padded = -(-features // BLOCK) * BLOCK
    if padded != matrix.in_features:
        what = f"the model has {features} inputs here, the checkpoint stores {matrix.in_features} rows"
        raise LayoutError(where, what, "Use the config.json that belongs to this checkpoint")
    if begin % BLOCK or (end % BLOCK and end != features):
        what = (
            f"tensor parallelism would cut its {features} input rows into {end - begin} per rank, at row"
            f" {begin if begin % BLOCK else end}, inside a Hadamard block of {BLOCK}"
        )
        raise LayoutError(where, what, f"Choose a tensor parallel size that leaves a multiple of {BLOCK} rows per rank")
    return begin, padded if end == features else end


def share_of_blocks(matrix: TrellisMatrix, features: int, rank: int, size: int) -> tuple[int, int]:
    """(begin, end) of the features that one of `size` ranks takes, in whole blocks, as evenly as they go.

    1408 features on two ranks are 5 and 6 blocks: 640 and 768. Only where both sides of the cut are ours, as inside an
    expert, may ranks differ in width.

    Raises
    ------
    LayoutError: fewer blocks than ranks.
    """
    blocks = -(-features // BLOCK)
    if blocks < size:
        what = f"its {features} features are {blocks} blocks of {BLOCK}, too few for {size} ranks"
        raise LayoutError(f"matrix {matrix.name}", what, f"Choose a tensor parallel size up to {blocks}")
    begin, end = blocks * rank // size * BLOCK, blocks * (rank + 1) // size * BLOCK
    return begin, min(end, features)


def check_columns(matrix: TrellisMatrix, begin: int, end: int, features: int) -> tuple[int, int]:
    """The stored columns for the outputs [begin, end) of `features` outputs; only the total must agree."""
    if -(-features // BLOCK) * BLOCK != matrix.out_features or not 0 <= begin <= end <= features:
        what = f"the model has {features} outputs here, the checkpoint stores {matrix.out_features} columns"
        next_step = "Use the config.json that belongs to this checkpoint"
        raise LayoutError(f"matrix {matrix.name}", what, next_step)
    return begin, end


def cut_tensor(kind: str, tensor: Tensor, cut: Cut, device: torch.device | None = None) -> Tensor:
    """The part of a stored tensor (trellis, suh, svh, su, sv) that `cut` needs, in whole blocks, on `device`; always a
    copy, so the mapped file can be let go, and only one: seven engines that copied twice, with a thread per core each,
    took 9 ms for a tensor."""
    first, last = cut.covering
    if kind == "trellis":
        part = tensor[cut.row_begin // TILE : cut.row_end // TILE, first // TILE : last // TILE]
    elif kind in ("suh", "su"):
        unit = TILE if kind == "su" else 1
        part = tensor[cut.row_begin // unit : cut.row_end // unit]
    elif kind in ("svh", "sv"):
        unit = TILE if kind == "sv" else 1
        part = tensor[first // unit : last // unit]
    else:
        raise ValueError(f"{kind} is no part of a trellis matrix that can be cut")
    return part.clone() if device is None or device == part.device else part.to(device).contiguous()
