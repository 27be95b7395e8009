"""`kit init`: what fits the nodes at hand is chosen, and the files that it writes are read back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from spark_nodes import Spark, node_facts

from exl3kit import cluster, recipes, starting
from exl3kit.cli import init
from exl3kit.cluster import Host
from exl3kit.errors import KitError

TWO = {f"spark{n}": replace(node_facts(Spark(number=n)), name=f"spark{n}") for n in (1, 2)}
NAMES = list(TWO)


def test_two_sparks_get_the_largest_model_that_fits_both() -> None:
    found = starting.candidates(TWO, NAMES)
    chosen = starting.choose(found, None)
    assert chosen.name.startswith("glm-5.3-flash-2x-spark")
    assert {one.name for one in found if one.fits} >= {"glm-4.5-air-2x-spark", "llama-3.3-70b-2x-spark"}
    why = {one.name: one.why_not for one in found}
    assert why["qwen3-30b-a3b-spark"] == "it runs on 1 node"
    assert why["demo-tp2"] == "spark1 has a GPU"


def test_a_node_that_is_nearly_full_gets_a_smaller_model_or_a_refusal() -> None:
    """Given 30 GiB free on one of two Sparks, then GLM does not fit; with 5 GiB nothing does, and reasons are named."""
    tight = {**TWO, "spark2": replace(node_facts(Spark(number=2, available_kib=5 << 20)), name="spark2")}
    found = starting.candidates(tight, NAMES)
    with pytest.raises(KitError, match="no shipped recipe fits") as caught:
        starting.choose(found, None)
    assert "GiB" in str(caught.value.why)


def test_one_spark_and_a_named_model() -> None:
    one = {"spark1": TWO["spark1"]}
    assert starting.choose(starting.candidates(one, ["spark1"]), "qwen3-30b").name == "qwen3-30b-a3b-spark"
    with pytest.raises(KitError, match="no shipped recipe is of a model called 'gpt'"):
        starting.choose(starting.candidates(one, ["spark1"]), "gpt")


def test_the_written_files_are_a_cluster_and_a_recipe(tmp_path: Path) -> None:
    hosts = [Host(name="spark1", ssh="op@spark1"), Host(name="spark2", ssh="spark2", engine="/run/x.sock")]
    path = tmp_path / "cluster.yaml"
    path.write_text(starting.cluster_file(hosts, TWO))
    read = cluster.hosts(str(path))
    assert [(one.name, one.ssh, one.address, one.engine) for one in read] == [
        ("spark1", "op@spark1", "10.0.0.1", cluster.ENGINE_SOCKET),
        ("spark2", "spark2", "10.0.0.2", "/run/x.sock"),
    ]
    chosen = starting.choose(starting.candidates(TWO, NAMES), "llama")
    file = tmp_path / "recipe.yaml"
    file.write_text(starting.recipe_file(chosen, "mine"))
    assert recipes.load(str(file)).parallel.tensor == 2


@pytest.mark.parametrize(
    ("hosts", "folder", "command"),
    [
        ([Host(name="spark1", ssh="spark1")], "", "kit plan recipe.yaml --nodes cluster.yaml"),
        ([Host(name="local")], "try", "kit plan try/recipe.yaml --nodes local"),
        ([Host(name="local"), Host(name="x")], "a b", "kit plan 'a b/recipe.yaml' --nodes 'a b/cluster.yaml'"),
        ([Host(name="spark1", ssh="spark1")], "/srv", "kit plan /srv/recipe.yaml --nodes /srv/cluster.yaml"),
    ],
)  # fmt: skip
def test_the_next_command_names_the_files_as_they_were_asked_for(hosts: list[Host], folder: str, command: str) -> None:
    assert init.following(Path(folder) / "recipe.yaml", Path(folder) / "cluster.yaml", hosts) == command
