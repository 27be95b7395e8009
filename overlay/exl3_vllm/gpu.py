"""The GPU backend: which kernels are there, for which rates, and a layer of experts run by them.

On a GPU matrices stay packed. A layer's experts are one launch over rows that the device sorts by expert: the tier
`grouped`, or `sorted` where gate and up have scales of their own. The tiers below run when they are asked for
(`expert_loops`). A rate that the kernels lack stops the start before weights are read; a tier or a graph that can not
be is refused at the end of loading.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from exl3_vllm import elf, gpu_dense, kernels, plans
from exl3_vllm.arena import ARENA
from exl3_vllm.diagnostics import DIAGNOSTICS, Diagnostics, Facts
from exl3_vllm.errors import LayoutError, SettingError, TierError
from exl3_vllm.expert_loops import TIERS as LOOPS
from exl3_vllm.expert_loops import FatExperts
from exl3_vllm.experts import Plan, Scratch, label
from exl3_vllm.format import CODEBOOKS, TrellisMatrix
from exl3_vllm.gpu_dense import DISPATCH
from exl3_vllm.loading import ModelLoading
from exl3_vllm.packed_ops import PackedPart
from exl3_vllm.tiers import GROUPED_SYMBOLS, KERNEL_SYMBOLS, REBUILD, Resolution

TABLE = "EXL3_KERNEL_TABLE"
"""Environment: the table that `exl3_vllm.bench --write-table` wrote on this machine, or the path of its file."""


@dataclass(frozen=True)
class Limits:
    """What a start says of itself: most rows of one step, most rows of a captured graph (0: none)."""

    rows: int
    captured: int
    graphs: str

    @classmethod
    def of(cls, config: Any) -> Limits:
        """Read vLLM's configuration, final when the model is built."""
        compilation = config.compilation_config
        mode = compilation.cudagraph_mode
        graphs = "NONE" if mode is None or config.model_config.enforce_eager else mode.name
        sizes = (compilation.cudagraph_capture_sizes or [0]) if graphs != "NONE" else [0]
        return cls(config.scheduler_config.max_num_batched_tokens, max(sizes), graphs)


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


def begin(graph_decode: bool, limits: Limits) -> None:
    """Before the model is built: choose the dispatch table, and hold the wish for graphs against the start.

    Raises
    ------
    SettingError: VLLM_EXL3_GRAPH_DECODE=0 and vLLM would capture graphs, or the table is not this GPU's.
    """
    told = os.environ.get(TABLE) or None
    DISPATCH.choose(kernels.gpu_of(torch.device("cuda", torch.cuda.current_device())), told)
    DISPATCH.graphs = graph_decode
    if not graph_decode and limits.graphs != "NONE":
        what = f"makes EXL3 layers refuse CUDA graphs, and this start captures {limits.graphs}, up to {limits.captured}"
        raise SettingError("VLLM_EXL3_GRAPH_DECODE=0", what, "Add --enforce-eager, or remove the variable")


def describe(facts: Facts) -> None:
    """Fill in what only a GPU has: capability, and the symbols and targets of the library."""
    library = elf.read(kernels.LIBRARY)
    manifest = json.loads((library.section("exl3.manifest") or b"").split(b"\0")[0] or b"{}")
    facts.backend = "cuda"
    facts.symbols = frozenset(library.exported) & {"exl3_moe", *KERNEL_SYMBOLS, *GROUPED_SYMBOLS}
    facts.kernel_targets = tuple(manifest.get("targets", ()))
    facts.capability = torch.cuda.get_device_capability()


def require_runnable(resolution: Resolution, cap: int, loading: ModelLoading) -> None:
    """Take what the tier works in.

    Raises
    ------
    TierError: a tier that the loaded matrices or this start's graphs rule out.
    """
    experts: list[PackedExperts] = loading.packed_experts
    odd = sorted({rate for one in experts for rate in one.half_bits if rate % 2})
    if resolution.tier == "kernel" and odd:
        what = f"takes whole bits per weight, and this checkpoint has {odd[0] / 2:g}"
        raise TierError("tier kernel", what, "Ask for grouped")
    if launches_once(resolution):
        return
    captured = loading.limits.captured
    if captured > cap:
        what = f"counts rows on the host above {cap} tokens, and this start captures graphs of up to {captured}"
        next_step = f"Capture up to {cap} rows (-cc.cudagraph_capture_sizes), or raise EXL3_TEMP_ROWS_FUSED"
        raise TierError(f"tier {resolution.tier}", what, next_step)
    for one in experts:
        one.loops.reserve()


def launches_once(resolution: Resolution) -> bool:
    """Whether all experts are one launch: grouped, and sorted where the scales allow no more."""
    return resolution.tier == "grouped" or resolution.reason == "shared_suh_absent"


def account(loading: ModelLoading) -> dict[str, Any]:
    """What a receipt says of the GPU's choices: where the table of dense layers is from, which graphs are captured, and
    in how many layers all experts share one input scale (there tokens are rotated once, elsewhere every routed row)."""
    experts: list[PackedExperts] = loading.packed_experts
    one_suh = sum(one.stacked.suh is not None for one in experts)
    return {"dense_table": DISPATCH.source, "graphs": loading.limits.graphs, "one_suh_layers": one_suh}


def finish() -> None:
    """All layers of a model are loaded: take the memory that they will work in, before vLLM profiles what is left."""
    ARENA.allocate(torch.device("cuda", torch.cuda.current_device()))
    DIAGNOSTICS.arena_bytes = ARENA.nbytes


def keep_dense(parts: Sequence[PackedPart], shared_suh: bool, reconstruct_rows: int, rows: int) -> list[PackedPart]:
    """The parts of a layer as the kernels want them: too wide ones cut; the arena is told what they take."""
    kept = [piece for part in parts for piece in _cut_wide(part)]
    codes = [_matrix(part).code for part in kept]
    fields = ([part.trellis for part in kept], [part.suh for part in kept], [part.svh for part in kept])
    layer = gpu_dense.Layer(*fields, codes, [part.first + part.columns for part in kept], shared_suh)
    gpu_dense.expect(layer, reconstruct_rows, rows, kernels.gpu_of(kept[0].trellis.device))
    return kept


def _cut_wide(part: PackedPart) -> Iterator[PackedPart]:
    ranges = list(gpu_dense.pieces(part.svh.numel()))
    if len(ranges) == 1:
        yield part
        return
    for begin, end in ranges:
        first, last = max(part.first, begin), min(part.first + part.columns, end)
        if first < last:
            trellis = part.trellis[:, begin // 16 : end // 16].contiguous()
            yield PackedPart(trellis, part.suh, part.svh[begin:end].clone(), part.codebook, first - begin, last - first)


_plan = functools.lru_cache(4096)(plans.moe_plan)


class PackedExperts:
    """A layer's experts as the kernels take them: pointers to packed matrices, in order of the local experts.

    Raises
    ------
    LayoutError: an expert's gate and up differ in rate or codebook, or experts differ in shape.
    """

    def __init__(
        self,
        gate: Sequence[PackedPart],
        up: Sequence[PackedPart],
        down: Sequence[PackedPart],
        limit: float | None,
        scratch: Scratch,
    ) -> None:
        groups = [[_matrix(part) for part in group] for group in (gate, up, down)]
        try:
            self.stacked = kernels.experts(*groups)
        except ValueError as error:
            next_step = "Quantise gate and up of an expert at one rate"
            raise LayoutError("experts", f"can not run in one launch ({error})", next_step) from error
        self.limit = limit or 0.0
        self.loops = FatExperts(groups[0], groups[1], groups[2], self.limit, scratch)

    @property
    def count(self) -> int:
        return self.stacked.pointers.shape[1]

    @property
    def half_bits(self) -> list[int]:
        return sorted({code & 31 for group in self.stacked.codes for code in group})

    def expect(self, rows: int, topk: int) -> None:
        """Tell the arena the most that calls of up to `rows` tokens will take."""
        gpu = kernels.gpu_of(self.stacked.pointers.device)
        for tokens in {*range(1, min(rows, 257) + 1), self._step(rows)}:
            plan = self._plan(tokens, topk, gpu)
            ARENA.expect(kernels.moe_workspace(tokens, topk, self.stacked, plan), f"{self}, {tokens} tokens")

    def run(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, plan: Plan, diagnostics: Diagnostics) -> Tensor:
        """y [T, H] of x [T, H]. Up to `cap` tokens every tier is the same launch, and nothing is counted.

        Raises
        ------
        LayoutError: a graph is being captured, and the layer may not or can not run in it.
        """
        capturing = torch.cuda.is_current_stream_capturing()
        if capturing and not DISPATCH.graphs:
            gpu_dense.refuse_capture(str(self))
        hidden = x.shape[1]
        if hidden < self.stacked.hidden:
            x = functional.pad(x, (0, self.stacked.hidden - hidden))
        ids, weights = topk_ids.to(torch.int32), topk_weights.to(torch.float32)
        if x.shape[0] <= plan.cap:
            out = self._launch(x, ids, weights, torch.empty_like(x))
        elif plan.row_tile:
            out = torch.empty_like(x)
            for first in range(0, x.shape[0], plan.row_tile):
                tile = slice(first, first + plan.row_tile)
                self._launch(x[tile], ids[tile], weights[tile], out[tile])
            diagnostics.window.add_launched_call(*label(plan, True), topk_ids.numel())
        elif launches_once(plan.resolution):
            out = self._launch(x, ids, weights, torch.empty_like(x))
            diagnostics.window.add_launched_call(*label(plan, True), topk_ids.numel())
        elif capturing:
            what = f"of tier {plan.resolution.tier} can not be captured with {x.shape[0]} rows, more than {plan.cap}"
            raise LayoutError(str(self), what, f"Capture up to {plan.cap} rows")
        else:
            out = self._in_turn(x, ids, weights, plan, diagnostics)
        return out[:, :hidden]

    def _launch(self, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> Tensor:
        """All experts at once, in as many steps as the workspace of unshared scales asks for."""
        gpu, topk = kernels.gpu_of(x.device), ids.shape[1]
        step = max(1, self._step(x.shape[0]))
        for first in range(0, x.shape[0], step):
            part = slice(first, first + step)
            tokens = x[part].shape[0]
            made = self._plan(tokens, topk, gpu)
            nbytes = kernels.moe_workspace(tokens, topk, self.stacked, made)
            memory = ARENA.take(nbytes, self, tokens, x.device)
            kernels.moe_into(x[part], ids[part], weights[part], self.stacked, self.limit, made, out[part], memory)
        return out

    def _step(self, rows: int) -> int:
        return rows if self.stacked.suh is not None else min(rows, kernels.CHUNK_TOKENS_UNSHARED)

    def _plan(self, tokens: int, topk: int, gpu: plans.Gpu) -> plans.MoePlan:
        stacked = self.stacked
        sizes = (tokens, topk, self.count, stacked.hidden, stacked.inter)
        return _plan(DISPATCH.of(gpu), gpu, *sizes, shared_suh=stacked.suh is not None)

    def _in_turn(self, x: Tensor, ids: Tensor, weights: Tensor, plan: Plan, diagnostics: Diagnostics) -> Tensor:
        """Thin experts in one launch, fat ones in turn. An id outside 0..E-1 is another rank's."""
        shifted = (ids.flatten() + 1).clamp(0, self.count)
        counts = torch.bincount(shifted, minlength=self.count + 1)[1:].tolist()
        fat = [expert for expert, count in enumerate(counts) if count > plan.cap]
        tier, reason = label(plan, bool(fat))
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        is_fat = torch.tensor([False] + [count > plan.cap for count in counts], device=x.device)
        thin_ids = ids.masked_fill(is_fat[shifted.view_as(ids).long()], -1)
        self._launch(x, thin_ids, weights, out)
        rows = {"thin": sum(count for count in counts if count <= plan.cap)}
        if fat:
            rows[tier] = self.loops.run(tier, x, ids, weights, fat, out)
        if sum(rows.values()) != sum(counts):
            what = f"handled {sum(rows.values())} rows of {sum(counts)}, so some expert was left out"
            raise LayoutError(f"tier {tier}", what, "Report this with the receipt of the rank")
        window = diagnostics.window
        window.add_call(tier, reason, rows, max(counts, default=0), len(fat))
        window.fat_expert_runs += len(fat) if tier in LOOPS[1:] else 0
        window.direct_calls += len(fat) if tier == "kernel" else 0
        window.scatter_calls += len(fat) if tier == "kernel" else 0
        return out.to(x.dtype)

    def __str__(self) -> str:
        shape = f"{self.count} experts {self.stacked.hidden} x {self.stacked.inter}"
        return f"exl3 {shape}, {','.join(f'{rate / 2:g}' for rate in self.half_bits)} bits"


def _matrix(part: PackedPart) -> kernels.Matrix:
    return kernels.Matrix(part.trellis, part.suh, part.svh, part.codebook, part.columns)
