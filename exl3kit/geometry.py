"""Whether a checkpoint's shapes can be cut over tensor ranks: what `config.json` says before any weight is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

BLOCK = 128  # inputs that one Hadamard block mixes; a rank must hold whole blocks of a row-parallel layer's input

_ATTENTION = "the attention output's input"
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")  # models' names of their number


def pipeline_faults(config: Mapping[str, Any], *, pipeline: int) -> list[str]:
    """Sentences that say why the layers cannot be laid out over `pipeline` stages: each needs one at least."""
    layers = _number(_shape(config), "num_hidden_layers")
    return [f"{layers} layers are fewer than {pipeline} stages"] if layers and layers < pipeline else []


def expert_faults(config: Mapping[str, Any], *, expert: bool) -> list[str]:
    """Sentences that say why experts cannot be spread: vLLM refuses that for a model without any."""
    shape = _shape(config)
    dense = _number(shape, "num_hidden_layers") is not None and not any("expert" in key for key in shape)
    return ["the model has no experts to spread"] if expert and dense else []


def cut_faults(config: Mapping[str, Any], *, tensor: int, expert: bool, exl3: bool) -> list[str]:
    """Sentences that say why `tensor` ranks cannot share this model; empty when nothing speaks against it.

    Parameters
    ----------
    config: the checkpoint's config.json; a text model inside a larger one is looked for under text_config.
    tensor: number of tensor ranks.
    expert: experts stay whole (each rank has some of them), so their inner width is not cut.
    exl3: layers are EXL3. A row-parallel shard that ends inside a 128-block is impossible then: the block's inputs are
        mixed by one Hadamard transform before they meet the weights.
    """
    shape = _shape(config)
    return [*_heads(shape, tensor), *_experts(shape, tensor, expert), *_rows(shape, tensor, expert, exl3)]


def is_quantised(config: Mapping[str, Any]) -> bool:
    """Whether the config says that the weights are quantised; some models say so under text_config."""
    return any(isinstance(part.get("quantization_config"), Mapping) for part in (config, _shape(config)))


def _shape(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def _number(shape: Mapping[str, Any], *names: str) -> int | None:
    """The first of these keys that holds a positive whole number."""
    values = (shape.get(name) for name in names)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), None)


def _heads(shape: Mapping[str, Any], tensor: int) -> Iterator[str]:
    heads = _number(shape, "num_attention_heads")
    if heads and heads % tensor:
        yield f"{heads} attention heads do not divide over {tensor} ranks"
    kv_heads = _number(shape, "num_key_value_heads")
    if kv_heads and kv_heads % tensor and tensor % kv_heads:
        yield f"{kv_heads} key-value heads neither divide over {tensor} ranks nor {tensor} ranks over them"


def _experts(shape: Mapping[str, Any], tensor: int, expert: bool) -> Iterator[str]:
    experts = _number(shape, *EXPERTS)
    if experts and expert and experts < tensor:
        yield f"{experts} experts are fewer than {tensor} ranks"


def _rows(shape: Mapping[str, Any], tensor: int, expert: bool, exl3: bool) -> Iterator[str]:
    for what, width in _row_parallel_inputs(shape, expert):
        # The format pads widths to whole blocks, and the padding is cut with the rest: 2880 counts as 2944.
        stored = -(-width // BLOCK) * BLOCK if exl3 else width
        if exl3 and what != _ATTENTION:
            # Between gate, up and down nobody else sees the width: ranks may take different numbers of blocks.
            if stored // BLOCK < tensor:
                yield f"{what} of {width} is {stored // BLOCK} blocks of {BLOCK}, fewer than {tensor} ranks"
            elif width % tensor:  # vLLM divides it before anybody is asked
                yield f"{what} of {width} does not divide over {tensor} ranks"
        elif exl3 and stored % (tensor * BLOCK):
            blocks = f"{stored / tensor / BLOCK:g} blocks of {BLOCK}"
            yield f"{what} of {width} over {tensor} ranks is {stored / tensor:g} = {blocks} per rank, not whole blocks"
        elif stored % tensor:
            yield f"{what} of {width} does not divide over {tensor} ranks"


def _row_parallel_inputs(shape: Mapping[str, Any], expert: bool) -> Iterator[tuple[str, int]]:
    """Input widths of the layers that are cut along their input: attention output and MLP down."""
    heads, hidden = _number(shape, "num_attention_heads"), _number(shape, "hidden_size")
    head = _number(shape, "v_head_dim", "head_dim") or (hidden // heads if heads and hidden else None)
    if heads and head:
        yield _ATTENTION, heads * head
    moe = _number(shape, "moe_intermediate_size")
    dense = _number(shape, "intermediate_size")
    if dense and _has_dense_mlp(shape, moe):
        yield "intermediate_size", dense
    experts = _number(shape, *EXPERTS)
    if experts and (moe or dense) and not expert:
        yield "the experts' intermediate size", moe or dense or 0
    shared = _number(shape, "shared_expert_intermediate_size", "shared_intermediate_size")
    shared_count = _number(shape, "n_shared_experts", "num_shared_experts")
    if shared or (shared_count and moe):
        yield "the shared experts' intermediate size", shared or (shared_count or 0) * (moe or 0)


def _has_dense_mlp(shape: Mapping[str, Any], moe: int | None) -> bool:
    """A model with experts has dense layers only where it says so: first layers, listed layers, or a sparse step."""
    if moe is None:
        return _number(shape, *EXPERTS) is None
    step = _number(shape, "decoder_sparse_step") or 1
    return bool(_number(shape, "first_k_dense_replace") or shape.get("mlp_only_layers") or step > 1)
