"""Payload bit flips: no header shows them, a record of hashes does."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from exl3_vllm.contents import check_payload, payload_hashes
from exl3_vllm.errors import CheckpointError
from exl3_vllm.format import Checkpoint

REPO = Path(__file__).resolve().parents[3]
MODEL = REPO / "models" / "demo-moe"
FLIPS = 200


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return shutil.copytree(MODEL, tmp_path / "model")


def flip(path: Path, position: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 1 << bit]))


def test_every_flipped_bit_is_caught_and_its_tensor_is_named(copy: Path) -> None:
    # given a record of the model as it was published
    recorded = payload_hashes(Checkpoint.open(copy))
    rng = random.Random(FLIPS)
    entries = list(Checkpoint.open(copy).entries.values())
    for _ in range(FLIPS):
        # when one bit flips anywhere in a tensor, large or small
        entry = rng.choice(entries)
        position, bit = entry.begin + rng.randrange(entry.nbytes), rng.randrange(8)
        flip(entry.file, position, bit)
        # then the headers still agree, and the record names the tensor
        damaged = Checkpoint.open(copy)
        with pytest.raises(CheckpointError) as refusal:
            check_payload(damaged, recorded)
        assert f"tensor {entry.name}:" in str(refusal.value)
        flip(entry.file, position, bit)
    check_payload(Checkpoint.open(copy), recorded)


def test_a_tensor_that_came_or_went_is_named() -> None:
    checkpoint = Checkpoint.open(MODEL)
    recorded = payload_hashes(checkpoint)
    with pytest.raises(CheckpointError, match=r"tensor lm_head\.svh: is not in the record"):
        check_payload(checkpoint, {name: value for name, value in recorded.items() if name != "lm_head.svh"})
    with pytest.raises(CheckpointError, match=r"tensor mtp\.norm: is in the record, and no shard holds it"):
        check_payload(checkpoint, {**recorded, "mtp.norm": "0"})


def test_the_command_records_checks_and_refuses_with_5(copy: Path, tmp_path: Path) -> None:
    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-B", "-m", "exl3_vllm.contents", str(copy), *map(str, arguments)]
        environment = {**os.environ, "PYTHONPATH": str(REPO / "overlay")}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    # given a record
    record = tmp_path / "record.json"
    assert run("--record", record).returncode == 0
    assert len(json.loads(record.read_text())) == len(Checkpoint.open(copy).entries)
    # when / then: whole, it passes
    assert "every byte is as recorded" in run("--full-hash", record).stdout
    # with a flipped bit only the full hash refuses
    trellis = Checkpoint.open(copy).entries["model.layers.0.self_attn.q_proj.trellis"]
    flip(trellis.file, trellis.begin + 4097, 5)
    assert run().returncode == 0
    refused = run("--full-hash", record)
    assert refused.returncode == 5 and "tensor model.layers.0.self_attn.q_proj.trellis" in refused.stderr
    # what is no record, and what is no checkpoint, are sentences too
    record.write_text("[]")
    assert run("--full-hash", record).returncode == 5
    (copy / "model.safetensors").write_bytes(b"short")
    assert run().returncode == 5 and "Traceback" not in run().stderr
