"""Synthetic checkpoints: valid, of the asked geometry, and the same for the same seed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from exl3_vllm import synth
from exl3_vllm.format import Checkpoint
from logits import COMMON, CONFIGS
from safetensors.torch import load_file

CONFIG = {**COMMON, **CONFIGS["qwen3_moe"]}


def test_a_checkpoint_in_several_shards_is_whole_and_repeatable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given shards that are closed after half a megabyte
    monkeypatch.setattr(synth, "SHARD_BYTES", 1 << 19)
    # when a model is written twice
    for folder in ("once", "twice"):
        synth.write_synthetic(CONFIG, tmp_path / folder, [4, 8], ["mcg", "mul1"], seed=3)
    # then it has every matrix, at the rates and codebooks in turn, in several shards whose index holds
    once, twice = (Checkpoint.open(tmp_path / folder) for folder in ("once", "twice"))
    assert set(once.matrices) == set(synth.linear_layers(CONFIG))
    assert {(m.bits, m.codebook) for m in once.matrices.values()} == {(2, "mcg"), (4, "mul1")}
    assert len(list((tmp_path / "once").glob("*.safetensors"))) >= 3
    assert once.fingerprint() == twice.fingerprint()


def test_the_command_writes_shared_scales_and_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "exl3_vllm.synth", str(tmp_path / "config.json"), str(tmp_path / "made")]
        return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120)

    assert run("--rates", "2,4.5").returncode == 2
    assert "rates are 1, 1.5" in run("--rates", "2,4.5").stderr
    done = run("--rates", "2,3", "--shared-suh")
    assert done.returncode == 0, done.stderr
    tensors = load_file(tmp_path / "made" / "model-00001.safetensors")
    gates = [name for name in tensors if name.endswith("gate_proj.suh")]
    assert len(gates) == 16
    assert all(tensors[gate].equal(tensors[gate.replace("gate_proj", "up_proj")]) for gate in gates)
