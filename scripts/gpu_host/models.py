"""Checkpoints for a GPU host, made there: real geometries at full depth with random trellises, written at memory speed.

`python models.py NAME DIRECTORY [NAME DIRECTORY ...]`; `plain:NAME` is the unquantised geometry, without weights. Only
shapes are real: text is noise. A checkpoint of 15 GB takes some seconds, as a layer is one random buffer on the GPU
whose scales are then put in place.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from exl3_vllm import families, synth
from geometries import MODELS, Model
from torch import Tensor

TYPES = {"I16": torch.int16, "F16": torch.float16, "I32": torch.int32}


@dataclass
class Shard:
    """One file. `fill` makes the values of a tensor where random bits will not do.

    The format allows no holes and readers want aligned tensors: markers of 4 bytes go last, all else is whole lines.
    """

    entries: list[tuple[str, str, tuple[int, ...], Any]] = field(default_factory=list)

    def add(self, name: str, dtype: str, shape: tuple[int, ...], fill: Any = None) -> None:
        self.entries.append((name, dtype, shape, fill))

    def write(self, path: Path) -> None:
        header: dict[str, Any] = {}
        size, fills = 0, []
        for name, dtype, shape, fill in sorted(self.entries, key=lambda entry: entry[1] == "I32"):
            end = size + math.prod(shape) * TYPES[dtype].itemsize
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [size, end]}
            fills.append((size, end, TYPES[dtype], fill))
            size = end
        data = torch.empty(-(-size // 4), dtype=torch.int32, device="cuda").random_(-(1 << 31), 1 << 31)
        flat = data.view(torch.uint8)
        for begin, end, dtype, fill in fills:
            if fill is not None:
                flat[begin:end].view(dtype).copy_(fill().flatten())
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.write(flat[:size].cpu().numpy().data)


def scales(count: int, low: float, high: float, size: float) -> Tensor:
    signs = torch.randint(0, 2, (count,), device="cuda") * 2 - 1
    return (signs * (low + (high - low) * torch.rand(count, device="cuda")) * size).half()


def shards(model: Model) -> Iterator[Shard]:
    """One per layer, and one for what lies outside of layers."""
    config = model.config
    by_layer: dict[str, Shard] = {}
    kept: dict[str, Tensor] = {}
    for name, shape in families.linear_layers(config).items():
        layer = name.split(".")[2] if name.startswith("model.layers.") else "outside"
        shard = by_layer.setdefault(layer, Shard())
        rows, columns = synth.padded(shape.inputs), synth.padded(shape.outputs)
        fused = name.endswith((".gate_proj", ".up_proj"))
        place = {"pair": name.rpartition(".")[0], "layer": layer}.get(model.suh, name) if fused else name
        suh = kept.setdefault(place, scales(rows, 0.5, 1.5, 1.0))
        size = 1 / (synth.DEVIATION[model.codebook] * shape.inputs**0.5)
        marker = torch.tensor(synth.MARKERS[model.codebook], dtype=torch.int32)
        shard.add(f"{name}.trellis", "I16", (rows // 16, columns // 16, 8 * model.rate(name)))
        shard.add(f"{name}.suh", "F16", (rows,), lambda suh=suh: suh)
        shard.add(f"{name}.svh", "F16", (columns,), lambda columns=columns, size=size: scales(columns, 0.8, 1.2, size))
        shard.add(f"{name}.{model.codebook}", "I32", (), lambda marker=marker: marker)
    add_plain(by_layer, config)
    yield from by_layer.values()


def add_plain(by_layer: dict[str, Shard], config: Mapping[str, Any]) -> None:
    """Embedding, norms and routers, fp16."""
    hidden, head, outside = config["hidden_size"], config["head_dim"], by_layer["outside"]
    vocabulary = config["vocab_size"]

    def normal(*shape: int, size: float = 1.0) -> Any:
        return lambda: torch.randn(*shape, device="cuda").mul_(size).half()

    def ones(count: int) -> Any:
        return lambda: torch.ones(count, device="cuda").half()

    outside.add("model.embed_tokens.weight", "F16", (vocabulary, hidden), normal(vocabulary, hidden))
    outside.add("model.norm.weight", "F16", (hidden,), ones(hidden))
    for layer, shard in by_layer.items():
        prefix = f"model.layers.{layer}"
        if layer == "outside":
            continue
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shard.add(f"{prefix}.{norm}.weight", "F16", (hidden,), ones(hidden))
        for norm in ("q_norm", "k_norm"):
            shard.add(f"{prefix}.self_attn.{norm}.weight", "F16", (head,), ones(head))
        if config["model_type"] == "qwen3_moe":
            experts = config["num_experts"]
            shard.add(f"{prefix}.mlp.gate.weight", "F16", (experts, hidden), normal(experts, hidden, size=hidden**-0.5))


def make(name: str, target: Path) -> None:
    """Write the checkpoint; a target that has its config.json is complete."""
    if (target / "config.json").is_file():
        return
    target.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(7)
    model = MODELS[name]
    weight_map: dict[str, str] = {}
    with ThreadPoolExecutor(4) as pool:
        running = []
        for number, shard in enumerate(shards(model)):
            file = f"model-{number:05d}.safetensors"
            weight_map.update({entry[0]: file for entry in shard.entries})
            running.append(pool.submit(shard.write, target / file))
        for one in running:
            one.result()
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    tokenizer(target)
    config = {**model.config, "quantization_config": {"quant_method": "exl3"}}
    (target / "config.json").write_text(json.dumps(config, indent=1))


def tokenizer(target: Path) -> None:
    """Bytes as tokens: enough for a server, whose clients here send numbers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|end|>"])
    made.save(str(target / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "pad_token": "<|end|>"}
    (target / "tokenizer_config.json").write_text(json.dumps(told))


def plain_config(name: str, target: Path) -> None:
    """Only the config.json of the same geometry unquantised: vLLM fills it with dummy weights."""
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps({**MODELS[name].config}, indent=1))
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))


if __name__ == "__main__":
    for name, target in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        if name.startswith("plain:"):
            plain_config(name.removeprefix("plain:"), Path(target))
        else:
            make(name, Path(target))
