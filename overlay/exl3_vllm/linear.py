"""EXL3 for vLLM's linear layers and the output head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import Parameter
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearMethodBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from exl3_vllm import dense_ops  # noqa: F401  (registers its operator)
from exl3_vllm.cut import Cut, check_columns, check_rows, share_of_blocks
from exl3_vllm.errors import CompletenessError, LayoutError
from exl3_vllm.format import BLOCK, TrellisMatrix
from exl3_vllm.loading import ModelLoading
from exl3_vllm.names import ModuleNames
from exl3_vllm.packed_ops import TABLE_DECIDES, PackedPart, packed_layer
from exl3_vllm.parts import MatrixPart
from exl3_vllm.plain_sections import QKV, PlainSections

ShardId = str | int | tuple[int, ...] | None

DTYPES = {"I16": torch.int16, "F16": torch.float16, "I32": torch.int32}


def keeps_packed(part: MatrixPart) -> bool:
    """A GPU decodes as it multiplies, and has no room for dense weights; a CPU decodes once, at load."""
    return part.device.type == "cuda"


def output_ranges(layer: torch.nn.Module) -> list[tuple[int, int, int]]:
    """(features, begin, end) of every output section of a layer: its whole width and this rank's range of it."""
    if isinstance(layer, QKVParallelLinear):
        heads, kv_heads = layer.total_num_heads, layer.total_num_kv_heads
        kv_rank = layer.tp_rank // layer.num_kv_head_replicas
        sections = [(heads * layer.head_size, layer.num_heads * layer.head_size, layer.tp_rank)]
        for size in (layer.head_size, layer.v_head_size):
            sections.append((kv_heads * size, layer.num_kv_heads * size, kv_rank))
        return [(features, rank * width, (rank + 1) * width) for features, width, rank in sections]
    if isinstance(layer, ParallelLMHead):
        indices = layer.shard_indices
        return [(layer.org_vocab_size, indices.org_vocab_start_index, indices.org_vocab_end_index)]
    rank, size = (layer.tp_rank, layer.tp_size) if isinstance(layer, ColumnParallelLinear) else (0, 1)
    sizes = layer.output_sizes if isinstance(layer, MergedColumnParallelLinear) else [layer.output_size]
    ranges = [(full, rank * (full // size), (rank + 1) * (full // size)) for full in sizes]
    # Some models replicate sections of a merged layer: they multiply its size by the ranks, and every rank takes all.
    for section in getattr(layer, "replicated_shard_ids", ()):
        ranges[section] = (sizes[section] // size, 0, sizes[section] // size)
    return ranges


def input_range(layer: torch.nn.Module) -> tuple[int, int, int]:
    """(features, begin, end) of the inputs: the whole width and this rank's range of it."""
    features = layer.input_size
    if not isinstance(layer, RowParallelLinear):
        return features, 0, features
    width = features // layer.tp_size
    return features, layer.tp_rank * width, (layer.tp_rank + 1) * width


def unseen_width(layer: torch.nn.Module, prefix: str, names: ModuleNames) -> bool:
    """Whether ranks may differ in the width between `gate_up_proj` and `down_proj`, and have to.

    The activation between the two takes what comes. Both must be trellis matrices, so that both are cut here; only a
    width that ranks could not share evenly in whole blocks is cut unevenly (GLM-4.5-Air: 1408 on two ranks).
    """
    parent, _, leaf = prefix.rpartition(".")
    if not isinstance(layer, (MergedColumnParallelLinear, RowParallelLinear)) or layer.tp_size == 1:
        return False
    if leaf == "gate_up_proj" and isinstance(layer, MergedColumnParallelLinear):
        widths = set(layer.output_sizes)
    elif leaf == "down_proj" and isinstance(layer, RowParallelLinear):
        widths = {layer.input_size}
    else:
        return False
    both = all(names.stored(f"{parent}.{name}") for name in ("gate_proj", "up_proj", "down_proj"))
    return both and len(widths) == 1 and widths.pop() % (BLOCK * layer.tp_size) != 0


def cuts_of(layer: torch.nn.Module, matrix: TrellisMatrix, sections: Sequence[int], uneven: bool = False) -> list[Cut]:
    """This rank's cuts of a stored matrix that holds the given output sections of the layer side by side.

    `uneven`: the width that ranks divide is shared in whole blocks (see `unseen_width`).

    Raises
    ------
    LayoutError: sizes that do not fit the model, or a row cut inside a block of 128.
    """
    features, begin, end = input_range(layer)
    ranges = output_ranges(layer)
    if uneven and isinstance(layer, RowParallelLinear):
        begin, end = share_of_blocks(matrix, features, layer.tp_rank, layer.tp_size)
    elif uneven:
        ranges = [(full, *share_of_blocks(matrix, full, layer.tp_rank, layer.tp_size)) for full, _, _ in ranges]
    rows = check_rows(matrix, begin, end, features)
    total = sum(ranges[section][0] for section in sections)
    cuts, offset = [], 0
    for section in sections:
        width, first, last = ranges[section]
        cuts.append(Cut(*rows, *check_columns(matrix, offset + first, offset + last, total)))
        offset += width
    return cuts


class Exl3LinearMethod(LinearMethodBase):
    """Loads the matrices of one layer, each with its own scales, rate and codebook, and computes with them.

    Parameters
    ----------
    prefix: the layer's name in vLLM's model.
    matrices: the stored matrices that make up the layer, in the order of its output sections.
    loading: the account that this layer reports to.
    uneven: the ranks' shares may differ by a block (see `unseen_width`).
    plain: output sections that are stored as plain weights, by number, with their names.
    """

    def __init__(
        self,
        prefix: str,
        matrices: Sequence[TrellisMatrix],
        loading: ModelLoading,
        uneven: bool = False,
        plain: Mapping[int, str] | None = None,
    ) -> None:
        self.prefix = prefix
        self.plain = PlainSections(prefix, plain or {})
        self.uneven = uneven
        self.matrices = matrices
        self.loading = loading
        self.parts: list[MatrixPart] = []
        self.packed: list[PackedPart] = []
        asked = loading.settings.reconstruct_rows
        self.reconstruct_rows = TABLE_DECIDES if asked is None else asked

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Plan the cuts, and register one empty placeholder per kind of stored tensor for vLLM's loader to find."""
        groups = self._groups(len(output_ranges(layer)))
        for matrix, sections in zip(self.matrices, groups, strict=True):
            self.parts.append(MatrixPart(matrix, cuts_of(layer, matrix, sections, self.uneven)))
        self.groups = groups
        self.dtype = params_dtype
        self.inputs = input_size_per_partition
        self.outputs = sum(output_partition_sizes)
        if self.uneven:
            self._take_own_share(layer)
        for kind in sorted({kind for matrix in self.matrices for kind in matrix.tensors if kind != "bias"}):
            dtype = next(DTYPES[matrix.tensors[kind].dtype] for matrix in self.matrices if kind in matrix.tensors)
            placeholder = Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
            placeholder.weight_loader = partial(self._load, layer, kind)
            layer.register_parameter(kind, placeholder)
        self.plain.create(layer, params_dtype, output_ranges(layer), input_size)

    def _take_own_share(self, layer: torch.nn.Module) -> None:
        """Sizes are those of this rank's blocks, not an equal share."""
        cuts = [cut for part in self.parts for cut in part.cuts]
        if isinstance(layer, RowParallelLinear):
            self.inputs = min(cuts[0].row_end, layer.input_size) - cuts[0].row_begin
            return
        self.outputs = sum(cut.columns for cut in cuts)
        for matrix in self.matrices:
            if matrix.has_bias:
                what = "has a bias, which vLLM would cut into equal shares, and its columns can not be"
                next_step = "Choose a tensor parallel size that leaves whole blocks per rank"
                raise LayoutError(f"matrix {matrix.name}", what, next_step)

    def _groups(self, count: int) -> list[list[int]]:
        """The output sections of each matrix: one each, one matrix for all, or a leading span."""
        if len(self.matrices) + len(self.plain.names) == count:
            return [[number] for number in range(count) if number not in self.plain.names]
        if self.plain.names:
            what = f"fuses the trellis matrix {self.matrices[0].name} with the plain weight {self.plain.first}"
            raise LayoutError(f"layer {self.prefix}", what, "Convert the model so that both are stored alike")
        if len(self.matrices) == 1:
            return [list(range(count))]
        if len(self.matrices) < count:
            span = count - len(self.matrices) + 1
            return [list(range(span)), *([number] for number in range(span, count))]
        what = f"has {count} outputs side by side, the checkpoint holds {len(self.matrices)} matrices for it"
        raise LayoutError(f"layer {self.prefix}", what, "Check that config.json belongs to this checkpoint")

    def _part(self, shard: ShardId) -> MatrixPart:
        """The part that vLLM's shard id means: "q", a number, a span of numbers, or None for all."""
        if shard is None:
            wanted = [section for group in self.groups for section in group]
        elif isinstance(shard, tuple):
            wanted = list(shard)
        else:
            wanted = [QKV[shard] if isinstance(shard, str) else shard]
        if wanted not in self.groups:
            what = f"vLLM loads its shard {shard!r}, the checkpoint's matrices are {[m.name for m in self.matrices]}"
            raise LayoutError(f"layer {self.prefix}", what, "Report this architecture: its fusion is not known yet")
        return self.parts[self.groups.index(wanted)]

    def _load(
        self, layer: torch.nn.Module, kind: str, param: Parameter, tensor: torch.Tensor, shard: ShardId = None
    ) -> None:
        self._part(shard).load(kind, tensor, param.device)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Check that everything came, decode it, and let the stored tensors go.

        Raises
        ------
        CompletenessError: a stored tensor never came, or a stored bias has no place in the layer.
        """
        if not self.parts:
            return
        for part in self.parts:
            part.check_complete()
            if part.matrix.has_bias and getattr(layer, "bias", None) is None:
                what = "is in the checkpoint, and the model's layer has no bias"
                next_step = "Check that config.json belongs to this checkpoint"
                raise CompletenessError(f"tensor {part.matrix.name}.bias", what, next_step)
        self.plain.check_complete()
        for kind in ("trellis", "suh", "svh", "su", "sv", "mcg", "mul1", "weight"):
            if hasattr(layer, kind):
                delattr(layer, kind)
        if keeps_packed(self.parts[0]):
            self._keep_packed(layer)
        else:
            layer.weight = Parameter(self._decoded(), requires_grad=False)
            self.plain.weights = {}
        self.loading.filled(self.prefix, sum(part.trellis_bytes for part in self.parts))
        self.parts = []

    def _keep_packed(self, layer: torch.nn.Module) -> None:
        self.packed = [one for part in self.parts for one in part.packed()]
        self.shared_suh = all(torch.equal(one.suh, self.packed[0].suh) for one in self.packed)
        self.padding = self.outputs - self.plain.rows - sum(one.columns for one in self.packed)
        self.plain.keep(self.groups, [sum(cut.columns for cut in part.cuts) for part in self.parts], self.padding)
        if self.packed[0].trellis.is_cuda:
            from exl3_vllm import gpu

            rows = self.loading.limits.rows
            self.packed = gpu.keep_dense(self.packed, self.shared_suh, self.reconstruct_rows, rows)
        # vLLM's MLA asks for a dense weight by multiplying with the unit matrix; it looks for this name first.
        layer.weight_packed = self.packed[0].trellis

    def _decoded(self) -> torch.Tensor:
        """[outputs, inputs] of this rank; rows of a padded vocabulary are zero."""
        pieces = {
            group[0]: part.decoded(self.inputs, self.dtype) for group, part in zip(self.groups, self.parts, strict=True)
        }
        weight = torch.cat([piece for _, piece in sorted({**pieces, **self.plain.weights}.items())])
        return torch.nn.functional.pad(weight, (0, 0, 0, self.outputs - weight.shape[0]))

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self.packed:
            if self.plain.names:
                y = packed_layer(x, self.packed, self.shared_suh, self.padding, self.reconstruct_rows, None)
                y = self.plain.join(x, y)
                return y if bias is None else y + bias.to(y.dtype)
            return packed_layer(x, self.packed, self.shared_suh, self.padding, self.reconstruct_rows, bias)
        return torch.ops.exl3.dense_linear(x, layer.weight, bias)
