"""What the checkpoints of a model family hold, by name and size: the matrices that are quantised, and what stays plain.

A layer is an attention (grouped-query, latent, gated delta net, KDA) and a feed-forward part (dense, or experts with
shared ones beside them); which one a layer has is read from `config.json` as vLLM and transformers read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exl3_vllm.errors import LayoutError

Config = Mapping[str, Any]

QWEN3_5 = ("qwen3_5_text", "qwen3_5_moe_text")
KDA = "glm5_next_text"
LATENT = ("deepseek_v3", "glm4_moe_lite", KDA)
FAMILIES = ("llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", *QWEN3_5, "glm4_moe", *LATENT)


@dataclass(frozen=True)
class Shape:
    """One linear layer: its inputs and outputs in the model (padded to 128 when stored), and whether it has a bias."""

    inputs: int
    outputs: int
    bias: bool = False


def linear_layers(config: Config) -> dict[str, Shape]:
    """The matrices of a model of one of the `FAMILIES`, by their checkpoint names.

    Raises
    ------
    LayoutError: another kind of model.
    """
    kind = config["model_type"]
    if kind not in FAMILIES:
        raise LayoutError(f"model type {kind}", "has no synthetic form", f"Use {', '.join(FAMILIES)}")
    layers: dict[str, Shape] = {}
    for number in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{number}"
        layers.update(_attention(config, prefix, number))
        layers.update(_feed_forward(config, f"{prefix}.mlp", number))
    if not config.get("tie_word_embeddings"):
        layers["lm_head"] = Shape(config["hidden_size"], config["vocab_size"])
    return layers


def _head_size(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _is_linear(config: Config, number: int) -> bool:
    """Whether a layer's attention is a linear one."""
    kinds = config.get("layer_types") or ()
    return number < len(kinds) and kinds[number] == "linear_attention"


def _attention(config: Config, prefix: str, number: int) -> Iterator[tuple[str, Shape]]:
    if _is_linear(config, number) and config["model_type"] == KDA:
        return _kda(config, f"{prefix}.self_attn")
    if _is_linear(config, number):
        return _delta_net(config, f"{prefix}.linear_attn")
    if config["model_type"] in LATENT:
        return _latent(config, f"{prefix}.self_attn")
    return _grouped_query(config, f"{prefix}.self_attn")


def _grouped_query(config: Config, prefix: str) -> Iterator[tuple[str, Shape]]:
    hidden, kind = config["hidden_size"], config["model_type"]
    queries, keys = (config[name] * _head_size(config) for name in ("num_attention_heads", "num_key_value_heads"))
    biased = bool(config.get("attention_bias", kind in ("qwen2", "qwen2_moe")))
    gated = 2 if kind in QWEN3_5 else 1  # each head's output gate stands beside its query
    yield f"{prefix}.q_proj", Shape(hidden, gated * queries, biased)
    yield f"{prefix}.k_proj", Shape(hidden, keys, biased)
    yield f"{prefix}.v_proj", Shape(hidden, keys, biased)
    yield f"{prefix}.o_proj", Shape(queries, hidden, biased and kind in ("llama", *QWEN3_5))


def _latent(config: Config, prefix: str) -> Iterator[tuple[str, Shape]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    queries = heads * (config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    latent, low = config["kv_lora_rank"], config.get("q_lora_rank")
    if low:
        yield f"{prefix}.q_a_proj", Shape(hidden, low)
        yield f"{prefix}.q_b_proj", Shape(low, queries)
    else:
        yield f"{prefix}.q_proj", Shape(hidden, queries)
    yield f"{prefix}.kv_a_proj_with_mqa", Shape(hidden, latent + config["qk_rope_head_dim"])
    yield f"{prefix}.kv_b_proj", Shape(latent, heads * (config["qk_nope_head_dim"] + config["v_head_dim"]))
    yield f"{prefix}.o_proj", Shape(heads * config["v_head_dim"], hidden)
    if config.get("index_topk"):
        yield f"{prefix}.indexer.wq_b", Shape(config["q_lora_rank"], config["index_n_heads"] * config["index_head_dim"])


def _kda(config: Config, prefix: str) -> Iterator[tuple[str, Shape]]:
    """Its projection of one output per head, b_proj, stays plain."""
    hidden, head = config["hidden_size"], config["linear_head_dim"]
    width = config["linear_num_heads"] * head
    for name in ("q_proj", "k_proj", "v_proj"):
        yield f"{prefix}.{name}", Shape(hidden, width)
    for name in ("f", "g"):
        yield f"{prefix}.{name}_a_proj", Shape(hidden, head)
        yield f"{prefix}.{name}_b_proj", Shape(head, width)
    yield f"{prefix}.o_proj", Shape(width, hidden)


def _delta_sizes(config: Config) -> tuple[int, int]:
    """(widths of q, k and v side by side, width of v) of a gated delta net."""
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    return 2 * keys + values, values


def _delta_net(config: Config, prefix: str) -> Iterator[tuple[str, Shape]]:
    """Its two small projections, of one output per head, stay plain."""
    both, values = _delta_sizes(config)
    yield f"{prefix}.in_proj_qkv", Shape(config["hidden_size"], both)
    yield f"{prefix}.in_proj_z", Shape(config["hidden_size"], values)
    yield f"{prefix}.out_proj", Shape(values, config["hidden_size"])


def _experts(config: Config, number: int) -> int:
    """How many routed experts a layer has; 0 for a dense one."""
    kinds = config.get("mlp_layer_types") or ()
    dense = number < config.get("first_k_dense_replace", 0) or number in config.get("mlp_only_layers", ())
    if dense or (number < len(kinds) and kinds[number] == "dense"):
        return 0
    return int(config.get("num_experts") or config.get("n_routed_experts") or 0)


def _shared_width(config: Config) -> int:
    width = config.get("shared_expert_intermediate_size")
    return int(width or config.get("n_shared_experts", 0) * config["moe_intermediate_size"])


def _shared_name(config: Config) -> str:
    """Qwen's shared expert is one and has a gate of its own; others count them."""
    return "shared_expert" if config.get("shared_expert_intermediate_size") else "shared_experts"


def _feed_forward(config: Config, prefix: str, number: int) -> Iterator[tuple[str, Shape]]:
    hidden, experts = config["hidden_size"], _experts(config, number)
    widths = {f"{prefix}.experts.{expert}": config["moe_intermediate_size"] for expert in range(experts)}
    if not experts:
        widths = {prefix: config["intermediate_size"]}
    elif _shared_width(config):
        widths[f"{prefix}.{_shared_name(config)}"] = _shared_width(config)
    for module, width in widths.items():
        yield f"{module}.gate_proj", Shape(hidden, width)
        yield f"{module}.up_proj", Shape(hidden, width)
        yield f"{module}.down_proj", Shape(width, hidden)


class PlainTensors:
    """What stays unquantised: embeddings, norms, routers and what linear attention needs beside its matrices."""

    def __init__(self, config: Config, generator: torch.Generator) -> None:
        self.config = config
        self.generator = generator
        # Qwen3.5 stores a norm's distance from one.
        self.norm_centre = 0 if config["model_type"] in QWEN3_5 else 1

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        config, hidden = self.config, self.config["hidden_size"]
        yield "model.embed_tokens.weight", self._normal(config["vocab_size"], hidden).half()
        yield "model.norm.weight", torch.full((hidden,), self.norm_centre).half()
        for number in range(config["num_hidden_layers"]):
            prefix = f"model.layers.{number}"
            yield f"{prefix}.input_layernorm.weight", self._norm(hidden)
            yield f"{prefix}.post_attention_layernorm.weight", self._norm(hidden)
            yield from self._of_attention(prefix, number)
            yield from self._of_experts(f"{prefix}.mlp", number)
            if config.get("hc_mult"):
                yield from self._of_streams(prefix)

    def _normal(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self.generator)

    def _norm(self, size: int) -> Tensor:
        return (self.norm_centre + 0.1 * self._normal(size)).half()

    def _of_attention(self, prefix: str, number: int) -> Iterator[tuple[str, Tensor]]:
        config, kind = self.config, self.config["model_type"]
        if _is_linear(config, number) and kind == KDA:
            yield from self._of_kda(f"{prefix}.self_attn")
        elif _is_linear(config, number):
            yield from self._of_delta_net(f"{prefix}.linear_attn")
        elif kind in LATENT:
            if config.get("q_lora_rank"):
                yield f"{prefix}.self_attn.q_a_layernorm.weight", self._norm(config["q_lora_rank"])
            yield f"{prefix}.self_attn.kv_a_layernorm.weight", self._norm(config["kv_lora_rank"])
            if config.get("index_topk"):
                yield from self._of_indexer(f"{prefix}.self_attn.indexer")
        elif kind in ("qwen3", "qwen3_moe", *QWEN3_5) or config.get("use_qk_norm"):
            for norm in ("q_norm", "k_norm"):
                yield f"{prefix}.self_attn.{norm}.weight", self._norm(_head_size(config))

    def _of_delta_net(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        config, heads = self.config, self.config["linear_num_value_heads"]
        for name in ("in_proj_b", "in_proj_a"):
            yield f"{prefix}.{name}.weight", (self._normal(heads, config["hidden_size"]) * 0.05).half()
        both, _ = _delta_sizes(config)
        yield f"{prefix}.conv1d.weight", (self._normal(both, 1, config["linear_conv_kernel_dim"]) * 0.5).half()
        yield f"{prefix}.dt_bias", self._normal(heads).half()
        yield f"{prefix}.A_log", self._normal(heads).float()
        yield f"{prefix}.norm.weight", (1 + 0.1 * self._normal(config["linear_value_head_dim"])).half()

    def _of_kda(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        config, heads = self.config, self.config["linear_num_heads"]
        width = heads * config["linear_head_dim"]
        yield f"{prefix}.b_proj.weight", (self._normal(heads, config["hidden_size"]) * 0.05).half()
        for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
            yield f"{prefix}.{name}.weight", (self._normal(width, 1, config["linear_conv_kernel_dim"]) * 0.5).half()
        yield f"{prefix}.dt_bias", self._normal(width).float()
        yield f"{prefix}.A_log", self._normal(heads).float()
        yield f"{prefix}.o_norm.weight", (1 + 0.1 * self._normal(config["linear_head_dim"])).half()

    def _of_indexer(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        config, head = self.config, self.config["index_head_dim"]
        yield f"{prefix}.wk.weight", (self._normal(head, config["hidden_size"]) * 0.05).half()
        yield (
            f"{prefix}.weights_proj.weight",
            (self._normal(config["index_n_heads"], config["hidden_size"]) * 0.05).half(),
        )
        yield f"{prefix}.k_norm.weight", torch.ones(head)
        yield f"{prefix}.k_norm.bias", torch.zeros(head)
        yield f"{prefix}.index_kpool_compress_ape", 0.1 * self._normal(config["index_kpool"], head)
        yield f"{prefix}.index_kpool_compress_gate", (self._normal(head, config["hidden_size"]) * 0.05).bfloat16()

    def _of_streams(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Hyper-connections: how the residual streams meet before and after attention and feed-forward."""
        streams, hidden = self.config["hc_mult"], self.config["hidden_size"]
        mixed = (2 + streams) * streams
        for part in ("attn", "ffn"):
            yield f"{prefix}.hc_{part}_fn", self._normal(mixed, streams * hidden) * (streams * hidden) ** -0.5
            yield f"{prefix}.hc_{part}_base", 0.1 * self._normal(mixed)
            yield f"{prefix}.hc_{part}_scale", torch.ones(3)

    def _of_experts(self, prefix: str, number: int) -> Iterator[tuple[str, Tensor]]:
        config, hidden, experts = self.config, self.config["hidden_size"], _experts(self.config, number)
        if not experts:
            return
        yield f"{prefix}.gate.weight", (self._normal(experts, hidden) / hidden**0.5).half()
        if config["model_type"] in ("glm4_moe", *LATENT):
            yield f"{prefix}.gate.e_score_correction_bias", 0.1 * self._normal(experts)
        if _shared_name(config) == "shared_expert":
            yield f"{prefix}.shared_expert_gate.weight", (self._normal(1, hidden) / hidden**0.5).half()
