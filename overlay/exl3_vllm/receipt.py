"""What one rank says about itself, as a JSON file that the kit collects.

The figures are counted inside the running rank, from the tensors that were loaded, after the last of them.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from exl3_vllm.loading import ModelLoading

SCHEMA = 1


def load_report(loading: ModelLoading, rank: int, tp_size: int, backend: str, demo: str | None) -> dict[str, Any]:
    """The load report of one rank.

    `trellis_tensors` and `trellis_bytes` count this rank's share; `rates` and `codebooks` count matrices; `fingerprint`
    identifies the checkpoint's content (see `Checkpoint.fingerprint`) and must agree on all ranks; `demo` is the
    checkpoint's own remark that it proves a path and no quality, or null.
    """
    matrices = [matrix for layer in loading.layers.values() for matrix in layer]
    return {
        "schema": SCHEMA,
        "rank": rank,
        "tp_size": tp_size,
        "layers": len(loading.layers),
        "trellis_tensors": len(matrices),
        "trellis_bytes": sum(loading.trellis_bytes.values()),
        "codebooks": dict(sorted(Counter(matrix.codebook for matrix in matrices).items())),
        "rates": {f"{half / 2:g}": count for half, count in sorted(Counter(m.half_bits for m in matrices).items())},
        "fingerprint": loading.checkpoint.fingerprint(),
        "backend": backend,
        "demo": demo,
        "pid": os.getpid(),
    }


def write_report(report: Mapping[str, Any], directory: Path) -> Path:
    """Write `rank<N>.json` so that a reader sees the old file or the new one, never half of one."""
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / f"rank{report['rank']}.json"
    with tempfile.NamedTemporaryFile("w", dir=directory, prefix=f".{target.name}.", delete=False) as file:
        json.dump(report, file, indent=1, sort_keys=True)
        file.write("\n")
    # The supervisor may run under another user id than the reader on the host.
    Path(file.name).chmod(0o644)
    Path(file.name).replace(target)
    return target
