"""The trellis matrices of one vLLM layer while they are loaded: what is expected, what has come, what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from exl3_vllm import decode
from exl3_vllm.cut import Cut, cut_tensor
from exl3_vllm.errors import CheckpointError, CompletenessError
from exl3_vllm.format import TrellisMatrix
from exl3_vllm.packed_ops import PackedPart


@dataclass
class MatrixPart:
    """One rank's share of one stored matrix: one or more cuts, and the tensors of each once they have come."""

    matrix: TrellisMatrix
    cuts: Sequence[Cut]
    tensors: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    markers: set[str] = field(default_factory=set)

    def load(self, kind: str, tensor: Tensor, device: torch.device) -> None:
        """Take one stored tensor; the payload is checked here, the shape was promised by the header.

        Raises
        ------
        CheckpointError: another shape than the header's, or scales that are not finite.
        """
        entry = self.matrix.tensors[kind]
        if tuple(tensor.shape) != entry.shape:
            what = f"came as {list(tensor.shape)}, its header says {list(entry.shape)}"
            raise CheckpointError(f"tensor {entry.name}", what, "Load the same files that were checked")
        if kind in ("mcg", "mul1"):
            self.markers.add(kind)
            return
        if kind in ("suh", "svh") and not torch.isfinite(tensor).all():
            raise CheckpointError(f"tensor {entry.name}", "holds a value that is not finite", "Fetch the file again")
        for number, cut in enumerate(self.cuts):
            self.tensors[number, kind] = cut_tensor(kind, tensor, cut, device)

    def check_complete(self) -> None:
        """Raises CompletenessError naming the first tensor that never came."""
        for kind, entry in self.matrix.tensors.items():
            if kind == "bias":
                continue
            came = kind in self.markers or all((number, kind) in self.tensors for number in range(len(self.cuts)))
            if not came:
                what = "is in the checkpoint and was not loaded, so its layer would compute nonsense"
                raise CompletenessError(f"tensor {entry.name}", what, "Check the model class and the shard index")

    @property
    def device(self) -> torch.device:
        """Where the share lies."""
        return self.tensors[0, "trellis"].device

    @property
    def trellis_bytes(self) -> int:
        return sum(tensor.nbytes for (_, kind), tensor in self.tensors.items() if kind == "trellis")

    def scales(self, number: int) -> tuple[Tensor, Tensor]:
        """(suh, svh) fp16 of one cut; legacy packed signs are unpacked."""
        found = []
        for kind in (self.matrix.input_scale, self.matrix.output_scale):
            tensor = self.tensors[number, kind]
            found.append(decode.unpack_signs(tensor) if kind in ("su", "sv") else tensor)
        return found[0], found[1]

    def decoded(self, rows: int, dtype: torch.dtype) -> Tensor:
        """The share as a dense weight [outputs, rows] in the original basis; padding rows and columns cut away."""
        shares = []
        for number, cut in enumerate(self.cuts):
            suh, svh = self.scales(number)
            weight = decode.dequantise(self.tensors[number, "trellis"], suh, svh, self.matrix.codebook)
            first = cut.column_begin - cut.covering[0]
            shares.append(weight[:rows, first : first + cut.columns].t().to(dtype))
        return torch.cat(shares)

    def packed(self) -> list[PackedPart]:
        """The share as it is stored, one part per cut."""
        shares = []
        for number, cut in enumerate(self.cuts):
            suh, svh = self.scales(number)
            first = cut.column_begin - cut.covering[0]
            trellis = self.tensors[number, "trellis"]
            shares.append(PackedPart(trellis, suh, svh, self.matrix.codebook, first, cut.columns))
        return shares
