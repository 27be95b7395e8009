"""Runs `vllm bench serve` beside the API, level after level; standard library only, like the observer.

    python3 -c SOURCE JOB

`JOB`: `argv` of each level, without where the result goes. One JSON object per level: what the generator wrote, without
its per-request lists, or `unanswered`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

LEVEL_S = 3600


def main(arguments: Sequence[str]) -> int:
    environment = dict(os.environ)
    key_file = os.environ.get("EXL3_API_KEY_FILE")
    if key_file:  # through the environment, where no other user sees it, as an argument would be seen
        environment["OPENAI_API_KEY"] = Path(key_file).read_text(encoding="utf-8").strip()
    environment |= {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    for argv in json.loads(arguments[0])["argv"]:
        with tempfile.TemporaryDirectory() as folder:
            where = ["--save-result", "--result-dir", folder, "--result-filename", "result.json"]
            done = subprocess.run(
                [*argv, *where], env=environment, capture_output=True, text=True, timeout=LEVEL_S, check=False
            )
            try:
                told = json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))
            except (OSError, ValueError):
                said = (done.stderr or done.stdout).strip()[-300:]
                print(
                    json.dumps({"unanswered": f"the load generator ended with {done.returncode}: {said}"}), flush=True
                )
                return 7
        print(json.dumps({name: value for name, value in told.items() if not isinstance(value, list)}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
