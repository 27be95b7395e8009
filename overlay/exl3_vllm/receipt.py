"""What one rank says about itself, as a JSON file that the kit collects.

The figures are counted inside the running rank: what was loaded, from the tensors themselves, after the last of them;
what the experts did, from `diagnostics`. A thread writes the file anew when they have changed, off the hot path.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from exl3_vllm.loading import ModelLoading

CADENCE_S = 5.0
"""At most this often, however many layers and calls there are."""


def load_report(loading: ModelLoading, rank: int, demo: str | None) -> dict[str, Any]:
    """What one rank has loaded.

    `trellis_tensors` and `trellis_bytes` count this rank's share; `rates` and `codebooks` count matrices; `fingerprint`
    identifies the checkpoint's content (see `Checkpoint.fingerprint`) and must agree on all ranks; `demo` is the
    checkpoint's own remark that it proves a path and no quality, or null.
    """
    matrices = [matrix for layer in loading.layers.values() for matrix in layer]
    return {
        "rank": rank,
        "layers": len(loading.layers),
        "trellis_tensors": len(matrices),
        "trellis_bytes": sum(loading.trellis_bytes.values()),
        "codebooks": dict(sorted(Counter(matrix.codebook for matrix in matrices).items())),
        "rates": {f"{half / 2:g}": count for half, count in sorted(Counter(m.half_bits for m in matrices).items())},
        "fingerprint": loading.checkpoint.fingerprint(),
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


_stop_previous = threading.Event()


def keep_writing(loaded: Mapping[str, Any], account: Callable[[], Mapping[str, Any]], directory: Path) -> None:
    """Write the receipt now, and again when the account has changed, until the process ends or another model loads."""
    global _stop_previous
    _stop_previous.set()
    _stop_previous = stop = threading.Event()
    written = {**loaded, **account()}
    write_report(written, directory)

    def write_changes(last: Mapping[str, Any]) -> None:
        while not stop.wait(CADENCE_S):
            now = {**loaded, **account()}
            if now != last:
                write_report(now, directory)
                last = now

    threading.Thread(target=write_changes, args=(written,), name="exl3-receipt", daemon=True).start()
