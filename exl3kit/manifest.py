"""Manifest of a model directory: every file with size and digest, and whatever is wrong with the safetensors in it.

Standard library only, and free of the rest of the kit: the kit sends this very file to the nodes and runs it in the
image, as the user and through the mount that the rank will have, so what is checked is what vLLM is going to read.

    python3 -I -c "$(cat manifest.py)" DIRECTORY [--full]
prints {"files": {name: {size, digest}}, "problems": [...], ...}
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# Up to this size a file is hashed whole; above, 16 samples and the header stand for it: 164 GiB hashed at each start
# would take minutes, and two shards of the same model with the same header differ in every sample.
WHOLE = 64 << 20
SAMPLES = 16
SAMPLE = 64 << 10
LONGEST_HEADER = 100 << 20  # safetensors' own limit
# Held whole by each tensor rank: norms and scales are told by having one dimension, these by their name.
WHOLE_ON_A_RANK = re.compile(
    r"\.(q_a_proj|kv_a_proj\w*|fused_qkv_a_proj|gate|router|e_score_correction_bias|indexer\.\w+)\."
)
NUMBERED = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")


class Broken(Exception):
    """A file that cannot be what its name says; the message is a sentence without a full stop."""


def names(directory: Path) -> list[str]:
    """Relative POSIX names of every file below `directory`, links followed, hidden files and folders left out."""
    found = []
    for folder, below, files in os.walk(directory, followlinks=True):
        below[:] = sorted(name for name in below if not name.startswith("."))
        for name in files:
            if not name.startswith("."):
                found.append((Path(folder) / name).relative_to(directory).as_posix())
    return sorted(found)


def header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file; raises `Broken` unless the file is exactly as long as the header says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise Broken(f"is cut off: {size} bytes are too few for a safetensors file")
        (length,) = struct.unpack("<Q", start)
        if length > LONGEST_HEADER:
            raise Broken("is no safetensors file: its header would be longer than 100 MiB")
        text = file.read(length)
    if len(text) < length:
        raise Broken(f"is cut off inside its header: {size} bytes of at least {8 + length}")
    try:
        tensors = json.loads(text)
        ends = [entry["data_offsets"][1] for name, entry in tensors.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise Broken(f"has a damaged header ({type(error).__name__})") from error
    needed = 8 + length + max(ends, default=0)
    if size != needed:
        raise Broken(f"is {'cut off' if size < needed else 'too long'}: {size} bytes, its header says {needed}")
    return {name: entry for name, entry in tensors.items() if name != "__metadata__"}


def digest(path: Path, *, full: bool = False) -> str:
    """sha256 of the file; above `WHOLE` bytes and unless `full`, of its size, first MiB and `SAMPLES` even samples."""
    size = path.stat().st_size
    summed = hashlib.sha256()
    with path.open("rb") as file:
        if full or size <= WHOLE:
            while block := file.read(1 << 20):
                summed.update(block)
            return summed.hexdigest()
        summed.update(str(size).encode())
        summed.update(file.read(1 << 20))
        for sample in range(SAMPLES):
            file.seek((size - SAMPLE) * (sample + 1) // SAMPLES)
            summed.update(file.read(SAMPLE))
    return "sampled:" + summed.hexdigest()


def index_problems(weight_map: Mapping[str, str], shards: Mapping[str, set[str]]) -> Iterator[str]:
    """What `model.safetensors.index.json` and the shards say differently, each as one sentence."""
    for shard in sorted(set(weight_map.values()) - set(shards)):
        yield f"{shard} is missing, though the index names it"
    for tensor, shard in sorted(weight_map.items()):
        if shard in shards and tensor not in shards[shard]:
            yield f"tensor {tensor} is not in {shard}, though the index says so"
            return  # one example is enough: the rest are usually the same mistake
    for shard, tensors in sorted(shards.items()):
        for tensor in sorted(tensors - set(weight_map)):
            yield f"tensor {tensor} of {shard} has no entry in the index, so vLLM would skip it"
            return


def number_problems(shards: Mapping[str, set[str]]) -> Iterator[str]:
    """Shards that the numbering `-00001-of-00003` promises and that are not there."""
    for name in sorted(shards):
        match = NUMBERED.fullmatch(name)
        if match:
            count = int(match[3])
            wanted = [f"{match[1]}-{number:05}-of-{match[3]}.safetensors" for number in range(1, count + 1)]
            yield from (f"{missing} is missing" for missing in wanted if missing not in shards)
            return


def measure(tensors: Mapping[str, Any], sizes: dict[str, int]) -> None:
    """Add a shard's tensors to the sizes that memory is planned with (`exl3kit.admission.Sizes`)."""
    for name, entry in tensors.items():
        begin, end = entry["data_offsets"]
        shape = [int(number) for number in entry["shape"]]
        whole = WHOLE_ON_A_RANK.search(name) or (len(shape) < 2 and not name.endswith((".suh", ".svh")))
        sizes["whole" if whole else "cut"] += end - begin
        if name.endswith(".trellis") and len(shape) >= 3 and not whole:  # [K / 16, N / 16, 16 * bits]
            rows, columns = 16 * shape[-3], 16 * shape[-2]
            sizes["trellis"] += end - begin
            sizes["trellis_weights"] += rows * columns
            if rows * columns > sizes["largest_in"] * sizes["largest_out"]:
                sizes["largest_in"], sizes["largest_out"] = rows, columns


def survey(directory: Path, *, full: bool = False) -> dict[str, Any]:
    """Files, problems, and what the headers say about the tensors; `full` hashes every byte of every file.

    Returns `{"files": {name: {"size", "digest"}}, "problems": [sentence], "trellis_tensors": n, "trellis_bytes": n,
    "sizes": {...}, "config": config.json}`.
    """
    sizes = dict.fromkeys(("cut", "whole", "trellis", "trellis_weights", "largest_in", "largest_out"), 0)
    files: dict[str, dict[str, Any]] = {}
    problems: list[str] = []
    shards: dict[str, set[str]] = {}
    trellis = [0, 0]
    if not directory.is_dir():
        problems.append(f"{directory} is not a directory")
    for name in names(directory) if directory.is_dir() else []:
        path = directory / name
        try:
            files[name] = {"size": path.stat().st_size, "digest": digest(path, full=full)}
            if "/" not in name and name.endswith(".safetensors"):
                shards[name] = set()
                tensors = header(path)
                shards[name] = set(tensors)
                spans = [entry["data_offsets"] for key, entry in tensors.items() if key.endswith(".trellis")]
                trellis[0] += len(spans)
                trellis[1] += sum(end - begin for begin, end in spans)
                measure(tensors, sizes)
        except Broken as broken:
            problems.append(f"{name} {broken}")
        except FileNotFoundError:
            problems.append(f"{name} is a link to nothing")
        except OSError as error:
            problems.append(f"{name} cannot be read: {error.strerror}")
    if not problems:
        problems += [f"{needed} is missing" for needed in ("config.json",) if needed not in files]
        if not shards:
            problems.append("there is no .safetensors file")
        problems += index_or_number_problems(directory, shards)
    found = {"files": files, "problems": problems, "trellis_tensors": trellis[0], "trellis_bytes": trellis[1]}
    return {**found, "sizes": sizes, "config": configuration(directory)}


def configuration(directory: Path) -> dict[str, Any]:
    """The model's config.json; empty when there is none that can be read."""
    try:
        return dict(json.loads((directory / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def index_or_number_problems(directory: Path, shards: Mapping[str, set[str]]) -> list[str]:
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return list(number_problems(shards))
    try:
        weight_map = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        return [f"{index.name} is damaged ({type(error).__name__})"]
    return list(index_problems(weight_map, shards))


if __name__ == "__main__":
    print(json.dumps(survey(Path(sys.argv[1]), full="--full" in sys.argv[2:])))
