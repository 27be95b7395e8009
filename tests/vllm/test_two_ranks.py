"""Both demo models at tensor parallel 2: two processes of vLLM on the loopback, each with half of every matrix."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from demo import changed_copy, other_trellis
from logits import make_synthetic, relative_error
from plan_figures import assert_planned

DRIVER = Path(__file__).parent / "rank_of_two.py"


def free_ports(count: int) -> int:
    """The first of `count` neighbouring free ports."""
    for first in range(29600, 32000, count):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise RuntimeError("no free ports")


def run_two_ranks(models_of_rank: list[list[Path]], folder: Path) -> list[list[list[Any]]]:
    """The wrong answers by rank and model. Raises AssertionError with a rank's last words when it fails."""
    # vLLM gives the shared memory of ranks that are started this way one name on a machine, and refuses to start over
    # what a killed run has left of it ("create shm in SHMManager failed. errno: 17").
    for left in Path("/dev/shm").glob("-?p:*cpushm*"):
        left.unlink(missing_ok=True)
    port = free_ports(len(models_of_rank[0]))
    environment = {**os.environ, "EXL3_RECEIPT_DIR": str(folder), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    ranks = []
    for rank, models in enumerate(models_of_rank):
        log = (folder / f"rank{rank}.log").open("w")
        command = [sys.executable, str(DRIVER), str(rank), str(port), *map(str, models)]
        ranks.append(subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=log))
    try:
        said = [rank.communicate(timeout=600)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for number, rank in enumerate(ranks):
        assert rank.returncode == 0, (folder / f"rank{number}.log").read_text()[-3000:]
    return [[json.loads(line) for line in lines.splitlines() if line.startswith("[")] for lines in said]


@pytest.fixture(scope="module")
def two_ranks(models: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[list[Any]]], Path]:
    """Dense, MoE, and dense again with one matrix of rank 1 replaced: run once for all tests of this module."""
    folder = tmp_path_factory.mktemp("ranks")
    dense, moe = models / "demo-dense", models / "demo-moe"
    swapped = changed_copy(dense, folder, other_trellis("model.layers.0.self_attn.v_proj"))
    return run_two_ranks([[dense, moe, dense], [dense, moe, swapped]], folder), folder


def receipts(folder: Path, model: int) -> list[dict[str, Any]]:
    return [json.loads((folder / str(model) / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("model", [0, 1], ids=["dense", "moe"])
def test_both_ranks_give_five_exact_answers(model: int, two_ranks: tuple[list[list[list[Any]]], Path]) -> None:
    answers, _ = two_ranks
    assert [answers[rank][model] for rank in (0, 1)] == [[], []]


@pytest.mark.parametrize(("model", "matrices", "nbytes"), [(0, 15, 655360), (1, 57, 1048576)], ids=["dense", "moe"])
def test_each_rank_holds_half_of_the_trellis(
    model: int, matrices: int, nbytes: int, two_ranks: tuple[list[list[list[Any]]], Path]
) -> None:
    both = receipts(two_ranks[1], model)
    assert [one["rank"] for one in both] == [0, 1]
    assert [one["tp_size"] for one in both] == [2, 2]
    assert [one["trellis_tensors"] for one in both] == [matrices, matrices]
    assert [one["trellis_bytes"] for one in both] == [nbytes // 2, nbytes // 2]
    assert both[0]["fingerprint"] == both[1]["fingerprint"]


@pytest.mark.parametrize(("model", "ref"), [(0, "demo"), (1, "demo-moe")], ids=["dense", "moe"])
def test_a_plan_of_two_ranks_agrees_with_both(
    model: int, ref: str, two_ranks: tuple[list[list[list[Any]]], Path]
) -> None:
    for number in (0, 1):
        found = json.loads((two_ranks[1] / str(model) / f"held{number}.json").read_text())
        assert_planned(ref, 2, found)


def test_another_trellis_on_one_rank_changes_the_answers_and_the_fingerprint(
    two_ranks: tuple[list[list[list[Any]]], Path],
) -> None:
    answers, folder = two_ranks
    assert answers[0][2]
    assert receipts(folder, 2)[0]["fingerprint"] != receipts(folder, 2)[1]["fingerprint"]


# What each family of `logits.CONFIGS` is there for on two ranks:
FAMILIES = {
    "llama": "key/value columns cut inside a block of 128",
    "qwen3": "mixed rates and codebooks",
    "qwen3_moe": "experts cut in the middle",
    "qwen3_moe-ep": "experts divided among the ranks instead of cut",
    "qwen2_moe": "shared experts",
    "uneven": "experts of three blocks for two ranks",
    "glm4_moe": "dense layers and shared experts of an odd number of blocks, padding in the last",
    "replicated": "one key/value head, whole on both ranks",
    "tied": "a head that is the embedding",
    "mla": "latent attention",
}
IN_BRIEF = ("llama", "qwen3", "qwen3_moe", "glm4_moe", "replicated", "mla")


@pytest.mark.parametrize(
    "names", [IN_BRIEF, pytest.param(tuple(FAMILIES), marks=pytest.mark.full)], ids=["some", "all"]
)
def test_logits_of_two_ranks_equal_transformers(names: tuple[str, ...], tmp_path: Path) -> None:
    # given models of every rate and codebook
    made = {family: make_synthetic(family, tmp_path) for family in {name.partition("-")[0] for name in names}}
    for name in names:
        if name not in made:
            (tmp_path / name).symlink_to(tmp_path / name.partition("-")[0])
    models = [tmp_path / name for name in names]
    # when two ranks compute them
    run_two_ranks([models, models], tmp_path)
    # then the logits are those of transformers, and the ranks' receipts agree on what was loaded
    for number, name in enumerate(names):
        reference = made[name.partition("-")[0]].reference
        for rank in (0, 1):
            logits = torch.load(tmp_path / str(number) / f"logits{rank}.pt")
            assert relative_error(logits, reference) < 2e-5, (name, rank)
        both = receipts(tmp_path, number)
        assert both[0]["fingerprint"] == both[1]["fingerprint"], name
        assert both[0]["trellis_tensors"] == both[1]["trellis_tensors"], name
