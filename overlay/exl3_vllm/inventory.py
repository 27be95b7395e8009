"""The converter's own list of what it wrote: `tensor_storage` in quantization_config.json.

Of all that file says, one thing is used: a tensor it lists and no shard holds has been lost. That is the only way to
notice a lost marker, since a trellis without a marker is a valid one of the 3INST codebook.
"""

from __future__ import annotations

import json
from collections.abc import Container
from pathlib import Path

from exl3_vllm.errors import CheckpointError

FILE = "quantization_config.json"


def check_inventory(directory: Path, present: Container[str]) -> None:
    """Every tensor that the converter listed is among `present`.

    Raises
    ------
    CheckpointError: naming the first lost tensor, or a file that can not be read. A checkpoint without the list passes.
    """
    path = directory / FILE
    if not path.is_file():
        return
    try:
        storage = json.loads(path.read_bytes()).get("tensor_storage", {})
        listed = [name for module in storage.values() for name in module["stored_tensors"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        next_step = "Fetch it again, or remove it if it belongs to another conversion"
        raise CheckpointError(str(path), f"is not a converter's list ({error})", next_step) from error
    for name in listed:
        if name not in present:
            what = f"is listed in {FILE}, and no shard holds it"
            next_step = f"Fetch the shards again, or remove {FILE} if it belongs to another conversion"
            raise CheckpointError(f"tensor {name}", what, next_step)
