"""A checkpoint with every trellis matrix written out as a dense weight: the unquantised control of a deployment.

`python -m exl3_vllm.export SOURCE TARGET [--dtype float16]`
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from exl3_vllm import decode
from exl3_vllm.errors import CheckpointError
from exl3_vllm.format import Checkpoint, TensorEntry, TrellisMatrix

SHARD_BYTES = 4 << 30


def _read(entry: TensorEntry) -> Tensor:
    with safe_open(entry.file, framework="pt") as file:
        tensor: Tensor = file.get_tensor(entry.name)
    return tensor


def matrix_weight(matrix: TrellisMatrix) -> Tensor:
    """The stored matrix as a dense weight fp32 [N, K] (padding included), in the layout of torch's linear layers."""
    scales = []
    for kind in (matrix.input_scale, matrix.output_scale):
        tensor = _read(matrix.tensors[kind])
        scales.append(decode.unpack_signs(tensor) if kind in ("su", "sv") else tensor)
    return decode.dequantise(_read(matrix.tensors["trellis"]), scales[0], scales[1], matrix.codebook).t()


def export_dense(
    source: Path, target: Path, dtype: torch.dtype, shapes: Mapping[str, tuple[int, int]] | None = None
) -> None:
    """Write the checkpoint `source` to the directory `target` without any trellis.

    Plain tensors, including biases, keep their dtype; other files are copied; config.json loses its quantisation.
    `shapes` gives the true (outputs, inputs) of matrices that are stored with padding to 128.

    Raises
    ------
    CheckpointError: the source is damaged, or has matrices whose true size is hidden by padding to 128 (then the
        exported shapes would not be the model's).
    """
    checkpoint = Checkpoint.open(source)
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and file.name != "model.safetensors.index.json":
            shutil.copyfile(file, target / file.name)
    config = json.loads((source / "config.json").read_text())
    config.pop("quantization_config", None)
    (target / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (target / "quantization_config.json").unlink(missing_ok=True)
    _write_shards(checkpoint, target, dtype, shapes or {})


def _write_shards(
    checkpoint: Checkpoint, target: Path, dtype: torch.dtype, shapes: Mapping[str, tuple[int, int]]
) -> None:
    weight_map: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    number = 0
    names = [*checkpoint.plain, *checkpoint.matrices]
    for position, name in enumerate(names):
        if name in checkpoint.matrices:
            matrix = checkpoint.matrices[name]
            if name not in shapes:
                _refuse_padding(matrix)
            outputs, inputs = shapes.get(name, (matrix.out_features, matrix.in_features))
            shard[f"{name}.weight"] = matrix_weight(matrix)[:outputs, :inputs].to(dtype).contiguous()
            if matrix.has_bias:
                shard[f"{name}.bias"] = _read(matrix.tensors["bias"])
        else:
            shard[name] = _read(checkpoint.plain[name])
        if position == len(names) - 1 or sum(tensor.nbytes for tensor in shard.values()) > SHARD_BYTES:
            number += 1
            file = f"model-{number:05d}.safetensors"
            save_file(shard, target / file, metadata={"format": "pt"})
            (target / file).chmod(0o644)  # the library makes it 0600, and the container has a user of its own
            weight_map.update(dict.fromkeys(shard, file))
            shard = {}
    index = {"metadata": {}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def _refuse_padding(matrix: TrellisMatrix) -> None:
    """Padding columns have a scale of exactly zero; a real column never has."""
    svh = matrix.tensors[matrix.output_scale]
    if matrix.output_scale == "svh" and not _read(svh).all():
        what = f"has padding among its {matrix.out_features} columns, and config.json alone knows the true size"
        raise CheckpointError(f"matrix {matrix.name}", what, "Serve it with the plugin instead")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m exl3_vllm.export", description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="float16")
    arguments = parser.parse_args()
    try:
        export_dense(arguments.source, arguments.target, getattr(torch, arguments.dtype))
    except CheckpointError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
