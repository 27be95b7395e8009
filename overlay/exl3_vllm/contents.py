"""The checker of a checkpoint's files. Headers and lists always; with a record, also every byte of every tensor.

    python -m exl3_vllm.contents CHECKPOINT                      what is checked before every start, seconds for 164 GiB
    python -m exl3_vllm.contents CHECKPOINT --record FILE        also write the sha256 of every tensor
    python -m exl3_vllm.contents CHECKPOINT --full-hash FILE     also hold every tensor against that record

Any bits are a valid trellis, so a bit that flipped on a disk or on the way shows in no header and in no shape: only a
hash of what the publisher had tells. Standard library only. Exit codes: 0 right, 2 usage, 5 refused.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from exl3_vllm.errors import CheckpointError
from exl3_vllm.format import GET_AGAIN, Checkpoint, TensorEntry

CHUNK = 8 << 20
REFUSED = 5


def payload_hash(entry: TensorEntry) -> str:
    """sha256 over a tensor's dtype, shape and all its bytes.

    Raises
    ------
    CheckpointError: the file can not be read.
    """
    digest = hashlib.sha256(f"{entry.dtype} {list(entry.shape)}\n".encode())
    try:
        with entry.file.open("rb") as file:
            file.seek(entry.begin)
            left = entry.nbytes
            while left and (data := file.read(min(CHUNK, left))):
                digest.update(data)
                left -= len(data)
    except OSError as error:
        raise CheckpointError(str(entry.file), f"can not be read ({error.strerror})", GET_AGAIN) from error
    return digest.hexdigest()


def payload_hashes(checkpoint: Checkpoint) -> dict[str, str]:
    """`payload_hash` of every tensor, by name; files are read from front to back."""
    in_order = sorted(checkpoint.entries.values(), key=lambda entry: (entry.file, entry.begin))
    return {entry.name: payload_hash(entry) for entry in in_order}


def check_payload(checkpoint: Checkpoint, recorded: Mapping[str, str]) -> None:
    """Every tensor holds what it held when `recorded` was written (`payload_hashes`).

    Raises
    ------
    CheckpointError: naming the first tensor that is another one, was not there, or is not there now.
    """
    for name in recorded:
        if name not in checkpoint.entries:
            raise CheckpointError(f"tensor {name}", "is in the record, and no shard holds it", "Fetch the shards again")
    for name, found in payload_hashes(checkpoint).items():
        entry = checkpoint.entries[name]
        if name not in recorded:
            what = "is not in the record"
        elif found != recorded[name]:
            what = f"has sha256 {found[:12]}…, the record says {recorded[name][:12]}…: its bytes are others"
        else:
            continue
        raise CheckpointError(f"{entry.file}: tensor {name}", what, "Fetch this file again, or record it anew")


def read_record(path: Path) -> dict[str, str]:
    """What `--record` wrote; raises CheckpointError for anything else."""
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(str(path), f"is no record of hashes ({error})", "Write it with --record") from error
    if not isinstance(record, dict) or not all(isinstance(value, str) for value in record.values()):
        raise CheckpointError(str(path), "is no record of hashes", "Write it with --record")
    return record


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m exl3_vllm.contents", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--record", type=Path, metavar="FILE", help="write the hash of every tensor")
    ways.add_argument("--full-hash", type=Path, metavar="FILE", help="hold every tensor against a record")
    arguments = parser.parse_args()
    try:
        checkpoint = Checkpoint.open(arguments.checkpoint)
        if arguments.record:
            arguments.record.write_text(json.dumps(payload_hashes(checkpoint), indent=1) + "\n")
        if arguments.full_hash:
            check_payload(checkpoint, read_record(arguments.full_hash))
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return REFUSED
    held = "every byte is as recorded" if arguments.full_hash else "headers, index and lists agree"
    print(f"{len(checkpoint.entries)} tensors, {len(checkpoint.matrices)} trellis matrices: {held}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
