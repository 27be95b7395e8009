"""Plans and rendered files: who runs where and how, and that a file and its container mean the same."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from exl3kit import containers, deployment, elsewhere, recipes, render
from exl3kit.deployment import NodeFacts
from exl3kit.errors import ExitCode, KitError

STAMP = "ab" * 32


def facts(name: str, address: str = "127.0.0.1", **changes: Any) -> NodeFacts:
    """A node of its own with four cores, whose own name resolves to its address."""
    return replace(
        NodeFacts(
            name=name,
            address=address,
            interface="eth0" if address != "127.0.0.1" else "lo",
            own_name=(address,),
            cpus=(0, 1, 2, 3),
            engine=f"engine of {name}",
            machine=f"machine {name}",
            cache="/home/op/.cache/exl3kit",
            uid=1000,
            gid=1000,
        ),
        **changes,
    )


TWO = (facts("spark1", "10.0.0.1"), facts("spark2", "10.0.0.2"))
HERE = (facts("local"),)


def plan(
    *nodes: NodeFacts, ref: str = "demo-tp2", sets: tuple[str, ...] = (), generation: str = "g1", key: bool = False
) -> deployment.Deployment:
    recipe = recipes.load(ref, sets)
    return deployment.plan(
        recipe,
        STAMP,
        deployment.place(recipe, nodes),
        {node.name: node for node in nodes},
        {node.name: f"/weights/of/{node.name}" for node in nodes},
        generation,
        api_key=key,
    )


def option(argv: tuple[str, ...], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_two_machines_share_one_gang_over_their_own_network() -> None:
    made = plan(*TWO)
    head, worker = made.ranks
    assert not made.bridge
    assert [(rank.node, rank.model_dir) for rank in made.ranks] == [
        ("spark1", "/weights/of/spark1"),
        ("spark2", "/weights/of/spark2"),
    ]
    for number, rank in enumerate(made.ranks):
        assert option(rank.argv, "--tensor-parallel-size") == option(rank.argv, "--nnodes") == "2"
        assert option(rank.argv, "--node-rank") == rank.env["EXL3_RANK"] == str(number)
        assert option(rank.argv, "--master-addr") == "10.0.0.1"
        assert rank.env["VLLM_HOST_IP"] == f"10.0.0.{number + 1}"
        assert "GLOO_SOCKET_IFNAME" not in rank.env  # nothing demands it: the host name leads to the fabric
    assert option(head.argv, "--host") == "127.0.0.1"
    assert "--headless" not in head.argv
    assert "--headless" in worker.argv
    assert "--host" not in worker.argv


def test_only_rank_and_place_differ_between_the_ranks() -> None:
    head, worker = plan(*TWO).ranks
    differing = {name for name in head.env.keys() | worker.env.keys() if head.env.get(name) != worker.env.get(name)}
    assert differing == {"EXL3_RANK", "VLLM_HOST_IP"}


def test_gloo_is_told_the_interface_when_the_host_name_leads_elsewhere() -> None:
    made = plan(facts("spark1", "10.0.0.1", own_name=("127.0.1.1",), interface="enp1s0f0np0"), TWO[1])
    assert made.ranks[0].env["GLOO_SOCKET_IFNAME"] == "enp1s0f0np0"
    assert "GLOO_SOCKET_IFNAME" not in made.ranks[1].env


def test_the_recipe_wins_over_what_the_network_says() -> None:
    """Given a recipe that names interfaces itself, then every rank gets its values, not what the kit read."""
    astray = facts("spark1", "10.0.0.1", own_name=("127.0.1.1",), interface="enp1s0f0np0")
    chosen = {"GLOO_SOCKET_IFNAME": "eth9", "NCCL_IB_HCA": "=rocep1s0f0:1", "NCCL_IB_GID_INDEX": "3"}
    made = plan(astray, TWO[1], sets=(f"serve.env={json.dumps(chosen)}",))
    for rank in made.ranks:
        assert chosen.items() <= rank.env.items()


def test_one_engine_gets_a_bridge_and_the_api_on_loopback() -> None:
    made = plan(*HERE)
    assert made.bridge
    assert [rank.node for rank in made.ranks] == ["local", "local"]
    assert option(made.ranks[1].argv, "--master-addr") == "rank0"
    assert "VLLM_HOST_IP" not in made.ranks[0].env
    services = containers.services(render.compose(made, "local"))
    assert services["rank0"]["ports"] == ["127.0.0.1:8000:8000"]
    assert "ports" not in services["rank1"]
    assert services["rank0"]["networks"] == services["rank1"]["networks"] == ["fabric"]


def test_an_engine_named_twice_is_one_node() -> None:
    twice = (facts("local", engine="E"), facts("local-2", engine="E"))
    assert plan(*twice).bridge


@pytest.mark.parametrize(
    ("nodes", "binding"),
    [
        (HERE, ["0-1", "2-3"]),  # two ranks share one machine's cores
        ((facts("a", "10.0.0.1", machine="m"), facts("b", "10.0.0.2", machine="m")), ["0-1", "2-3"]),
        (TWO, [None, None]),  # vLLM's own choice is right for a rank alone on its machine
        ((facts("local", cpus=(5,)),), ["5", "5"]),
    ],
)
def test_ranks_of_one_machine_share_its_cores(nodes: tuple[NodeFacts, ...], binding: list[str | None]) -> None:
    assert [rank.env.get("VLLM_CPU_OMP_THREADS_BIND") for rank in plan(*nodes).ranks] == binding


def test_workers_of_one_container_share_its_cores() -> None:
    made = plan(*HERE, sets=("parallel.nodes=1", "parallel.tensor=2"))
    assert [rank.env["VLLM_CPU_OMP_THREADS_BIND"] for rank in made.ranks] == ["0-1|2-3"]
    assert "--nnodes" not in made.ranks[0].argv


def test_three_names_for_two_ranks_are_refused() -> None:
    with pytest.raises(KitError, match="runs on 2 node"):
        plan(*TWO, facts("spark3", "10.0.0.3"))


def test_a_node_without_an_address_on_the_fabric_is_refused() -> None:
    with pytest.raises(KitError) as refused:
        plan(TWO[0], facts("spark2", "192.0.2.9", interface=None))
    assert refused.value.where == "spark2"
    assert refused.value.code == ExitCode.PREFLIGHT


def test_the_recipe_overrides_what_facts_suggest() -> None:
    made = plan(*HERE, sets=('serve.env={VLLM_CPU_OMP_THREADS_BIND: "7"}',))
    assert [rank.env["VLLM_CPU_OMP_THREADS_BIND"] for rank in made.ranks] == ["7", "7"]


def test_the_generation_is_no_part_of_the_spec_and_everything_else_is() -> None:
    spec = plan(*TWO).spec
    assert plan(*TWO, generation="g2").spec == spec
    assert plan(*TWO, sets=("serve.port=9000",)).spec != spec
    assert plan(TWO[0], facts("spark2", "10.0.0.9")).spec != spec
    assert plan(*TWO, sets=("serve.env={A: b}",)).spec != spec


AWKWARD = ["--x", '{"a": "b c", "$HOME": [1]}', "it's $5 #1", "", "ümlaut\t", "{{ jinja }}", "- yaml: &x", "a\\", "yes"]


def awkward() -> deployment.Deployment:
    quoted = json.dumps(AWKWARD)
    names = {f"V{number}": value for number, value in enumerate(AWKWARD)}
    return plan(*HERE, sets=(f"serve.args={quoted}", f"serve.env={json.dumps(names)}"))


def test_awkward_words_survive_the_file() -> None:
    command = containers.services(render.compose(awkward(), "local"))["rank0"]["command"]
    at = command.index("--x")
    assert command[at : at + len(AWKWARD)] == AWKWARD
    assert command[0] == "--"


def test_every_container_is_confined() -> None:
    for service in yaml.safe_load(render.compose(plan(*TWO), "spark2"))["services"].values():
        assert service["user"] == "10001:10001"
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert "cap_add" not in service
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["ipc"] == "private"
        assert service["shm_size"] == "1g"
        assert service["pull_policy"] == "never"
        assert int(service["stop_grace_period"].removesuffix("s")) >= 20
        assert service["volumes"][0]["read_only"] is True
        assert service["labels"]["io.exl3kit.stamp"] == STAMP


def test_case_3_nothing_is_pulled_over_an_image_that_is_there() -> None:
    """Given a deployment, then no way of starting it lets an engine pull another image of that name."""
    made = plan(*TWO)
    for rank in made.ranks:
        (service,) = yaml.safe_load(render.compose(made, rank.node))["services"].values()
        assert (service["image"], service["pull_policy"]) == (made.image, "never")
        argv = elsewhere.docker_run(made, rank)
        assert argv[argv.index("--pull") + 1] == "never"
        (container,) = elsewhere.pod(made, rank, "registry.example/exl3:1", "models")["containers"]
        assert container["imagePullPolicy"] == "IfNotPresent"


def test_an_open_api_is_open_and_its_key_is_in_no_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sesame")
    made = plan(*TWO, sets=("serve.listen=open", f"serve.api_key_file={tmp_path / 'key'}"), key=True)
    assert option(made.ranks[0].argv, "--host") == "0.0.0.0"
    service = containers.services(render.compose(made, "spark1"))["rank0"]
    assert service["volumes"][1]["target"] == made.ranks[0].env["EXL3_API_KEY_FILE"] == "/run/secrets/api_key"
    assert made.ranks[1].api_key_file is None
    assert "sesame" not in "".join(render.files(made).values())


def test_files_are_readable_and_env_files_private(tmp_path: Path) -> None:
    written = render.write(plan(*TWO), tmp_path)
    names = [str(path.relative_to(tmp_path)) for path in written]
    assert names == ["spark1/compose.yaml", "spark1/rank0.env", "spark2/compose.yaml", "spark2/rank1.env"]
    for path in written:
        if path.suffix == ".env":
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert render.write(plan(*TWO), tmp_path) == written  # again, over what is there


def test_a_line_break_in_the_environment_is_refused() -> None:
    with pytest.raises(KitError, match="line break"):
        render.env_file({"A": "one\ntwo"})


def test_the_container_is_what_the_file_says() -> None:
    made = plan(*HERE)
    service = containers.services(render.compose(made, "local"))["rank0"]
    created = containers.creation(service, made.ranks[0].env, made.project, "1.41")
    host = created["host_config"]
    assert (created["name"], created["user"]) == (made.ranks[0].container, "10001:10001")
    assert created["entrypoint"] + created["command"] == ["python3", "-m", "exl3_vllm.rank", "--", *made.ranks[0].argv]
    assert created["environment"] == made.ranks[0].env
    assert created["labels"] == made.labels(made.ranks[0])
    assert created["stop_timeout"] == render.GRACE_S
    assert created["healthcheck"]["interval"] == 10 * 10**9
    assert host["ReadonlyRootfs"] is True
    assert (host["CapDrop"], host["SecurityOpt"]) == (["ALL"], ["no-new-privileges:true"])
    assert (host["IpcMode"], host["ShmSize"]) == ("private", render.SHM_BYTES)
    assert host["Tmpfs"] == {"/tmp": "size=1g,mode=1777", "/run/exl3": "size=16m,mode=1777"}
    assert host["PortBindings"] == {"8000/tcp": [{"HostIp": "127.0.0.1", "HostPort": "8000"}]}
    assert host["NetworkMode"] == made.project
    assert created["networking_config"]["EndpointsConfig"][made.project]["Aliases"] == ["rank0"]


def test_a_key_that_the_kit_does_not_know_is_refused_and_not_dropped() -> None:
    made = plan(*HERE)
    service = containers.services(render.compose(made, "local"))["rank0"]
    with pytest.raises(ValueError, match="gpus"):
        containers.creation({**service, "gpus": "all"}, {}, made.project, "1.41")


def test_gpus_are_reserved_in_the_form_that_compose_does_not_drop() -> None:
    recipe = recipes.load("demo-tp2")
    image = recipe.image.model_copy(update={"vllm": "0.33.0"})
    recipe = recipe.model_copy(update={"image": image})
    nodes = {node.name: node for node in TWO}
    made = deployment.plan(recipe, STAMP, list(nodes), nodes, dict.fromkeys(nodes, "/w"), "g")
    service = containers.services(render.compose(made, "spark1"))["rank0"]
    assert "gpus" not in service
    request = containers.creation(service, {}, "p", "1.41")["host_config"]["DeviceRequests"][0]
    assert (request["Driver"], request["Count"], request["Capabilities"]) == ("nvidia", -1, [["gpu"]])


def test_another_name_for_the_same_machines_is_the_same_deployment() -> None:
    """Given a second operator's ssh names for the same two machines, then nothing is to be started anew."""
    of_bob = tuple(replace(node, name=f"admin@{node.name}") for node in TWO)
    folders = {node.name: "/weights" for node in (*TWO, *of_bob)}

    def spec(nodes: tuple[NodeFacts, ...]) -> str:
        recipe = recipes.load("demo-tp2")
        names = deployment.place(recipe, nodes)
        return deployment.plan(recipe, STAMP, names, {one.name: one for one in nodes}, folders, "g1").spec

    assert spec(TWO) == spec(of_bob)
    assert spec(TWO) != spec(TWO[::-1])
