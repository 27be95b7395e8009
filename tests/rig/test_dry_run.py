"""Two hosts that play DGX Sparks: what the ranks of each shipped recipe would get there, and what `kit init` writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kit_verbs import assert_empty, kit, refusal, told
from rig_hosts import Rig, rig_script, room

from exl3kit import dry_run, recipes, render
from exl3kit.nodes import open_nodes

NODES = ("node1", "node2")
GPU = [path.stem for path in recipes.shipped() if not recipes.load(str(path)).image.on_cpu]
# What may differ between the ranks of a gang, and nothing else may:
PER_RANK = {"EXL3_RANK", "VLLM_HOST_IP", "NCCL_IB_GID_INDEX"}
PER_RANK_OPTIONS = {"--node-rank", "--host", "--port", "--headless"}
PER_RANK_SERVICE = {"container_name", "labels", "env_file", "command", "volumes", "healthcheck"}


@pytest.fixture
def sparks(no_rig: None) -> Iterator[Rig]:
    rig_script("up", "--fake-gpu", *room())
    yield Rig()


def other_gids(rig: Rig, node: str) -> None:
    """Let a node's adapters have their addresses at GID 7 instead of 3, as it happens after a reboot."""
    for hca in ("rocep1s0f0", "roceP2p1s0f0"):
        move = "for f in gids gid_attrs/types gid_attrs/ndevs; do cp $f/3 $f/7; done; cp gids/6 gids/3"
        rig.exec(node, "sh", "-c", f"cd /sys/class/infiniband/{hca}/ports/1 && {move}")


def services(seen: dry_run.DryRun) -> list[dict[str, Any]]:
    """The service of each rank as its node's compose file has it."""
    return [
        yaml.safe_load(render.compose(seen.deployment, rank.node))["services"][rank.service]
        for rank in seen.deployment.ranks
    ]


def test_every_recipe_gives_both_ranks_the_same_but_for_the_facts_of_rank_and_node(
    sparks: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_gids(sparks, "node2")
    for name, value in sparks.env.items():
        monkeypatch.setenv(name, value)
    on_two = []
    with open_nodes(",".join(NODES)) as opened:
        for ref in GPU:
            recipe = recipes.load(ref)
            count = recipe.parallel.nodes
            # when
            seen = dry_run.look(recipe, opened[:count])
            # then
            assert [rank.node for rank in seen.deployment.ranks] == list(NODES[:count])
            assert len(render.files(seen.deployment)) == 2 * count
            environments = [{one.name: one.value for one in env} for env in seen.environment.values()]
            for env in environments:
                assert env["EXL3_TIER"] == recipe.exl3.tier and env["HF_HUB_OFFLINE"] == "1"
            if count == 1:
                continue
            on_two.append(ref)
            head, worker = environments
            assert {name for name in {*head, *worker} if head.get(name) != worker.get(name)} == PER_RANK, ref
            assert (head["NCCL_IB_GID_INDEX"], worker["NCCL_IB_GID_INDEX"]) == ("3", "7")
            assert head["NCCL_IB_HCA"] == "=rocep1s0f0:1,roceP2p1s0f0:1" and head["NCCL_NET"] == "IB"
            argv = [rank.argv for rank in seen.deployment.ranks]
            options = {word for word in set(argv[0]) ^ set(argv[1]) if word.startswith("--")}
            assert options <= PER_RANK_OPTIONS, ref
            one, other = services(seen)
            assert {key for key in {*one, *other} if one.get(key) != other.get(key)} <= PER_RANK_SERVICE, ref
    assert {ref for ref in GPU if "2x-spark" in ref} == set(on_two) and len(on_two) >= 6

    # and the verb shows the same, with what `up` would refuse: the pins, or the weights, that are not here
    done = kit(sparks, "up", "glm-5.3-flash-2x-spark", "--nodes", ",".join(NODES), "--dry-run", "--json")
    assert set(told(done, 3)["differing"]) == PER_RANK
    assert "`up` would refuse" in done.stderr and len(told(done, 3)["refusals"]) >= 1
    assert_empty(sparks)

    # when the nodes are asked what they can serve
    out = tmp_path / "mine"
    init = told(kit(sparks, "init", "--nodes", ",".join(NODES), "--yes", "--out", out, "--json"))
    # then the largest that fits is written, checks, and fits by its plan on these nodes
    assert init["chosen"] == "glm-5.3-flash-2x-spark"
    assert told(kit(sparks, "recipe", "check", out / "recipe.yaml", "--json"))
    plan = told(kit(sparks, "plan", out / "recipe.yaml", "--nodes", out / "cluster.yaml", "--json"))
    assert plan["fits"] and [one["node"] for one in plan["machines"]] == list(NODES)
    assert {env["NCCL_IB_GID_INDEX"] for env in plan["network"].values()} == {"3", "7"}
    # and what is there already is not written over
    assert "is not replaced" in refusal(kit(sparks, "init", "--nodes", "node1", "--yes", "--out", out), 2)
    small = told(kit(sparks, "init", "--nodes", "node1", "--model", "qwen3-30b", "--out", tmp_path / "one", "--json"))
    assert small["chosen"] == "qwen3-30b-a3b-spark"
    assert json.loads(done.stdout)["deployment"] == "glm-5.3-flash-2x-spark"
