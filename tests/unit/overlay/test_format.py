"""The reader of EXL3 checkpoints: what it accepts, and what it refuses by name."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from exl3_vllm.errors import CheckpointError
from exl3_vllm.format import CODEBOOKS, DTYPE_BYTES, HALF_BITS, Checkpoint, group_matrices, read_header

MODELS = Path(__file__).resolve().parents[3] / "models"
Header = dict[str, Any]


def write_file(path: Path, tensors: dict[str, tuple[str, list[int]]]) -> Path:
    """A safetensors file of zeros with the given dtypes and shapes."""
    header: Header = {}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        size = DTYPE_BYTES[dtype]
        for length in shape:
            size *= length
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    write_raw(path, header, bytes(offset))
    return path


def write_raw(path: Path, header: Header, data: bytes) -> None:
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def split(path: Path) -> tuple[Header, bytes]:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def matrix(module: str, rows: int = 128, columns: int = 256, half_bits: int = 6) -> dict[str, tuple[str, list[int]]]:
    return {
        f"{module}.trellis": ("I16", [rows // 16, columns // 16, 8 * half_bits]),
        f"{module}.suh": ("F16", [rows]),
        f"{module}.svh": ("F16", [columns]),
        f"{module}.mcg": ("I32", []),
    }


@pytest.mark.parametrize("codebook", CODEBOOKS)
@pytest.mark.parametrize("half_bits", HALF_BITS)
def test_rate_and_codebook_come_from_the_tensors(half_bits: int, codebook: str, tmp_path: Path) -> None:
    # given a matrix of one rate and codebook
    tensors = matrix("m", half_bits=half_bits)
    del tensors["m.mcg"]
    if codebook != "3inst":
        tensors[f"m.{codebook}"] = ("I32", [])
    # when its header is read
    (found,) = group_matrices(read_header(write_file(tmp_path / "x.safetensors", tensors))).values()
    # then everything is known
    assert (found.bits, found.codebook) == (half_bits / 2, codebook)
    assert (found.in_features, found.out_features) == (128, 256)
    assert found.trellis_bytes == 128 * 256 * half_bits // 16


def test_legacy_signs_and_a_bias_are_known(tmp_path: Path) -> None:
    tensors = matrix("m")
    del tensors["m.suh"], tensors["m.svh"]
    tensors |= {"m.su": ("I16", [8]), "m.sv": ("I16", [16]), "m.bias": ("F16", [200])}
    (found,) = group_matrices(read_header(write_file(tmp_path / "x.safetensors", tensors))).values()
    assert (found.input_scale, found.output_scale, found.has_bias) == ("su", "sv", True)


def changed(**changes: tuple[str, list[int]] | None) -> dict[str, tuple[str, list[int]]]:
    """The tensors of matrix `m` with some replaced, added, or (None) left out."""
    tensors: dict[str, Any] = matrix("m")
    tensors |= {f"m.{kind}": value for kind, value in changes.items()}
    return {name: value for name, value in tensors.items() if value is not None}


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        (changed(trellis=("I16", [8, 16, 40])), None),
        (changed(trellis=("I16", [8, 16, 72])), "m.trellis"),
        (changed(trellis=("I16", [8, 16, 47])), "m.trellis"),
        (changed(trellis=("I16", [8, 16, 0])), "m.trellis"),
        (changed(trellis=("I32", [8, 16, 48])), "m.trellis"),
        (changed(trellis=("I16", [128, 48])), "m.trellis"),
        (changed(trellis=("I16", [4, 16, 48]), suh=("F16", [64])), "m.trellis"),
        (changed(trellis=("I16", [0, 16, 48]), suh=("F16", [0])), "m.trellis"),
        (changed(trellis=None), "m.mcg"),
        (changed(suh=None), "m.suh"),
        (changed(svh=None), "m.svh"),
        (changed(suh=("F16", [256])), "m.suh"),
        (changed(svh=("F32", [256])), "m.svh"),
        (changed(su=("I16", [8])), "m.su"),
        (changed(sv=("I16", [16])), "m.sv"),
        (changed(suh=None, su=("I16", [7])), "m.su"),
        (changed(mul1=("I32", [])), "m.mul1"),
        (changed(mcg=("I64", [])), "m.mcg"),
        (changed(mcg=("I32", [2])), "m.mcg"),
        (changed(bias=("F16", [64])), "m.bias"),
        (changed(bias=("I16", [256])), "m.bias"),
        (changed(weight=("F16", [256, 128])), "m.weight"),
        (changed(scale=("F16", [1])), "m.scale"),
    ],
)
def test_a_matrix_that_contradicts_itself_is_refused_by_name(
    tensors: dict[str, tuple[str, list[int]]], named: str | None, tmp_path: Path
) -> None:
    entries = read_header(write_file(tmp_path / "x.safetensors", tensors))
    if named is None:
        assert group_matrices(entries)["m"].bits == 2.5
        return
    with pytest.raises(CheckpointError) as refusal:
        group_matrices(entries)
    assert f"tensor {named}:" in str(refusal.value)


def test_an_index_and_its_shards_must_agree(tmp_path: Path) -> None:
    # given two shards and an index
    write_file(tmp_path / "a.safetensors", matrix("m"))
    write_file(tmp_path / "b.safetensors", matrix("n"))
    index = dict.fromkeys(matrix("m"), "a.safetensors") | dict.fromkeys(matrix("n"), "b.safetensors")

    def opened(weight_map: Any) -> Checkpoint:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return Checkpoint.open(tmp_path)

    # when / then: whole, it opens; with any entry lost, moved or invented, it names the tensor or the shard
    assert set(opened(index).matrices) == {"m", "n"}
    for weight_map, named in [
        ({name: file for name, file in index.items() if name != "n.svh"}, "tensor n.svh"),
        (index | {"n.svh": "a.safetensors"}, "tensor n.svh"),
        (index | {"extra.weight": "b.safetensors"}, "tensor extra.weight"),
        (index | {"n.svh": "c.safetensors"}, "c.safetensors"),
        (index | {"n.svh": "../b.safetensors"}, "not a shard index"),
        ([], "not a shard index"),
        ({"n.svh": 3}, "not a shard index"),
    ]:
        with pytest.raises(CheckpointError, match=named):
            opened(weight_map)


def test_a_lost_marker_is_noticed_by_the_converters_list(tmp_path: Path) -> None:
    # given the dense demo without one marker: still a valid checkpoint, of another codebook
    model = shutil.copytree(MODELS / "demo-dense", tmp_path / "model")
    header, data = split(model / "model.safetensors")
    rebuilt = {name: value for name, value in header.items() if name != "lm_head.mcg"}
    gone = header["lm_head.mcg"]["data_offsets"]
    for name, value in rebuilt.items():
        if name != "__metadata__" and value["data_offsets"][0] >= gone[1]:
            value["data_offsets"] = [offset - 4 for offset in value["data_offsets"]]
    write_raw(model / "model.safetensors", rebuilt, data[: gone[0]] + data[gone[1] :])
    # when / then
    with pytest.raises(CheckpointError, match=r"tensor lm_head\.mcg: is listed in quantization_config\.json"):
        Checkpoint.open(model)
    (model / "quantization_config.json").unlink()
    assert Checkpoint.open(model).matrices["lm_head"].codebook == "3inst"


def test_the_fingerprint_tells_two_contents_apart_and_not_two_places(tmp_path: Path) -> None:
    # given a copy elsewhere, and one with a single bit of a trellis changed
    here = MODELS / "demo-moe"
    copy = shutil.copytree(here, tmp_path / "copy")
    other = shutil.copytree(here, tmp_path / "other")
    trellis = Checkpoint.open(other).matrices["model.layers.1.mlp.experts.3.up_proj"].tensors["trellis"]
    content = bytearray(trellis.file.read_bytes())
    content[trellis.begin] ^= 1
    trellis.file.write_bytes(content)
    # when / then
    same, copied, changed = (Checkpoint.open(directory).fingerprint() for directory in (here, copy, other))
    assert same == copied != changed


# ---- 500 structural corruptions: each one is refused, none ends in another exception -------------------------------

SEED = 500


def corrupt_header(rng: random.Random, model: Path) -> None:
    """Another value in one entry of the header: dtype, shape, offsets, name, or not an entry at all."""
    file = model / "model.safetensors"
    header, data = split(file)
    name = rng.choice([name for name in header if name != "__metadata__"])
    entry = header[name]
    kind = rng.randrange(7)
    if kind == 0:
        entry["dtype"] = rng.choice(["F32", "I64", "F7", "", None, 3, ["F16"]])
    elif kind == 1:
        entry["shape"] = rng.choice([None, "x", [*entry["shape"], 2], [-1], [1.5], [True], [[]], {"a": 1}, [2**70]])
    elif kind == 2:
        entry["data_offsets"] = rng.choice([None, [], [0], [5, 1], [0, 2**70], ["a", "b"], [1, 2, 3], [-4, 4], 7])
    elif kind == 3:
        entry["data_offsets"] = [offset + rng.choice([-2, 2, 4096]) for offset in entry["data_offsets"]]
    elif kind == 4:
        header[name] = rng.choice([None, 5, [], "x"])
    elif kind == 5:
        header[rng.choice(["lost.trellis", f"{name}.suh", f"{name}x"])] = header.pop(name)
    else:
        del entry[rng.choice(["dtype", "shape", "data_offsets"])]
    write_raw(file, header, data)


def corrupt_bytes(rng: random.Random, model: Path) -> None:
    """A file cut short, padded, or with another header length or broken header text."""
    file = model / "model.safetensors"
    content = bytearray(file.read_bytes())
    (length,) = struct.unpack("<Q", content[:8])
    kind = rng.randrange(5)
    if kind == 0:
        del content[rng.randrange(len(content)) :]
    elif kind == 1:
        content += bytes(rng.randrange(1, 64))
    elif kind == 2:
        content[:8] = struct.pack("<Q", rng.choice([0, 1, length - 1, length + 1, 2**40, 2**64 - 1]))
    elif kind == 3:
        content[8 + rng.randrange(2)] = rng.choice(b"[}x\xff\x00")
    else:
        del content[8 + rng.randrange(length)]
    file.write_bytes(content)


def corrupt_set(rng: random.Random, model: Path) -> None:
    """A tensor lost, a tensor stored twice, a stray shard, a list or index that is not one."""
    file = model / "model.safetensors"
    header, _ = split(file)
    kind = rng.randrange(4)
    if kind == 0:
        tensors = {n: (e["dtype"], e["shape"]) for n, e in header.items() if n != "__metadata__"}
        del tensors[rng.choice(list(tensors))]
        write_file(file, tensors)
    elif kind == 1:
        shutil.copyfile(file, model / "model-2.safetensors")
    elif kind == 2:
        (model / "quantization_config.json").write_text(
            rng.choice(["", "[]", '{"tensor_storage": 3}', '{"tensor_storage": {"a": 1}}', "\x00"])
        )
    else:
        (model / "model.safetensors.index.json").write_text(
            rng.choice(["", "[]", "{}", '{"weight_map": {"a": "model.safetensors"}}', '{"weight_map": 3}', "nul"])
        )


@pytest.mark.parametrize("corrupt", [corrupt_header, corrupt_bytes, corrupt_set])
def test_structural_corruptions_are_refused(corrupt: Callable[[random.Random, Path], None], tmp_path: Path) -> None:
    pristine = MODELS / "demo-dense"
    needed = ("model.safetensors", "quantization_config.json")
    counts = {corrupt_header: 220, corrupt_bytes: 160, corrupt_set: 120}
    assert sum(counts.values()) == SEED
    for number in range(counts[corrupt]):
        # given a checkpoint with one structural fault
        model = tmp_path / "model"
        shutil.rmtree(model, ignore_errors=True)
        model.mkdir()
        for name in needed:
            shutil.copyfile(pristine / name, model / name)
        corrupt(random.Random(f"{corrupt.__name__} {number}"), model)
        # when / then it is refused in a sentence with a next step, and nothing else escapes
        with pytest.raises(CheckpointError) as refusal:
            Checkpoint.open(model)
        assert str(refusal.value).startswith("exl3: "), number
        assert refusal.value.next_step
