"""EXL3 for vLLM's routed experts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.nn import Parameter
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExpertsOrder

from exl3_vllm.cut import Cut, check_columns, check_rows, share_of_blocks
from exl3_vllm.diagnostics import DIAGNOSTICS
from exl3_vllm.errors import LayoutError
from exl3_vllm.experts import DecodedExperts, Scratch, run_experts
from exl3_vllm.format import Checkpoint, TrellisMatrix
from exl3_vllm.linear import DTYPES, keeps_packed
from exl3_vllm.loading import ModelLoading
from exl3_vllm.names import ModuleNames
from exl3_vllm.parts import MatrixPart

Experts = Mapping[tuple[int, str], TrellisMatrix]
"""Stored matrices by (global expert, vLLM's shard: w1 gate, w3 up, w2 down)."""

PARAMETER = {"w1": "w13", "w3": "w13", "w2": "w2"}

SCRATCH = Scratch(DIAGNOSTICS)
"""Layers run one after another, so one buffer serves all of them and memory does not grow with their number."""


def experts_of(layer: RoutedExperts, prefix: str, names: ModuleNames, checkpoint: Checkpoint) -> Experts:
    """The experts' matrices; empty if none of them is a trellis.

    Raises
    ------
    LayoutError: some experts are trellis matrices and others are not.
    """
    leaves = {"w1": layer.ckpt_gate_proj_name, "w2": layer.ckpt_down_proj_name, "w3": layer.ckpt_up_proj_name}
    found: dict[tuple[int, str], TrellisMatrix] = {}
    missing = []
    for expert in range(layer.moe_config.num_logical_experts):
        for shard, leaf in leaves.items():
            stored = names.stored(f"{prefix}.{expert}.{leaf}")
            if stored is None:
                missing.append(f"{prefix}.{expert}.{leaf}")
            else:
                found[expert, shard] = checkpoint.matrices[stored]
    if found and missing:
        raise LayoutError(f"matrix {missing[0]}", "has no trellis, other experts of its layer do", "Fetch it again")
    return found


class Exl3MoEMethod(FusedMoEMethodBase):
    """Loads every local expert's three matrices, each with its own rate, codebook and scales."""

    def __init__(self, prefix: str, layer: RoutedExperts, matrices: Experts, loading: ModelLoading) -> None:
        super().__init__(layer.moe_config)
        self.prefix = prefix
        self.matrices = matrices
        self.loading = loading
        self.parts: dict[tuple[int, str], MatrixPart] = {}
        self.packed: Any = None
        self._refuse_unknown(layer)

    def _refuse_unknown(self, layer: RoutedExperts) -> None:
        """What would change the result and is not computed here must stop the start, not be left out."""
        unknown = {
            f"activation {layer.activation.value}": layer.activation != MoEActivation.SILU,
            "a SwiGLU alpha": layer.swiglu_alpha not in (None, 1.0),
            "a SwiGLU beta": layer.swiglu_beta not in (None, 0.0),
            "route weights on the input": layer.apply_router_weight_on_input,
            "expert biases": self.moe.has_bias,
        }
        for what, present in unknown.items():
            if present:
                next_step = "Serve this architecture unquantised"
                raise LayoutError(f"layer {self.prefix}", f"uses {what}, which is not supported for EXL3", next_step)

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Plan the cuts of the local experts, and register placeholders for vLLM's loader to find."""
        self.dtype = params_dtype
        self.experts = num_experts
        self.hidden = hidden_size
        self.inner = intermediate_size_per_partition * self.moe.tp_size
        for (expert, shard), matrix in self.matrices.items():
            local = layer._map_global_expert_id_to_local_expert_id(expert)
            if local >= 0:
                self.parts[local, shard] = MatrixPart(matrix, [self._cut(matrix, shard)])
        for matrix, shard in ((matrix, shard) for (_, shard), matrix in self.matrices.items()):
            for kind, entry in matrix.tensors.items():
                name = f"{PARAMETER[shard]}_{kind}"
                if not hasattr(layer, name):
                    placeholder = Parameter(torch.empty(0, dtype=DTYPES[entry.dtype]), requires_grad=False)
                    placeholder.weight_loader = partial(self._load, layer, kind)
                    layer.register_parameter(name, placeholder)

    def _cut(self, matrix: TrellisMatrix, shard: str) -> Cut:
        """w1 and w3 are cut by columns, w2 by rows, at the same places of the intermediate size. Nobody else sees
        that size, so ranks may take different numbers of blocks (1408 on two ranks: 640 and 768)."""
        begin, end = share_of_blocks(matrix, self.inner, self.moe.tp_rank, self.moe.tp_size)
        self.width = end - begin
        if shard == "w2":
            rows = check_rows(matrix, begin, end, self.inner)
            return Cut(*rows, *check_columns(matrix, 0, self.hidden, self.hidden))
        rows = check_rows(matrix, 0, self.hidden, self.hidden)
        return Cut(*rows, *check_columns(matrix, begin, end, self.inner))

    def _load(
        self,
        layer: RoutedExperts,
        kind: str,
        param: Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        local = layer._map_global_expert_id_to_local_expert_id(expert_id)
        if local >= 0:
            self.parts[local, shard_id].load(kind, loaded_weight, param.device)
        return local >= 0 if return_success else None

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Check that every expert came, decode, and let the stored tensors go.

        Raises
        ------
        CompletenessError: naming the first tensor that never came.
        """
        if not self.parts:
            return
        for part in self.parts.values():
            part.check_complete()
        for name in [name for name, _ in layer.named_parameters(recurse=False) if name.startswith(("w13_", "w2_"))]:
            delattr(layer, name)
        local = range(self.experts)
        if keeps_packed(self.parts[0, "w1"]):
            self._keep_packed(layer)
        else:
            gate_up = [torch.cat([self._decoded(expert, "w1"), self._decoded(expert, "w3")]) for expert in local]
            layer.w13_weight = Parameter(torch.stack(gate_up), requires_grad=False)
            layer.w2_weight = Parameter(torch.stack([self._decoded(e, "w2") for e in local]), requires_grad=False)
            self.decoded = DecodedExperts(layer.w13_weight, layer.w2_weight, layer.swiglu_limit)
        self.loading.shared_suh[self.prefix] = all(self._shares_suh(expert) for expert in local)
        self.loading.filled(self.prefix, sum(part.trellis_bytes for part in self.parts.values()))
        self.parts = {}

    def _keep_packed(self, layer: RoutedExperts) -> None:
        from exl3_vllm.gpu import PackedExperts

        gate, up, down = (
            [self.parts[expert, shard].packed()[0] for expert in range(self.experts)] for shard in ("w1", "w3", "w2")
        )
        self.packed = PackedExperts(gate, up, down, layer.swiglu_limit, SCRATCH)
        self.packed.expect(self.loading.limits.rows, self.moe.experts_per_token)
        self.loading.packed_experts.append(self.packed)

    def _shares_suh(self, expert: int) -> bool:
        """Looked at, never assumed: native packs share the signs of gate's and up's scales, not the magnitudes."""
        gate, up = (self.parts[expert, shard].scales(0)[0] for shard in ("w1", "w3"))
        return torch.equal(gate, up)

    def _decoded(self, expert: int, shard: str) -> torch.Tensor:
        return self.parts[expert, shard].decoded(self.width if shard == "w2" else self.hidden, self.dtype)

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        """None: no kernel of vLLM's modular family is used, so the runner does shared experts and the reduction."""
        return None

    @property
    def mk_can_overlap_shared_experts(self) -> bool:
        """True: `apply` runs the shared experts, on its own stream. Kernels of two streams would share one arena."""
        return True

    def apply(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The routed experts of x [T, H]. Runs inside vLLM's opaque operator, so its branches are taken at run time."""
        if shared_experts is not None:
            shared_experts(shared_experts_input, SharedExpertsOrder.MK_INTERNAL_OVERLAPPED)
        local = topk_ids if layer.expert_map is None else layer.expert_map[topk_ids.long()]
        plan = self.loading.plan
        assert plan is not None, "vLLM finishes loading before it runs the model"
        if self.packed is not None:
            return self.packed.run(x, topk_weights, local, plan, DIAGNOSTICS)
        return run_experts(x, topk_weights, local.long(), self.decoded, plan, SCRATCH, DIAGNOSTICS)
