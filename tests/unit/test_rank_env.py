"""The environment that each rank really gets: where every value comes from, what it replaced, what differs."""

from __future__ import annotations

import pytest
from test_render import TWO, facts, plan

from exl3kit import deployment, rank_env, recipes
from exl3kit.faults import RecipeError
from exl3kit.rank_env import Variable


def told(sets: tuple[str, ...] = (), image: dict[str, str] | None = None) -> dict[int, list[Variable]]:
    """Two ranks on two machines of which the first resolves its own name to loopback."""
    nodes = (facts("spark1", "10.0.0.1", own_name=("127.0.1.1",), interface="enp1s0f0np0"), TWO[1])
    made, recipe = plan(*nodes, sets=sets), recipes.load("demo-tp2", sets)
    named = {node.name: node for node in nodes}
    found = {}
    for rank in made.ranks:
        of_facts = deployment.facts_environment(recipe, rank.rank, [node.name for node in nodes], named, bridge=False)
        own = deployment.own_environment(recipe)
        found[rank.rank] = rank_env.of_rank(rank.env, own, of_facts, recipe.serve.env, image or {})
    return found


def one(variables: list[Variable], name: str) -> Variable:
    return next(variable for variable in variables if variable.name == name)


def test_every_value_has_its_source() -> None:
    head = told()[0]
    assert one(head, "VLLM_HOST_IP") == Variable("VLLM_HOST_IP", "10.0.0.1", "facts")
    assert one(head, "GLOO_SOCKET_IFNAME") == Variable("GLOO_SOCKET_IFNAME", "enp1s0f0np0", "facts")
    assert one(head, "HF_HUB_OFFLINE") == Variable("HF_HUB_OFFLINE", "1", "kit")
    assert one(head, "EXL3_TIER").source == "recipe"
    assert one(head, "EXL3_RANK").source == "kit"


def test_the_recipes_own_value_wins_and_says_what_it_replaced() -> None:
    sets = ("serve.env={GLOO_SOCKET_IFNAME: eth9, HF_HUB_OFFLINE: '0', NCCL_IB_HCA: =mlx5_0}",)
    head, worker = told(sets).values()
    assert one(head, "GLOO_SOCKET_IFNAME") == Variable("GLOO_SOCKET_IFNAME", "eth9", "recipe", "enp1s0f0np0")
    assert one(worker, "GLOO_SOCKET_IFNAME") == Variable("GLOO_SOCKET_IFNAME", "eth9", "recipe")
    assert one(head, "HF_HUB_OFFLINE") == Variable("HF_HUB_OFFLINE", "0", "recipe", "1")
    assert one(head, "NCCL_IB_HCA").source == "recipe"


def test_what_the_image_sets_is_shown_below_and_its_secrets_are_not() -> None:
    head = told(image={"LANG": "C.UTF-8", "HOME": "/root", "SOME_TOKEN": "sesame"})[0]
    assert one(head, "LANG") == Variable("LANG", "C.UTF-8", "image")
    assert one(head, "HOME") == Variable("HOME", "/tmp", "kit", "/root")
    assert one(head, "SOME_TOKEN").value == rank_env.MASK


def test_what_differs_between_the_ranks_is_what_should() -> None:
    assert rank_env.differing(told()) == ["EXL3_RANK", "GLOO_SOCKET_IFNAME", "VLLM_HOST_IP"]
    lines = rank_env.as_lines(told(), only_differing=True)
    assert "rank 0: VLLM_HOST_IP=10.0.0.1  (facts)" in lines
    assert not any("HF_HUB_OFFLINE" in line for line in lines)
    everything = rank_env.as_lines(told(), only_differing=False)
    assert [line for line in everything if line.startswith("HF_HUB_OFFLINE")] == ["HF_HUB_OFFLINE=1  (kit)"]


def test_arguments_that_differ_are_the_place_and_the_api() -> None:
    assert rank_env.differing_arguments(plan(*TWO)) == {
        0: ["--node-rank 0", "--host 127.0.0.1", "--port 8000"],
        1: ["--node-rank 1", "--headless"],
    }


@pytest.mark.parametrize("argument", ["--disable-log-stats", "--disable_log_stats", "--api-server-count=2"])
def test_arguments_that_would_blind_the_gangs_liveness_are_refused(argument: str) -> None:
    with pytest.raises(RecipeError, match="is not for args") as refused:
        recipes.load("demo-tp2", (f"serve.args=['{argument}']",))
    assert "counters" in str(refused.value)
