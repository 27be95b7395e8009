"""GLM-5.3-Flash's architecture on the patched classes of vLLM 0.33.0: every layer kind is loaded and cut right.

The classes are 0.33.0's, out of its wheel, over the compiled parts of the CPU's 0.32.0. A whole forward is not possible
on a CPU: the linear attention is written in Triton, and no CPU backend has sparse MLA; their errors are asserted.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import REPO
from exl3_vllm.export import matrix_weight
from exl3_vllm.families import linear_layers
from exl3_vllm.format import CODEBOOKS, HALF_BITS, Checkpoint
from exl3_vllm.names import FUSED
from exl3_vllm.synth import write_synthetic
from safetensors import safe_open
from test_two_ranks import free_ports

DRIVER = Path(__file__).parent / "glm_rank.py"

GLM: dict[str, Any] = {
    "architectures": ["Glm5NextForCausalLM"],
    "model_type": "glm5_next_text",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "linear_attention", "indexed_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 192,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 0,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "index_topk": 64,
    "index_head_dim": 128,
    "index_n_heads": 4,
    "index_kpool": 16,
    "index_kpool_always_select_tail": True,
    "indexer_rope_interleave": False,
    "mla_use_nope": True,
    "linear_head_dim": 128,
    "linear_num_heads": 4,
    "linear_conv_kernel_dim": 4,
    "linear_lower_bound": -5.0,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "swiglu_limit": 10.0,
    "mhc": True,
    "hc_mult": 4,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 20,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vLLM 0.33.0's sources, patched, with the compiled parts of the environment's own."""
    import vllm

    folder = tmp_path_factory.mktemp("vllm-0.33.0")
    house = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "exl3kit" / "wheels"
    wheels = list(house.glob("vllm-0.33.0-*.whl"))
    if not wheels:
        pytest.skip(f"no wheel of vLLM 0.33.0 in {house}; tests/unit/test_overlay_contract.py --full fetches it")
    with zipfile.ZipFile(wheels[0]) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.endswith((".py", "METADATA", ".json"))])
    command = [sys.executable, "-B", "-m", "patches", "apply", str(folder)]
    subprocess.run(command, cwd=REPO / "overlay", check=True, capture_output=True)
    for library in Path(vllm.__file__).parent.glob("*.so"):
        (folder / "vllm" / library.name).symlink_to(library)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The architecture in small, without the indexer's trellis, since it runs without the indexer."""
    folder = tmp_path_factory.mktemp("glm") / "model"
    write_synthetic({**GLM, "index_topk": None}, folder, HALF_BITS, CODEBOOKS, seed=11)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"index_topk": null', '"index_topk": 64'))
    write_synthetic(GLM, folder.with_name("model-sparse"), HALF_BITS, CODEBOOKS, seed=11)
    return folder


def run_ranks(size: int, model: Path, patched: Path, folder: Path) -> list[dict[str, Any]]:
    """What each rank wrote. Raises AssertionError with a rank's last words when it fails."""
    port = free_ports(1)
    search = [str(patched), str(REPO / "overlay"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(search), "VLLM_TARGET_DEVICE": "cpu"}
    ranks = []
    for rank in range(size):
        out = folder / f"{rank}.pt"
        command = [sys.executable, str(DRIVER), *map(str, (rank, size, port, model, out))]
        log = (folder / f"{rank}.log").open("w")
        ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    try:
        for process in ranks:
            process.wait(timeout=900)
    finally:
        for process in ranks:
            process.kill()
    for number, process in enumerate(ranks):
        assert process.returncode == 0, (folder / f"{number}.log").read_text()[-3000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


def dense_weights(model: Path) -> dict[str, torch.Tensor]:
    """Every matrix of the checkpoint by name, [outputs, inputs], in true sizes; plain weights of linear layers too."""
    checkpoint = Checkpoint.open(model)
    shapes = linear_layers({**GLM, "index_topk": None})
    dense = {
        name: matrix_weight(matrix)[: shapes[name].outputs, : shapes[name].inputs]
        for name, matrix in checkpoint.matrices.items()
    }
    for name, entry in checkpoint.plain.items():
        if name.endswith(".weight") and len(entry.shape) == 2:
            with safe_open(entry.file, framework="pt") as file:
                dense[name.removesuffix(".weight")] = file.get_tensor(name).float()
    return dense


def assembled(ranks: list[dict[str, Any]], name: str) -> list[torch.Tensor]:
    """The sections [outputs, inputs] of a layer, put together from all ranks; every element must have been held."""
    weights, ranges, inputs = zip(*(rank["held"][name] for rank in ranks), strict=True)
    sections = [torch.full((features, inputs[0][0]), torch.nan) for features, _, _ in ranges[0]]
    for weight, rank_ranges, (_, first, last) in zip(weights, ranges, inputs, strict=True):
        begin = 0
        for section, (_, low, high) in zip(sections, rank_ranges, strict=True):
            section[low:high, first:last] = weight[begin : begin + high - low, : last - first]
            begin += high - low
    return sections


def members(name: str) -> list[str]:
    parent, _, leaf = name.rpartition(".")
    return [f"{parent}.{part}" for part in FUSED[leaf]] if leaf in FUSED and leaf != "qkv_proj" else [name]


def feed_forward(dense: dict[str, torch.Tensor], prefix: str, x: torch.Tensor) -> torch.Tensor:
    """SwiGLU with its limit, on plain weights."""
    gate, up = x @ dense[f"{prefix}.gate_proj"].t(), x @ dense[f"{prefix}.up_proj"].t()
    limit = GLM["swiglu_limit"]
    inner = torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    return inner @ dense[f"{prefix}.down_proj"].t()


def experts(dense: dict[str, torch.Tensor], plain: dict[str, torch.Tensor], prefix: str, x: torch.Tensor) -> Any:
    """Sigmoid routing with a correction for the choice alone, scaled, and the shared expert beside."""
    scores = (x @ dense[f"{prefix}.gate"].t()).sigmoid()
    chosen = (scores + plain[f"{prefix}.gate.e_score_correction_bias"]).topk(GLM["num_experts_per_tok"]).indices
    weights = scores.gather(1, chosen)
    weights = weights / weights.sum(1, keepdim=True) * GLM["routed_scaling_factor"]
    out = feed_forward(dense, f"{prefix}.shared_experts", x)
    for expert in range(GLM["n_routed_experts"]):
        share = (weights * (chosen == expert)).sum(1, keepdim=True)
        out += share * feed_forward(dense, f"{prefix}.experts.{expert}", x)
    return out


@pytest.mark.full
@pytest.mark.parametrize("size", [1, 2])
def test_every_layer_kind_is_loaded_and_cut_right(size: int, model: Path, patched: Path, tmp_path: Path) -> None:
    ranks = run_ranks(size, model, patched, tmp_path)
    dense = dense_weights(model)
    # every linear layer, put together from the ranks, holds the dequantised matrices of the checkpoint, all of them
    seen = set()
    for name in [name for name, held in ranks[0]["held"].items() if len(held) == 3]:
        for member, section in zip(members(name), assembled(ranks, name), strict=True):
            torch.testing.assert_close(section, dense[member], rtol=1e-5, atol=1e-6)
            seen.add(member)
    linear = {name for name in Checkpoint.open(model).matrices if ".mlp.experts." not in name}
    assert linear <= seen
    # a rank computes what plain weights compute: a dense layer, and experts with their shared one
    with safe_open(next(model.glob("*.safetensors")), framework="pt") as file:
        plain = {name: file.get_tensor(name) for name in file.keys() if name.endswith("correction_bias")}  # noqa: SIM118
    for rank in ranks:
        for number, got in rank["computed"].items():
            prefix = f"model.layers.{number}.mlp"
            dense_layer = GLM["mlp_layer_types"][number] == "dense"
            wanted = feed_forward(dense, prefix, rank["x"]) if dense_layer else experts(dense, plain, prefix, rank["x"])
            assert torch.linalg.norm(got - wanted) / torch.linalg.norm(wanted) < 2e-5, number
    # what does not run on a CPU says so
    if size == 1:
        assert ranks[0]["errors"]["sparse MLA"] == "NotImplementedError: Sparse Attention is not supported on CPU."
    assert ranks[0]["errors"]["KDA"] != "runs"
