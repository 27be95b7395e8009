"""Synthetic models with every rate and codebook, their logits from vLLM, and the same from transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from exl3_vllm.export import export_dense
from exl3_vllm.format import CODEBOOKS, HALF_BITS
from exl3_vllm.synth import write_synthetic

COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "torch_dtype": "float32",
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}

GLM_EXPERTS = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.8,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "first_k_dense_replace": 1,
}

CONFIGS: dict[str, dict[str, Any]] = {
    # 2 key/value heads of 64: at tensor parallel 2 each rank's columns are half a block
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": True, "head_dim": 64},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": 128,
        "num_attention_heads": 2,
        **EXPERTS,
    },
    "qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": 256,
        **EXPERTS,
    },
    # 384 = 3 blocks of 128: two ranks take one and two
    "uneven": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": 128,
        "num_attention_heads": 2,
        **EXPERTS,
        "moe_intermediate_size": 384,
        "num_experts": 4,
    },
    # latent attention: the head size of vLLM's kernel on a CPU is 512 + 64
    "mla": {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        "num_key_value_heads": 4,
        "q_lora_rank": 192,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
        **GLM_EXPERTS,
        "mlp_layer_types": ["dense", "sparse"],
    },
    # gated delta nets: one matrix for q, k and v, another for z; full attention with a gate in every second layer
    "gdn": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "head_dim": 128,
        "num_attention_heads": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "layer_types": ["linear_attention", "full_attention"],
    },
    # GLM-4.5-Air: no width is whole blocks for each of two ranks, in a dense layer, in experts and in the shared one
    "glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "head_dim": 128,
        "num_attention_heads": 2,
        "attention_bias": True,
        "intermediate_size": 576,
        "num_nextn_predict_layers": 0,
        **GLM_EXPERTS,
        "moe_intermediate_size": 384,
    },
    # the head is the embedding, which is stored plain
    "tied": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 128,
        "tie_word_embeddings": True,
        "intermediate_size": 256,
    },
    # one key/value head: at tensor parallel 2 both ranks hold all of it
    "replicated": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 256,
    },
    # nothing is a multiple of 128: every matrix is stored with padding
    "padded": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 320,
        "hidden_size": 192,
        "intermediate_size": 320,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 64,
    },
}

PROMPT = [(7 * i) % 300 + 3 for i in range(40)]


@dataclass(frozen=True)
class Synthetic:
    """A checkpoint, and the logits fp32 [positions, vocabulary] that transformers gives on its dequantised weights."""

    model: Path
    reference: torch.Tensor


def make_synthetic(name: str, folder: Path) -> Synthetic:
    """A model of one family in which all 11 rates and 3 codebooks occur, with two matrices of the legacy kind."""
    from transformers import AutoModelForCausalLM

    model, dense = folder / name, folder / f"{name}-dense"
    # q and k are normalised, or only steer attention, so packed signs without magnitudes leave activations sane
    legacy = ["model.layers.0.self_attn.q_proj"] if CONFIGS[name]["model_type"].startswith("qwen3") else []
    config = {**COMMON, **CONFIGS[name]}
    shapes = write_synthetic(config, model, HALF_BITS, CODEBOOKS, seed=11, legacy=legacy)
    true_shapes = {layer: (shape.outputs, shape.inputs) for layer, shape in shapes.items()}
    export_dense(model, dense, torch.float32, true_shapes)
    reference = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).eval()
    with torch.no_grad():
        return Synthetic(model, reference(torch.tensor([PROMPT])).logits[0])


def vllm_logits(llm: Any) -> torch.Tensor:
    """Logits fp32 [positions - 1, vocabulary] at every position of the prompt but its last, as vLLM reports them."""
    from vllm import SamplingParams

    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=vocabulary, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False)
    rows = []
    for entry in output.prompt_logprobs[1:]:
        row = torch.empty(vocabulary)
        for token, value in entry.items():
            row[token] = value.logprob
        rows.append(row)
    return torch.stack(rows)


def relative_error(logits: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest relative L2 distance over positions."""
    wanted = reference[: len(logits)]
    return float((torch.linalg.norm(logits - wanted, dim=1) / torch.linalg.norm(wanted, dim=1)).max())


ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "logprobs_mode": "raw_logits",
    "max_logprobs": 512,
}

OPTIONS: dict[str, dict[str, Any]] = {
    # vLLM prefers AMX where there is any, and that takes no fp32. Its rotary kernel for CPUs misreads q, which is a
    # view of wider rows here: off by 0.68 from transformers, also without EXL3.
    "mla": {
        "attention_config": {"backend": "CPU_MLA"},
        "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]},
    },
    # "CPU GDN attention requires BF16."
    "gdn": {"dtype": "bfloat16"},
}


def options_of(name: str) -> dict[str, Any]:
    """What vLLM is started with for the family `name`; the suffix `-ep` asks for expert parallelism."""
    family, _, kind = name.partition("-")
    if family == "gdn":
        import no_vision

        no_vision.install()
    extra = {"enable_expert_parallel": True} if kind == "ep" else {}
    return {**ENGINE, **OPTIONS.get(family, {}), **extra}
