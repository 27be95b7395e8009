"""Adds up the torch profiler's traces beside the API; standard library only, like the observer.

    python3 -c SOURCE FOLDER

One JSON object: microseconds of the GPU by kernel name, of all traces in the folder, the span from the first kernel's
start to the last one's end, and the time in which at least one kernel ran.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ON_THE_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


def total(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """`{kernels, span, busy}` of one trace's events; kernels that overlap are each counted, busy time once."""
    ran = [
        (float(one["ts"]), float(one["dur"]), str(one["name"]))
        for one in events
        if one.get("cat") in ON_THE_GPU and "dur" in one
    ]
    kernels: Counter[str] = Counter()
    busy, until = 0.0, float("-inf")
    for begun, lasted, name in sorted(ran):
        kernels[name] += lasted  # type: ignore[assignment]  # a Counter of microseconds
        busy += max(0.0, begun + lasted - max(begun, until))
        until = max(until, begun + lasted)
    span = until - min(begun for begun, _, _ in ran) if ran else 0.0
    return {"kernels": dict(kernels), "span": span, "busy": busy}


def main(arguments: Sequence[str]) -> int:
    for path in sorted(Path(arguments[0]).glob("*.json*")):
        content = path.read_bytes()
        trace = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
        print(json.dumps({"file": path.name, **total(trace.get("traceEvents", []))}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
