"""`kit demo`: ten exact answers from two ranks per model, on an engine that is there and on bare machines."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from typing import Any

import pytest
from kit_verbs import everything, kit, kit_argv, refusal, told
from rig_hosts import REPOSITORY, Completed, Rig, rig_script

MODELS = {"dense": "demo-dense", "moe": "demo-moe"}
BARE_SECONDS = 1500  # 4 minutes on two idle cores, of which the image takes two


def expected() -> list[tuple[str, str, str, bool]]:
    """(model, question, answer, exact) of the ten trained pairs, in the order of the demo."""
    return [
        (model, pair["question"], pair["answer"], True)
        for model, folder in MODELS.items()
        for pair in json.loads((REPOSITORY / "models" / folder / "questions.json").read_text())
    ]


def assert_proved(seen: dict[str, Any]) -> None:
    """Ten exact answers, and for each model two ranks that counted their halves of the checkpoint."""
    answers = [(one["model"], one["question"], one["answer"], one["exact"]) for one in seen["answers"]]
    assert answers == expected()
    ranks = [(rank["model"], rank["rank"], rank["tp_size"], rank["trellis_tensors"]) for rank in seen["ranks"]]
    assert ranks == [("dense", 0, 2, 15), ("dense", 1, 2, 15), ("moe", 0, 2, 57), ("moe", 1, 2, 57)]
    assert [rank["trellis_bytes"] for rank in seen["ranks"]] == [327_680, 327_680, 524_288, 524_288]
    assert re.fullmatch(r"[0-9a-f]{64}", seen["stamp"])
    assert all(rank["node"] for rank in seen["ranks"])
    assert {"first answer", "questions", "stop the ranks"} <= set(seen["seconds"])


def test_ten_exact_answers_and_nothing_left(rig: Rig) -> None:
    before = everything(rig, "node1")
    seen = told(kit(rig, "demo", "--nodes", "node1", "--json", timeout=900))
    assert_proved(seen)
    assert everything(rig, "node1") == before


def test_ctrl_c_while_the_first_model_starts_leaves_nothing(rig: Rig) -> None:
    before = everything(rig, "node1")
    process = subprocess.Popen(
        kit_argv("demo", "--nodes", "node1"),
        env=rig.env,
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "first answer" in line:
            break
    assert len(everything(rig, "node1")) == len(before) + 3  # two ranks and their network
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=60)[0]
    assert process.returncode == 130, rest
    assert everything(rig, "node1") == before


def test_two_nodes_are_refused(rig: Rig) -> None:
    assert "the demo runs on one node" in refusal(kit(rig, "demo", "--nodes", "node1,node2"), 2)


def run_bare(rig: Rig, *argv: str) -> Completed:
    """The README's first commands on a bare machine: a clone of this checkout, and one verb in it."""
    return rig.exec("bare", "sh", "-c", f"cd kit && ./kit.py {' '.join(argv)}", check=False, timeout=BARE_SECONDS)


@pytest.fixture(params=["bookworm", "trixie"])
def bare(request: pytest.FixtureRequest, no_rig: None) -> Rig:
    """A bare machine of a Debian release: no engine, no venv module, a clone of what is committed here."""
    options = ["--no-engine", "--release", request.param, "--nodes", "bare", "--nat", "--bind", str(REPOSITORY)]
    rig_script("up", *options, timeout=600)
    rig = Rig()
    rig.exec("bare", "apt-get", "update", "--error-on=any", timeout=120)
    rig.exec("bare", "apt-get", "install", "-qy", "git", "python3-venv", timeout=300)
    rig.exec("bare", "git", "clone", "--quiet", str(REPOSITORY), "kit")
    return rig


@pytest.mark.full
def test_the_readmes_first_command_on_a_bare_machine(bare: Rig) -> None:
    # Without an engine and without leave to install one, it says so and changes nothing.
    assert "no container engine on this machine" in refusal(run_bare(bare, "demo"), 6)
    assert bare.exec("bare", "sh", "-c", "command -v dockerd", check=False).returncode != 0

    first = told(run_bare(bare, "demo", "--install-engine", "--json"))
    assert_proved(first)
    assert bare.exec("bare", "sh", "-c", "pidof dockerd containerd", check=False).returncode != 0, "the kit started it"

    again = told(run_bare(bare, "demo", "--install-engine", "--json"))
    assert_proved(again)
    assert again["stamp"] == first["stamp"]
    assert again["wall_clock"] < first["wall_clock"] / 2
    print(f"cold {first['wall_clock']:.0f} s, again {again['wall_clock']:.0f} s")
