"""What a rank is told of its network: found from facts, never from a name, and the recipe's own values win."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from spark_nodes import Spark, look, node_facts

from exl3kit import deployment, fabric, recipes
from exl3kit.recipe import Recipe

ADDRESSES = ("10.0.0.1", "10.0.0.2")
RECIPE = """recipe: 1
name: two
model: {path: ., served_name: two}
image: {base: "vllm/vllm-openai:v0.33.0", vllm: 0.33.0, arch: ["12.1"], rates: [4], codebooks: [mcg]}
parallel: {nodes: 2, tensor: 2}
fabric: {require: rdma}
serve: {max_model_len: 256, env: {}}
"""


def told(one: Spark, other: Spark, *, rdma: bool = True) -> list[dict[str, str]]:
    probes = [look(one), look(other)]
    return [fabric.environment(probes, ADDRESSES, rank, rdma=rdma) for rank in (0, 1)]


def test_both_twins_and_the_index_of_the_address() -> None:
    first, second = told(Spark(), Spark(number=2))
    assert first == second == {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET",
        "NCCL_SOCKET_IFNAME": "=enp1s0f0np0",
        "GLOO_SOCKET_IFNAME": "enp1s0f0np0",
        "NCCL_IB_HCA": "=rocep1s0f0:1,roceP2p1s0f0:1",
        "NCCL_IB_GID_INDEX": "3",
        "NCCL_NET": "IB",
    }  # fmt: skip


def test_case_12_names_that_differ_between_the_nodes_are_each_nodes_own() -> None:
    first, second = told(Spark(), Spark(number=2, link="enp9s0f0", twin="enP8s0f0"))
    assert (first["NCCL_SOCKET_IFNAME"], second["NCCL_SOCKET_IFNAME"]) == ("=enp1s0f0np0", "=enp9s0f0")


@pytest.mark.parametrize(("first_gid", "index"), [(0, "1"), (2, "3"), (4, "5")])
def test_case_13_the_gid_index_follows_the_address_after_a_reboot(first_gid: int, index: str) -> None:
    """Given tables in which the address moved, then the index of each start is that of its RoCE v2 entry there."""
    first, second = told(Spark(first_gid=first_gid), Spark(number=2))
    assert (first["NCCL_IB_GID_INDEX"], second["NCCL_IB_GID_INDEX"]) == (index, "3")


def test_case_13_twins_whose_indices_differ_are_looked_up_by_nccl() -> None:
    here = look(Spark())
    moved = [
        replace(hca, gids=tuple(replace(gid, index=gid.index + 2) for gid in hca.gids))
        if hca.name == "roceP2p1s0f0" else hca
        for hca in here.hcas
    ]  # fmt: skip
    found = fabric.environment([replace(here, hcas=tuple(moved))], ADDRESSES[:1], 0, rdma=True)
    assert "NCCL_IB_GID_INDEX" not in found
    assert (found["NCCL_IB_ROCE_VERSION_NUM"], found["NCCL_IB_ADDR_FAMILY"]) == ("2", "AF_INET")


def test_case_14_rdma_that_is_required_cannot_fall_back_to_tcp() -> None:
    """Given a node without adapters, then NCCL must fail where RDMA is required, and is told of TCP where it is not."""
    first, second = told(Spark(), Spark(number=2, adapters=False))
    assert [one["NCCL_NET"] for one in (first, second)] == ["IB", "IB"]
    first, second = told(Spark(), Spark(number=2, adapters=False), rdma=False)
    assert [one["NCCL_IB_DISABLE"] for one in (first, second)] == ["1", "1"]
    assert "NCCL_NET" not in first and "NCCL_IB_HCA" not in first


def test_a_twin_that_one_node_lacks_is_used_by_none() -> None:
    first, second = told(Spark(), Spark(number=2, twin_address=False))
    assert [one["NCCL_IB_HCA"] for one in (first, second)] == ["=rocep1s0f0:1", "=rocep1s0f0:1"]


def test_an_adapter_on_another_connector_is_no_twin() -> None:
    here = look(Spark())
    shifted = tuple(replace(hca, pci="0002:01:00.1") if hca.name == "roceP2p1s0f0" else hca for hca in here.hcas)
    assert len(fabric.find(replace(here, hcas=shifted), "10.0.0.1").ports) == 1


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return with_env(tmp_path, "{}")


def with_env(folder: Path, env: str) -> Recipe:
    (folder / "two.yaml").write_text(RECIPE.replace("env: {}", f"env: {env}"))
    return recipes.load(str(folder / "two.yaml"))


def environments(recipe: Recipe, *sparks: Spark) -> list[dict[str, str]]:
    facts = {f"spark{one.number}": node_facts(one) for one in sparks}
    return [deployment.environment(recipe, rank, list(facts), facts, bridge=False) for rank in range(len(sparks))]


def test_case_15_gloo_gets_the_fabrics_interface_whatever_the_host_name_resolves_to(recipe: Recipe) -> None:
    for name in ("127.0.1.1", "10.0.0.1"):
        first, second = environments(recipe, Spark(name_resolves_to=name), Spark(number=2))
        assert first["GLOO_SOCKET_IFNAME"] == second["GLOO_SOCKET_IFNAME"] == "enp1s0f0np0"
        assert (first["VLLM_HOST_IP"], second["VLLM_HOST_IP"]) == ADDRESSES  # literals: nothing is left to resolve


def test_case_16_the_recipes_own_value_wins_and_is_shown_with_what_it_replaces(tmp_path: Path) -> None:
    recipe = with_env(tmp_path, "{NCCL_IB_GID_INDEX: '5', NCCL_ALGO: Ring}")
    first, _ = environments(recipe, Spark(), Spark(number=2))
    assert (first["NCCL_IB_GID_INDEX"], first["NCCL_ALGO"]) == ("5", "Ring")
    facts = {f"spark{n}": node_facts(Spark(number=n)) for n in (1, 2)}
    shown = fabric.settings(deployment.network(recipe, 0, list(facts), facts), recipe.serve.env)
    by_name = {one.name: (one.value, one.source, one.instead_of) for one in shown}
    assert by_name["NCCL_IB_GID_INDEX"] == ("5", "recipe", "3")
    assert by_name["NCCL_ALGO"] == ("Ring", "recipe", None)
    assert by_name["NCCL_IB_HCA"] == ("=rocep1s0f0:1,roceP2p1s0f0:1", "facts", None)


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"NCCL_IB_HCA": "mlx5_0"}, ["mlx5_0"]),
        ({"NCCL_IB_HCA": "=rocep1s0f0:1,rocep9s0"}, ["rocep9s0"]),
        ({"NCCL_IB_HCA": "^mlx5_0"}, []),
        ({"NCCL_SOCKET_IFNAME": "enp1s0"}, []),
        ({"NCCL_SOCKET_IFNAME": "=enp1s0"}, ["enp1s0"]),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, ["eth0"]),
    ],
)
def test_case_12_a_name_in_the_recipe_that_the_node_does_not_have_is_refused(
    env: dict[str, str], named: list[str]
) -> None:
    said = fabric.strangers(look(Spark()), env)
    assert len(said) == len(named) and all(name in one for name, one in zip(named, said, strict=True))


def test_case_31_ranks_differ_only_in_what_is_their_own(recipe: Recipe) -> None:
    first, second = environments(recipe, Spark(), Spark(number=2))
    assert {name for name in {*first, *second} if first.get(name) != second.get(name)} == {"VLLM_HOST_IP"}
