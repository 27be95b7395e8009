"""Synthetic checkpoints of any geometry: any bits are a valid trellis, so no quantiser is needed.

`python -m exl3_vllm.synth CONFIG.json TARGET [--rates 3,4] [--codebooks mcg] [--seed 0]`

Their text is noise; they are for tests, for benches, and for trying whether a model fits. Scales are chosen so that
activations stay near one at every depth.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from exl3_vllm.errors import LayoutError
from exl3_vllm.families import PlainTensors, Shape, linear_layers
from exl3_vllm.format import BLOCK, CODEBOOKS, HALF_BITS, TILE

MARKERS = {"mcg": 0xCBAC1FED - (1 << 32), "mul1": 0x83DCD12D - (1 << 32)}
DEVIATION = {"3inst": 1.2437, "mcg": 1.2441, "mul1": 1.0003}
"""Standard deviation of each codebook's values."""

SHARD_BYTES = 4 << 30


def padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def matrix_tensors(
    shape: Shape, half_bits: int, codebook: str, legacy: bool, generator: torch.Generator, suh: Tensor | None = None
) -> dict[str, Tensor]:
    """The stored parts of one matrix: random bits, scales for outputs near one, zero scales in padding columns.

    `legacy` stores packed signs (`su`, `sv`) in place of the fp16 scales; `suh` is taken over where given.
    """
    rows, columns = padded(shape.inputs), padded(shape.outputs)
    bits = torch.randint(0, 1 << 16, (rows // TILE, columns // TILE, 8 * half_bits), generator=generator)
    parts: dict[str, Tensor] = {"trellis": bits.to(torch.int32).to(torch.int16)}
    if legacy:
        # Signs alone leave the matrix as large as its codebook; only a model that is normalised after it can take that.
        for kind, size in (("su", rows), ("sv", columns)):
            parts[kind] = torch.randint(0, 1 << 16, (size // TILE,), generator=generator).to(torch.int16)
    else:
        signs = torch.randint(0, 2, (rows,), generator=generator) * 2 - 1
        drawn = signs * (0.5 + torch.rand(rows, generator=generator))
        parts["suh"] = suh.clone() if suh is not None else drawn.half()
        size = 1 / (DEVIATION[codebook] * shape.inputs**0.5)
        signs = torch.randint(0, 2, (columns,), generator=generator) * 2 - 1
        svh = (signs * (0.8 + 0.4 * torch.rand(columns, generator=generator)) * size).half()
        svh[shape.outputs :] = 0
        parts["svh"] = svh
    if codebook != "3inst":
        parts[codebook] = torch.tensor(MARKERS[codebook], dtype=torch.int32)
    if shape.bias:
        parts["bias"] = (0.1 * torch.randn(shape.outputs, generator=generator)).half()
    return parts


def write_synthetic(
    config: Mapping[str, Any],
    target: Path,
    half_bits: Sequence[int],
    codebooks: Sequence[str],
    seed: int = 0,
    *,
    legacy: Sequence[str] = (),
    shared_suh: bool = False,
) -> dict[str, Shape]:
    """Write a checkpoint whose matrices take the given rates and codebooks in turn; gives the layers' true shapes.

    legacy: names of matrices that are stored with packed signs. shared_suh: gate and up get the same input scales.
    """
    target.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    layers = linear_layers(config)
    writer = _ShardWriter(target)
    for name, tensor in PlainTensors(config, generator):
        writer.add(name, tensor)
    turns = zip(itertools.cycle(half_bits), itertools.cycle(codebooks), strict=False)
    last_suh: Tensor | None = None
    for (name, shape), (rate, codebook) in zip(layers.items(), turns, strict=False):
        taken = last_suh if shared_suh and name.endswith(".up_proj") else None
        parts = matrix_tensors(shape, rate, codebook, name in legacy, generator, taken)
        last_suh = parts.get("suh")
        for kind, tensor in parts.items():
            writer.add(f"{name}.{kind}", tensor)
    writer.close()
    quantisation = {"quant_method": "exl3", "demo": "random bits: no text to be expected"}
    described = {**config, "quantization_config": quantisation}
    (target / "config.json").write_text(json.dumps(described, indent=1) + "\n")
    return layers


class _ShardWriter:
    """Collects tensors and writes a shard whenever enough have come."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.weight_map: dict[str, str] = {}
        self.pending: dict[str, Tensor] = {}
        self.pending_bytes = 0
        self.shards = 0

    def add(self, name: str, tensor: Tensor) -> None:
        self.pending[name] = tensor.contiguous()
        self.pending_bytes += tensor.nbytes
        if self.pending_bytes > SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        self.shards += 1
        file = f"model-{self.shards:05d}.safetensors"
        save_file(self.pending, self.target / file, metadata={"format": "pt"})
        (self.target / file).chmod(0o644)
        self.weight_map.update(dict.fromkeys(self.pending, file))
        self.pending, self.pending_bytes = {}, 0

    def close(self) -> None:
        if self.pending:
            self.flush()
        index = {"metadata": {}, "weight_map": self.weight_map}
        (self.target / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m exl3_vllm.synth", description=__doc__)
    parser.add_argument("config", type=Path, help="config.json of the model")
    parser.add_argument("target", type=Path, help="directory to write")
    parser.add_argument("--rates", default="4", help="bits per weight, taken in turn: 1 1.5 2 2.5 3 3.5 4 5 6 7 8")
    parser.add_argument("--codebooks", default="mcg", help="taken in turn: 3inst mcg mul1")
    parser.add_argument("--shared-suh", action="store_true", help="gate and up share their input scales")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rates = {f"{half / 2:g}": half for half in HALF_BITS}
    asked, codebooks = arguments.rates.split(","), arguments.codebooks.split(",")
    if not set(asked) <= set(rates) or not set(codebooks) <= set(CODEBOOKS):
        parser.error(f"rates are {', '.join(rates)}; codebooks are {', '.join(CODEBOOKS)}")
    config = json.loads(arguments.config.read_text())
    half_bits = [rates[one] for one in asked]
    try:
        write_synthetic(config, arguments.target, half_bits, codebooks, arguments.seed, shared_suh=arguments.shared_suh)
    except LayoutError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
