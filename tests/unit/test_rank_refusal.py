"""What the overlay refuses while vLLM loads becomes the rank's exit code 5 and its sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

OVERLAY = Path(__file__).resolve().parents[2] / "overlay"

# What vLLM does with an error of a plugin: pack it into one of its own, and end with status 1.
PROGRAM = """
from exl3_vllm.errors import CompletenessError
from exl3_vllm.refusals import told
try:
    with told():
        raise CompletenessError("tensor lm_head.trellis", "is lost", "Fetch it")
except CompletenessError as error:
    raise RuntimeError("Engine core initialization failed") from error
"""


def run_rank(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    model, info = folder / "model", folder / "site" / "exl3_vllm-0.dist-info"
    for directory in (model, info, folder / "run"):
        directory.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text("{}")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: exl3-vllm\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nexl3 = exl3_vllm:register\n")
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f"{OVERLAY}:{folder / 'site'}",
        "EXL3_RANK": "0",
        "EXL3_GENERATION": "g1",
        "EXL3_MODEL_DIR": str(model),
        "EXL3_RUN_DIR": str(folder / "run"),
        "EXL3_API": "http://127.0.0.1:1",
    }
    command = [sys.executable, "-B", "-m", "exl3_vllm.rank", "--", sys.executable, "-B", "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_a_refusal_is_the_ranks_exit_code_and_sentence(tmp_path: Path) -> None:
    done = run_rank(tmp_path, PROGRAM)
    assert done.returncode == 5, done.stderr
    assert "exl3: tensor lm_head.trellis: is lost. Fetch it." in done.stderr.splitlines()[-1]


def test_a_refusal_of_an_earlier_start_is_forgotten(tmp_path: Path) -> None:
    run_rank(tmp_path, PROGRAM)
    assert run_rank(tmp_path, "raise SystemExit(9)").returncode == 9
