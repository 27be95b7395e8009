"""The geometries that are timed on a GPU host: configurations, rates and codebooks, free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

COMMON: dict[str, Any] = {
    "bos_token_id": None,
    "eos_token_id": 0,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
    "attention_bias": False,
}
DENSE = {**COMMON, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
MOE = {
    **COMMON,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_experts_per_tok": 8,
}
TINY = {
    "vocab_size": 512,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
QWEN3_30B = {
    **MOE,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}
GLM_SHAPE = {
    **QWEN3_30B,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_experts": 288,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
}
DENSE_40 = {
    **DENSE,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
}


@dataclass(frozen=True)
class Model:
    """A geometry. `rates` (half bits): of most matrices, of dense down projections, of the head (the last).

    suh: whose input scales are the same. "pair": gate's and up's of an expert, which every tier takes; "layer": those
    of all experts of a layer, the fastest case of the kernels; "own": nobody's, as upstream's converter writes them.
    """

    config: Mapping[str, Any]
    rates: tuple[int, ...]
    codebook: str
    suh: str = "pair"

    def rate(self, name: str) -> int:
        if ".experts." in name:
            return self.rates[0]
        if name == "lm_head":
            return self.rates[-1]
        return self.rates[name.endswith("down_proj") % len(self.rates)]


MODELS = {
    "qwen3-30b-k4": Model(QWEN3_30B, (8,), "mcg"),
    "qwen3-30b-k4-layer": Model(QWEN3_30B, (8,), "mcg", "layer"),
    "qwen3-30b-k3": Model(QWEN3_30B, (6,), "mul1"),
    "dense-40": Model(DENSE_40, (10, 12), "mcg"),
    "glm-shape": Model(GLM_SHAPE, (8,), "mcg"),
    "tiny-dense": Model({**DENSE, **TINY, "intermediate_size": 1024}, (10, 12), "mcg"),
    "tiny-moe": Model(
        {**MOE, **TINY, "intermediate_size": 1024, "moe_intermediate_size": 256, "num_experts": 16}, (8,), "mcg"
    ),
    "tiny-moe-own": Model(
        {**MOE, **TINY, "intermediate_size": 1024, "moe_intermediate_size": 256, "num_experts": 16}, (6,), "mul1", "own"
    ),
}
