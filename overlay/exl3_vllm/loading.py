"""One model's loading on one rank: which layers took which matrices, and whether all of them came.

vLLM skips its own completeness check for quantised models, so a tensor that found no layer, or a layer that found no
tensor, would pass in silence. Layers announce themselves while the model is built and report when they are filled; the
last report closes the loading.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from exl3_vllm.errors import CompletenessError
from exl3_vllm.experts import Plan
from exl3_vllm.format import Checkpoint, TrellisMatrix
from exl3_vllm.settings import Settings

_LAYER = re.compile(r"\.layers\.(\d+)\.")


# Named functions, not lambdas: vLLM pickles its configuration, and what hangs on it, to each worker.
def _no_layer_is_ignored(_layer: int) -> bool:
    return False


def _head_is_not_elsewhere() -> bool:
    return False


class ModelLoading:
    """The account of one model on one rank.

    Parameters
    ----------
    checkpoint: what the files hold.
    settings: what the operator asked for.
    on_complete: called once, when every announced layer is filled and every matrix is accounted for.

    Attributes
    ----------
    shared_suh: for each layer of experts, whether gate and up of every expert have the same input scales.
    plan: how the experts run; set when loading is complete.
    draft: the model is the draft layers of a checkpoint that another model, its target, serves.
    limits: `gpu.Limits` of this start, and packed_experts: the `gpu.PackedExperts` of each layer; on a GPU only.
    """

    def __init__(self, checkpoint: Checkpoint, settings: Settings, on_complete: Callable[[], None]) -> None:
        self.checkpoint = checkpoint
        self.settings = settings
        self.on_complete = on_complete
        self.layers: dict[str, list[TrellisMatrix]] = {}
        self.trellis_bytes: dict[str, int] = {}
        self.shared_suh: dict[str, bool] = {}
        self.plan: Plan | None = None
        self.limits: Any = None
        self.packed_experts: list[Any] = []
        self.ignored_layers: Callable[[int], bool] = _no_layer_is_ignored
        self.head_elsewhere: Callable[[], bool] = _head_is_not_elsewhere
        self.draft = False

    def announce(self, prefix: str, matrices: Iterable[TrellisMatrix]) -> None:
        """The layer `prefix` will take these matrices."""
        self.layers[prefix] = list(matrices)

    def filled(self, prefix: str, trellis_bytes: int) -> None:
        """The layer `prefix` holds all its tensors; `trellis_bytes` of them lie on this rank."""
        self.trellis_bytes[prefix] = trellis_bytes
        if len(self.trellis_bytes) == len(self.layers):
            self.check_all_taken()
            self.on_complete()

    def check_all_taken(self) -> None:
        """Every matrix of the checkpoint belongs to a layer of this rank, or to a layer that this rank leaves out.

        Raises
        ------
        CompletenessError: naming the first matrix that no layer took.
        """
        taken = {matrix.name for matrices in self.layers.values() for matrix in matrices}
        for name in self.checkpoint.matrices:
            if name in taken or self._left_out(name):
                continue
            what = "is in the checkpoint, and no layer of the model took it"
            next_step = "Check that config.json names the architecture of this checkpoint"
            raise CompletenessError(f"tensor {name}.trellis", what, next_step)

    def _left_out(self, name: str) -> bool:
        """Named rules: draft layers (`mtp.`, or numbered past the model's own), and layers and the head where another
        pipeline stage has them. A draft model leaves out all but the draft layers: the rest is its target's."""
        match = _LAYER.search(f".{name}.")
        if name.startswith("mtp."):
            return not self.draft
        if match is not None:
            return self.ignored_layers(int(match.group(1)))
        return self.draft or (name.rpartition(".")[2] == "lm_head" and self.head_elsewhere())
