"""Output sections of a fused layer that the checkpoint stores as plain weights, beside sections that are trellises.

Converters leave small matrices plain (one output per head, say) that vLLM fuses with large ones: GLM-5.3's KDA has q,
k, v, b, f_a and g_a in one layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter, functional

from exl3_vllm.errors import CheckpointError, CompletenessError

Range = tuple[int, int, int]

QKV = {"q": 0, "k": 1, "v": 2}
"""vLLM's names of the sections of an attention's fused layer."""


class PlainSections:
    """This rank's rows of the plain sections of one layer.

    `names`: the sections by number, with the checkpoint's names; `weights`: their rows [rows, inputs] as they come.
    """

    def __init__(self, layer: str, names: Mapping[int, str]) -> None:
        self.layer = layer
        self.names = dict(names)
        self.weights: dict[int, Tensor] = {}
        self.stacked: Tensor | None = None
        self.order: list[tuple[bool, int, int]] = []

    @property
    def first(self) -> str:
        return next(iter(self.names.values()))

    @property
    def rows(self) -> int:
        return sum(weight.shape[0] for weight in self.weights.values())

    def create(self, layer: torch.nn.Module, dtype: torch.dtype, ranges: Sequence[Range], inputs: int) -> None:
        """Register the placeholder that vLLM's loader looks for. `ranges`: (features, begin, end) of each section."""
        if self.names:
            placeholder = Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
            placeholder.weight_loader = partial(self._load, ranges, inputs)
            layer.register_parameter("weight", placeholder)

    def _load(self, ranges: Sequence[Range], inputs: int, param: Parameter, tensor: Tensor, shard: int | str) -> None:
        section = QKV[shard] if isinstance(shard, str) else shard
        features, begin, end = ranges[section]
        if tuple(tensor.shape) != (features, inputs):
            what = f"is {list(tensor.shape)}, the model has {features} outputs of {inputs} inputs here"
            raise CheckpointError(f"tensor {self.names[section]}.weight", what, "Check that config.json belongs to it")
        self.weights[section] = tensor[begin:end].to(param.device, param.dtype, copy=True)

    def check_complete(self) -> None:
        """Raises CompletenessError naming the first weight that never came."""
        for number, name in self.names.items():
            if number not in self.weights:
                what = f"is part of the layer {self.layer} and was not loaded"
                raise CompletenessError(f"tensor {name}.weight", what, "Check the model class and the shard index")

    def keep(self, groups: Sequence[Sequence[int]], widths: Sequence[int], padding: int) -> None:
        """Remember where each section's outputs stand: in a product of the trellises (`widths` of each of `groups`,
        then `padding`), or in one of the plain weights."""
        if not self.names:
            return
        self.stacked = torch.cat([self.weights[number] for number in sorted(self.weights)])
        places: dict[int, tuple[bool, int, int]] = {}
        begin = 0
        for group, width in zip(groups, widths, strict=True):
            places[group[0]] = (False, begin, begin + width)
            begin += width
        places[max(*places, *self.weights) + 1] = (False, begin, begin + padding)
        begin = 0
        for number in sorted(self.weights):
            rows = self.weights[number].shape[0]
            places[number] = (True, begin, begin + rows)
            begin += rows
        self.order = [place for _, place in sorted(places.items())]
        self.weights = {}

    def join(self, x: Tensor, y: Tensor) -> Tensor:
        """The layer's outputs in order, from its inputs x [..., K] and the trellises' product y [..., columns]."""
        assert self.stacked is not None
        z = functional.linear(x, self.stacked.to(x.dtype))
        return torch.cat([(z if plain else y)[..., begin:end] for plain, begin, end in self.order], -1)
