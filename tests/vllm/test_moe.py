"""The MoE demo through real vLLM on one rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from demo import changed_copy, flip_marker, other_trellis, questions, wrong_answers
from plan_figures import assert_planned, held
from safetensors.torch import load_file

Engine = Callable[..., AbstractContextManager[Any]]


def test_five_answers_are_exact_and_the_plan_foresaw_what_is_held(engine: Engine, models: Path) -> None:
    with engine(models / "demo-moe") as llm:
        assert len(questions(models / "demo-moe")) == 5
        assert wrong_answers(llm, models / "demo-moe") == []
        assert_planned("demo-moe", 1, held(llm))


def test_gate_and_up_share_their_input_scales(models: Path) -> None:
    tensors = load_file(models / "demo-moe" / "model.safetensors")
    gates = [name for name in tensors if name.endswith(".gate_proj.suh")]
    assert len(gates) == 16
    for gate in gates:
        assert tensors[gate].equal(tensors[gate.replace("gate_proj", "up_proj")])


@pytest.mark.parametrize(
    "change",
    [flip_marker("model.layers.0.self_attn.o_proj"), other_trellis("model.layers.1.self_attn.v_proj")],
    ids=["marker mcg to mul1", "trellis upside down"],
)
def test_one_wrong_matrix_changes_the_answers(change: Any, engine: Engine, models: Path, tmp_path: Path) -> None:
    copy = changed_copy(models / "demo-moe", tmp_path, change)
    with engine(copy) as llm:
        assert wrong_answers(llm, copy)
