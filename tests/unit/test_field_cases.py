"""Classes of faults that people reported, where the class is a property of the configuration: one test for each."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from spark_nodes import ENGINE, Spark, node_facts

from exl3kit import containers, deployment, recipes, render
from exl3kit.deployment import Deployment
from exl3kit.errors import ExitCode, KitError

RECIPE = """recipe: 1
name: two
model: {path: ., served_name: two}
image: {base: "vllm/vllm-openai:v0.33.0", vllm: 0.33.0, arch: ["12.1"], rates: [4], codebooks: [mcg]}
parallel: {nodes: 2, tensor: 2}
fabric: {require: rdma}
serve: %s
"""
KEY = "sk-very-secret"


def planned(folder: Path, serve: str) -> Deployment:
    (folder / "two.yaml").write_text(RECIPE % serve)
    facts = {f"spark{n}": node_facts(Spark(number=n)) for n in (1, 2)}
    recipe = recipes.load(str(folder / "two.yaml"))
    folders = dict.fromkeys(facts, "/w")
    key = recipe.serve.api_key_file is not None
    return deployment.plan(recipe, "0" * 64, list(facts), facts, folders, "g", api_key=key)


@pytest.mark.parametrize(
    ("serve", "meant"),
    [
        ("{max_num_batch_tokens: 2048}", "max_num_batched_tokens"),
        ("{gpu_memory_utilisation: 0.9}", "gpu_memory_utilization"),
        ("{kv_cache_dtyp: fp8}", "kv_cache_dtype"),
    ],
)
def test_case_27_a_misspelt_key_is_refused_with_what_was_meant(tmp_path: Path, serve: str, meant: str) -> None:
    with pytest.raises(KitError) as refused:
        planned(tmp_path, serve)
    assert refused.value.code == ExitCode.USAGE
    assert meant in str(refused.value) and "two.yaml:7" in str(refused.value)


def test_case_29_json_and_blanks_in_an_argument_reach_vllm_as_one_word(tmp_path: Path) -> None:
    """Given an argument with JSON, blanks, quotes and a dollar, then it is one word of every rank's argv and file."""
    nasty = '{"a": "two words", "b": "it\'s $HOME `id`"}'
    made = planned(tmp_path, json.dumps({"args": ["--override-generation-config", nasty]}))
    for rank in made.ranks:
        assert nasty in rank.argv
        (service,) = containers.services(render.compose(made, rank.node)).values()
        assert nasty in service["command"]
        assert "it's $$HOME `id`" in render.compose(made, rank.node)  # a single dollar would be compose's own


def test_case_30_a_key_is_in_no_argument_variable_label_or_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY)
    made = planned(tmp_path, "{listen: open, api_key_file: key}")
    for rank in made.ranks:
        assert KEY not in json.dumps([rank.argv, dict(rank.env), made.labels(rank)])
    assert all(KEY not in text for text in render.files(made).values())
    assert made.ranks[0].api_key_file is not None and made.ranks[1].api_key_file is None
    assert made.ranks[0].env["EXL3_API_KEY_FILE"] == deployment.KEY_FILE  # by which the health check asks, too


def test_case_31_every_rank_is_rendered_from_one_source(tmp_path: Path) -> None:
    """Given a recipe's environment, then each rank has it all, and ranks differ only in place and addresses."""
    made = planned(tmp_path, "{env: {NCCL_ALGO: Ring, VLLM_X: '1'}}")
    first, second = (dict(rank.env) for rank in made.ranks)
    assert all(env["NCCL_ALGO"] == "Ring" and env["VLLM_X"] == "1" for env in (first, second))
    differing = {name for name in {*first, *second} if first.get(name) != second.get(name)}
    assert {name for name in differing if name.startswith(("NCCL", "GLOO"))} == set()
    assert {"EXL3_RANK", "VLLM_HOST_IP"} <= differing


def test_a_node_whose_engine_has_cdi_alone_gets_its_gpu_that_way(tmp_path: Path) -> None:
    """Given one node with NVIDIA's runtime and one with CDI alone, then each rank asks for its GPU in that way."""
    (tmp_path / "two.yaml").write_text(RECIPE % "{}")
    alone = replace(ENGINE, runtimes=("runc",))
    facts = {"spark1": node_facts(Spark()), "spark2": node_facts(Spark(number=2, engine=alone))}
    recipe = recipes.load(str(tmp_path / "two.yaml"))
    made = deployment.plan(recipe, "0" * 64, list(facts), facts, dict.fromkeys(facts, "/w"), "g")
    asked = []
    for rank in made.ranks:
        (service,) = containers.services(render.compose(made, rank.node)).values()
        (request,) = containers.device_requests(service["deploy"]) or []
        asked.append((request["Driver"], request["Count"], request["DeviceIDs"]))
    assert asked == [("nvidia", -1, []), ("cdi", 0, ["nvidia.com/gpu=all"])]
