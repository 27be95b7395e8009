"""What must never be served: a model without its plugin, or with a tensor too few."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from demo import changed_copy, wrong_answers
from engines import REPO
from exl3_vllm.errors import Exl3Error

Engine = Callable[..., AbstractContextManager[Any]]

START = (
    "import sys; from vllm import EngineArgs; EngineArgs(model=sys.argv[1], dtype='bfloat16').create_engine_config()"
)


def start_with_overlay(overlay: Path, model: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Configure an engine in a fresh process in which `overlay` takes the place of this checkout's."""
    ours = str(REPO / "overlay")
    search = os.environ["PYTHONPATH"].split(os.pathsep)
    assert ours in search
    path = os.pathsep.join(str(overlay) if entry == ours else entry for entry in search)
    variables = {**os.environ, "VLLM_LOGGING_LEVEL": "INFO", "PYTHONPATH": path, **environment}
    return subprocess.run(
        [sys.executable, "-c", START, str(model)], env=variables, capture_output=True, text=True, timeout=300
    )


@pytest.fixture
def overlay(tmp_path: Path) -> Path:
    """A copy of the overlay, to be broken."""
    return shutil.copytree(REPO / "overlay", tmp_path / "overlay", ignore=shutil.ignore_patterns("csrc", "__pycache__"))


def test_a_plugin_that_fails_while_registering_stops_the_process(overlay: Path, models: Path) -> None:
    # given an overlay whose linear layers can not be imported
    (overlay / "exl3_vllm" / "linear.py").write_text("raise ImportError('no such kernel library')\n")
    # when an engine is configured
    done = start_with_overlay(overlay, models / "demo-dense")
    # then it ends with that very error
    assert done.returncode != 0
    assert "no such kernel library" in done.stderr


def test_a_plugin_that_can_not_even_be_imported_is_no_other_quantisation(overlay: Path, models: Path) -> None:
    # given a package that vLLM will log and skip
    (overlay / "exl3_vllm" / "__init__.py").write_text("this is not Python\n")
    # when an engine is configured
    done = start_with_overlay(overlay, models / "demo-dense")
    # then the name exl3 means nothing, and nothing else answers to it
    assert done.returncode != 0
    assert "Unknown quantization method: exl3" in done.stderr


def dropping(*names: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(names)]:
            del tensors[name]

    return change


def poison(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].index_fill(0, torch.tensor([3]), float("nan"))

    return change


@pytest.mark.parametrize(
    ("model", "change", "named"),
    [
        ("demo-dense", dropping("model.layers.1.mlp.up_proj."), "model.layers.1.mlp.up_proj"),
        ("demo-dense", dropping("lm_head."), "lm_head"),
        ("demo-dense", dropping("model.layers.0.post_attention_layernorm."), "post_attention_layernorm.weight"),
        ("demo-moe", dropping("model.layers.1.mlp.experts.5.down_proj."), "model.layers.1.mlp.experts.5.down_proj"),
        ("demo-dense", poison("model.layers.0.self_attn.k_proj.svh"), "model.layers.0.self_attn.k_proj.svh"),
    ],
    ids=["half of a fused layer", "the head", "a norm", "one expert", "a scale that is not finite"],
)
def test_a_damaged_checkpoint_is_refused_by_name(
    model: str, change: Any, named: str, engine: Engine, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a rank's folder, as its supervisor gives it to vLLM
    copy = changed_copy(models / model, tmp_path, change)
    monkeypatch.setenv("EXL3_RUN_DIR", str(tmp_path))
    # when / then it is refused by name, and the supervisor can read why
    with pytest.raises(Exl3Error, match=named.replace(".", r"\.")) as refusal, engine(copy):
        pass
    assert json.loads((tmp_path / "refusal.json").read_text())["sentence"] == str(refusal.value)


def store_embedding_as_trellis(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.embed_tokens.weight"]
    for kind in ("trellis", "suh", "svh", "mcg"):
        tensors[f"model.embed_tokens.{kind}"] = tensors[f"model.layers.0.self_attn.q_proj.{kind}"].clone()


def test_an_embedding_stored_as_a_trellis_is_refused(engine: Engine, models: Path, tmp_path: Path) -> None:
    copy = changed_copy(models / "demo-dense", tmp_path, store_embedding_as_trellis)
    with pytest.raises(Exl3Error, match=r"model\.embed_tokens: is an embedding stored as a trellis"), engine(copy):
        pass


def test_a_head_of_its_own_in_a_model_that_ties_it_is_refused(engine: Engine, models: Path, tmp_path: Path) -> None:
    # given a config.json that calls head and embedding one, over a checkpoint that has both
    copy = changed_copy(models / "demo-dense", tmp_path, lambda tensors: None)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    # when / then: vLLM would answer from the embedding and never load the head
    with pytest.raises(Exl3Error, match=r"matrix lm_head.*tie_word_embeddings"), engine(copy):
        pass


@pytest.mark.full
def test_vllm_knows_the_names_of_the_overlay(models: Path) -> None:
    # given a start that refuses unknown names, and one of ours
    variables = {"VLLM_EXL3_PREFILL_RECONSTRUCT_M": "64"}
    start = START.replace("dtype='bfloat16'", "dtype='bfloat16', fail_on_environ_validation=True")
    command = [sys.executable, "-c", start, str(models / "demo-dense")]

    def started(**more: str) -> subprocess.CompletedProcess[str]:
        inherited = {name: value for name, value in os.environ.items() if name != "VLLM_DIST_IDENT"}  # an engine's own
        environment = {**inherited, **variables, **more}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)

    # when / then it starts with ours, and not with one that nobody knows
    assert started().returncode == 0
    assert "VLLM_EXL3_GRAPH_DECODES" in started(VLLM_EXL3_GRAPH_DECODES="1").stderr


def test_a_config_without_the_layers_of_the_checkpoint_is_refused(engine: Engine, models: Path, tmp_path: Path) -> None:
    # given a config.json that knows one layer of the two
    copy = changed_copy(models / "demo-dense", tmp_path, lambda tensors: None)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    # when / then: vLLM itself knows no such layer; nothing is served
    with pytest.raises(ValueError, match=r"layers\.1"), engine(copy):
        pass


def test_a_wrong_quant_method_in_config_json_does_not_matter(engine: Engine, models: Path, tmp_path: Path) -> None:
    # given a checkpoint stamped by another producer, with a wrong codebook and rate in its summary
    copy = changed_copy(models / "demo-dense", tmp_path, lambda tensors: None)
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "FP8", "codebook": "mul1", "bits": 8.0}
    (copy / "config.json").write_text(json.dumps(config))
    # when / then the tensors decide
    with engine(copy) as llm:
        assert wrong_answers(llm, copy) == []
