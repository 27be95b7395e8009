"""The dense demo through real vLLM on one rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from demo import changed_copy, flip_marker, other_trellis, questions, wrong_answers
from exl3_vllm.export import export_dense
from plan_figures import assert_planned, held

Engine = Callable[..., AbstractContextManager[Any]]


def test_five_answers_are_exact_the_rank_reports_what_it_loaded_and_the_plan_foresaw_it(
    engine: Engine, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a folder for receipts
    monkeypatch.setenv("EXL3_RECEIPT_DIR", str(tmp_path / "receipts"))
    # when the demo is loaded and asked
    with engine(models / "demo-dense") as llm:
        wrong = wrong_answers(llm, models / "demo-dense")
        found = held(llm)
    # then all five answers are exact, and the receipt counts every matrix: 7 in each of 2 layers, and the head
    assert len(questions(models / "demo-dense")) == 5
    assert wrong == []
    report = json.loads((tmp_path / "receipts" / "rank0.json").read_text())
    assert (report["rank"], report["tp_size"], report["trellis_tensors"], report["layers"]) == (0, 1, 15, 9)
    assert report["trellis_bytes"] == 2 * 786432 * 3 // 8 + 131072 * 4 // 8
    assert report["codebooks"] == {"mcg": 15}
    assert report["rates"] == {"3": 14, "4": 1}
    assert "not quality" in report["demo"]
    assert (report["effective_tier"], report["tier_reason"]) == ("legacy", "no_moe_layers")
    assert_planned("demo", 1, found)


def test_greedy_text_equals_transformers_on_dequantised_weights(engine: Engine, models: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from vllm import SamplingParams

    # given the model as plain fp32 weights, and prompts that it was not trained on besides those that it was
    model = models / "demo-dense"
    export_dense(model, tmp_path / "dense", torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "dense")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32).eval()
    prompts = [pair["question"] for pair in questions(model)] + ["Who next? 2+2", "in a good recipe"]
    expected = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = reference.generate(ids, max_new_tokens=24, min_new_tokens=24, do_sample=False)
        expected.append(out[0, ids.shape[1] :].tolist())
    # when vLLM continues them from the trellis
    with engine(model, dtype="float32") as llm:
        sampling = SamplingParams(temperature=0, max_tokens=24, min_tokens=24)
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
    # then every token is the same
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected


@pytest.mark.parametrize(
    "change",
    [flip_marker("model.layers.0.mlp.down_proj"), other_trellis("model.layers.0.self_attn.v_proj")],
    ids=["marker mcg to mul1", "trellis upside down"],
)
def test_one_wrong_matrix_changes_the_answers(change: Any, engine: Engine, models: Path, tmp_path: Path) -> None:
    copy = changed_copy(models / "demo-dense", tmp_path, change)
    with engine(copy) as llm:
        assert wrong_answers(llm, copy)
