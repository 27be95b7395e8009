"""EXL3 checkpoints as their files describe them: safetensors headers, no payload, no torch.

Everything that decides how a matrix is decoded (rate, codebook, kind of scales) comes from the names, dtypes and
shapes of its own tensors. `config.json` is never asked: packs mix rates and codebooks, and some carry a wrong summary.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from exl3_vllm.errors import CheckpointError
from exl3_vllm.inventory import check_inventory

BLOCK = 128
"""Rows (or columns) that one Hadamard block mixes: every cut and every padded size is a multiple of it."""

TILE = 16
"""A trellis tile holds 16 input rows by 16 output columns: 256 weights."""

HALF_BITS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
"""Twice the bits per weight of the rates that exist: 1, 1.5, 2, 2.5, 3, 3.5 and 4 to 8."""

CODEBOOKS = ("3inst", "mcg", "mul1")

DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library itself."""

SAMPLE_BYTES = 4096

PART_KINDS = ("trellis", "suh", "svh", "su", "sv", "mcg", "mul1")
"""Last name components that belong to a trellis matrix (`bias` is a plain tensor that may accompany it)."""

GET_AGAIN = "Fetch this file again and compare its size with the publisher's"


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a safetensors file.

    `shape` in elements, `begin` and `nbytes` in bytes; `begin` counts from the start of the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    nbytes: int


@dataclass(frozen=True)
class TrellisMatrix:
    """One quantised matrix W[K, N] of a checkpoint, described by its own tensors.

    `in_features` (K) and `out_features` (N) are the stored sizes, padded to 128. `half_bits` is twice the bits per
    weight. `input_scale` and `output_scale` name the stored kind: `suh`/`svh` (fp16) or the legacy `su`/`sv` (packed
    signs).
    """

    name: str
    half_bits: int
    codebook: str
    in_features: int
    out_features: int
    input_scale: str
    output_scale: str
    tensors: Mapping[str, TensorEntry]

    @property
    def bits(self) -> float:
        """Bits per weight."""
        return self.half_bits / 2

    @property
    def has_bias(self) -> bool:
        return "bias" in self.tensors

    @property
    def trellis_bytes(self) -> int:
        return self.tensors["trellis"].nbytes


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file, from its header and its size.

    Raises
    ------
    CheckpointError: unreadable, truncated, not safetensors, or a header that contradicts itself or the file's size.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            prefix = file.read(8)
            if len(prefix) < 8:
                raise CheckpointError(str(path), f"{size} bytes are too few for a safetensors file", GET_AGAIN)
            (length,) = struct.unpack("<Q", prefix)
            if length > min(size - 8, MAX_HEADER_BYTES):
                what = f"its header claims {length} bytes, the file has {size}"
                raise CheckpointError(str(path), what, GET_AGAIN)
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(str(path), f"can not be read ({error.strerror})", GET_AGAIN) from error
    entries = dict(_parse_header(path, raw, data_start=8 + length))
    _check_extents(path, entries, data_start=8 + length, size=size)
    return entries


def _parse_header(path: Path, raw: bytes, data_start: int) -> Iterator[tuple[str, TensorEntry]]:
    try:
        header = json.loads(raw, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(str(path), f"its header is not JSON ({error})", GET_AGAIN) from error
    if not isinstance(header, dict):
        raise CheckpointError(str(path), "its header is not a JSON object", GET_AGAIN)
    for name, value in header.items():
        if name != "__metadata__":
            yield name, _parse_entry(path, name, value, data_start)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen = dict(pairs)
    if len(seen) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice} appears twice")
    return seen


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 0


def _parse_entry(path: Path, name: str, value: Any, data_start: int) -> TensorEntry:
    where = f"{path}: tensor {name}"
    if not isinstance(value, dict):
        raise CheckpointError(where, "its header entry is not an object", GET_AGAIN)
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise CheckpointError(where, f"unknown dtype {dtype!r}", GET_AGAIN)
    if not isinstance(shape, list) or not all(_is_size(size) for size in shape):
        raise CheckpointError(where, f"shape {shape!r} is not a list of sizes", GET_AGAIN)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        raise CheckpointError(where, f"data_offsets {offsets!r} is not a pair of offsets", GET_AGAIN)
    begin, end = offsets
    expected = math.prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != expected:
        what = f"{dtype} of shape {shape} takes {expected} bytes, its offsets span {end - begin}"
        raise CheckpointError(where, what, GET_AGAIN)
    return TensorEntry(name, dtype, tuple(shape), path, data_start + begin, expected)


def _check_extents(path: Path, entries: Mapping[str, TensorEntry], data_start: int, size: int) -> None:
    """Tensors must tile the data section exactly: a gap, an overlap or a short file is a damaged file."""
    position = data_start
    for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.nbytes)):
        if entry.begin != position:
            kind = "overlaps the tensor before it" if entry.begin < position else "leaves a gap before it"
            raise CheckpointError(f"{path}: tensor {entry.name}", kind, GET_AGAIN)
        position += entry.nbytes
        if position > size:
            what = f"ends at byte {position}, the file has only {size}: it is truncated"
            raise CheckpointError(f"{path}: tensor {entry.name}", what, GET_AGAIN)
    if position != size:
        raise CheckpointError(str(path), f"{size - position} bytes follow the last tensor", GET_AGAIN)


class Checkpoint:
    """A checkpoint directory: all tensors of all shards, grouped into trellis matrices and plain tensors.

    Attributes
    ----------
    entries: every tensor by name.
    matrices: the trellis matrices by module name (`model.layers.0.mlp.down_proj`).
    plain: the tensors that belong to no trellis matrix, by name.
    """

    def __init__(self, directory: Path, entries: Mapping[str, TensorEntry]) -> None:
        self.directory = directory
        self.entries = dict(entries)
        self.matrices = group_matrices(self.entries)
        used = {part.name for matrix in self.matrices.values() for part in matrix.tensors.values()}
        self.plain = {name: entry for name, entry in self.entries.items() if name not in used}

    @classmethod
    def open(cls, directory: str | Path) -> Checkpoint:
        """Read every shard's header.

        Raises
        ------
        CheckpointError: no shard, a missing or damaged one, an index or a converter's list that disagrees with the
            shards, or tensors that form no valid trellis matrix. The message names the file or the tensor.
        """
        directory = Path(directory)
        index = directory / "model.safetensors.index.json"
        entries = _read_indexed(index) if index.exists() else _read_all(directory)
        check_inventory(directory, entries)
        return cls(directory, entries)

    @cached_property
    def trellis_bytes(self) -> int:
        return sum(matrix.trellis_bytes for matrix in self.matrices.values())

    def fingerprint(self) -> str:
        """sha256 over every tensor's name, dtype, shape and samples of its payload (first, middle and last 4 KiB).

        Two ranks with another revision, or with one matrix swapped, differ; a single flipped bit in a large tensor may
        pass, which is what a full hash is for. Samples keep it at seconds for 164 GiB.
        """
        digest = hashlib.sha256()
        by_file: dict[Path, list[TensorEntry]] = {}
        for _, entry in sorted(self.entries.items()):
            by_file.setdefault(entry.file, []).append(entry)
        for path in sorted(by_file):
            with path.open("rb") as file:
                for entry in by_file[path]:
                    digest.update(f"{entry.name} {entry.dtype} {entry.shape}\n".encode())
                    for begin, length in _samples(entry):
                        file.seek(begin)
                        digest.update(file.read(length))
        return digest.hexdigest()


def _samples(entry: TensorEntry) -> list[tuple[int, int]]:
    if entry.nbytes <= 3 * SAMPLE_BYTES:
        return [(entry.begin, entry.nbytes)]
    starts = (0, (entry.nbytes - SAMPLE_BYTES) // 2, entry.nbytes - SAMPLE_BYTES)
    return [(entry.begin + start, SAMPLE_BYTES) for start in starts]


def _read_all(directory: Path) -> dict[str, TensorEntry]:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(str(directory), "holds no .safetensors file", "Point to a checkpoint directory")
    entries: dict[str, TensorEntry] = {}
    for file in files:
        for name, entry in read_header(file).items():
            if name in entries:
                what = f"is also in {entries[name].file.name}"
                raise CheckpointError(f"{file}: tensor {name}", what, "Remove the file that does not belong here")
            entries[name] = entry
    return entries


def _read_indexed(index: Path) -> dict[str, TensorEntry]:
    try:
        weight_map = json.loads(index.read_bytes(), object_pairs_hook=_no_duplicates)["weight_map"]
        shards = sorted(set(weight_map.values()))
        if any(Path(shard).name != shard for shard in shards):
            raise ValueError("a shard name is not a plain file name")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(str(index), f"is not a shard index ({error})", GET_AGAIN) from error
    entries: dict[str, TensorEntry] = {}
    for shard in shards:
        path = index.parent / shard
        if not path.is_file():
            raise CheckpointError(str(path), "the index names this shard, and it is not there", "Fetch it")
        for name, entry in read_header(path).items():
            if weight_map.get(name) != shard:
                what = f"the index lists it under {weight_map.get(name)!r}, so a loader would leave it out"
                raise CheckpointError(f"{path}: tensor {name}", what, "Fetch index and shards of one revision")
            entries[name] = entry
    for name, shard in weight_map.items():
        if name not in entries:
            what = f"the index promises it in {shard}, which does not hold it"
            raise CheckpointError(f"{index}: tensor {name}", what, "Fetch index and shards of one revision")
    return entries


def group_matrices(entries: Mapping[str, TensorEntry]) -> dict[str, TrellisMatrix]:
    """Gather the parts `<module>.<kind>` of every trellis matrix and check them against each other.

    Raises
    ------
    CheckpointError: a part is missing, doubled, or of the wrong dtype or shape; the message names the tensor.
    """
    parts: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in entries.items():
        module, _, kind = name.rpartition(".")
        if kind in PART_KINDS:
            parts.setdefault(module, {})[kind] = entry
    for module, tensors in parts.items():
        bias = entries.get(f"{module}.bias")
        if bias is not None:
            tensors["bias"] = bias
        for unwanted in ("weight", "scale"):
            if f"{module}.{unwanted}" in entries:
                what = f"stands beside {module}.trellis, so two answers exist for one matrix"
                raise CheckpointError(f"tensor {module}.{unwanted}", what, "Convert the model again")
    return {module: _matrix(module, tensors) for module, tensors in sorted(parts.items())}


def _matrix(module: str, tensors: Mapping[str, TensorEntry]) -> TrellisMatrix:
    if "trellis" not in tensors:
        orphan = sorted(tensors)[0]
        raise _bad(f"{module}.{orphan}", f"has no {module}.trellis beside it")
    half_bits, in_features, out_features = _trellis_geometry(tensors["trellis"])
    markers = [codebook for codebook in ("mcg", "mul1") if codebook in tensors]
    if len(markers) > 1:
        raise _bad(f"{module}.mul1", f"stands beside {module}.mcg, and a matrix has one codebook")
    for marker in markers:
        _expect(tensors[marker], "I32", (), (1,))
    input_scale = _scale_kind(module, tensors, "suh", "su", in_features)
    output_scale = _scale_kind(module, tensors, "svh", "sv", out_features)
    if "bias" in tensors:
        _check_bias(tensors["bias"], out_features)
    codebook = markers[0] if markers else "3inst"
    return TrellisMatrix(
        module, half_bits, codebook, in_features, out_features, input_scale, output_scale, dict(tensors)
    )


def _trellis_geometry(trellis: TensorEntry) -> tuple[int, int, int]:
    """(half_bits, K, N) of a trellis int16 [K/16, N/16, 8 * half_bits]."""
    if trellis.dtype != "I16" or len(trellis.shape) != 3:
        raise _bad(trellis.name, f"is {trellis.dtype} {list(trellis.shape)}; a trellis is I16 [K/16, N/16, 16*bits]")
    rows, columns, words = trellis.shape
    half_bits, rest = divmod(words, 8)
    if rest or half_bits not in HALF_BITS:
        raise _bad(trellis.name, f"has {words} words per tile, which is no rate of EXL3 (1 to 8 bits)")
    in_features, out_features = rows * TILE, columns * TILE
    if not in_features or not out_features or in_features % BLOCK or out_features % BLOCK:
        raise _bad(trellis.name, f"is {in_features} x {out_features}; both must be multiples of {BLOCK}")
    return half_bits, in_features, out_features


def _scale_kind(module: str, tensors: Mapping[str, TensorEntry], modern: str, legacy: str, features: int) -> str:
    if modern in tensors and legacy in tensors:
        raise _bad(f"{module}.{legacy}", f"stands beside {module}.{modern}, and a matrix has one of them")
    if modern in tensors:
        _expect(tensors[modern], "F16", (features,))
        return modern
    if legacy in tensors:
        _expect(tensors[legacy], "I16", (features // TILE,))
        return legacy
    raise _bad(f"{module}.{modern}", f"is missing beside {module}.trellis")


def _check_bias(bias: TensorEntry, out_features: int) -> None:
    length = bias.shape[0] if len(bias.shape) == 1 else -1
    if bias.dtype not in ("F16", "BF16", "F32") or not out_features - BLOCK < length <= out_features:
        raise _bad(bias.name, f"is {bias.dtype} {list(bias.shape)}; its matrix has {out_features} columns")


def _expect(entry: TensorEntry, dtype: str, *shapes: tuple[int, ...]) -> None:
    if entry.dtype != dtype or entry.shape not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise _bad(entry.name, f"is {entry.dtype} {list(entry.shape)}, its trellis asks for {dtype} {wanted}")


def _bad(tensor: str, what: str) -> CheckpointError:
    return CheckpointError(f"tensor {tensor}", what, "Convert the model again, or fetch it again")
