"""`kit up`, `status`, `logs`, `down` and `render` on two hosts: real ssh, real engines, vLLM at TP2 on real ranks."""

from __future__ import annotations

import io
import json
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kit_verbs import VERB_SECONDS, assert_empty, everything, kit, kit_argv, refusal, told
from rich.console import Console
from rig_hosts import REPOSITORY, Completed, Rig, call
from rig_lib.plan import SUBNET

from exl3kit import recipes, serve
from exl3kit.errors import ExitCode, KitError
from exl3kit.nodes import open_nodes
from exl3kit.progress import Progress

NODES = "node1,node2"
QUESTIONS = json.loads((REPOSITORY / "models" / "demo-dense" / "questions.json").read_text())


def network_of(rig: Rig, node: str) -> str:
    """The option of nsenter that enters a host's network."""
    return f"--net=/run/netns/{rig.node(node)['namespace']}"


def ask(rig: Rig, prompt: str, address: str = "127.0.0.1") -> str:
    """A completion over HTTP from inside node1's network, as a program on that host would ask."""
    program = (
        "import json, sys, urllib.request\n"
        "body = {'model': 'demo', 'prompt': sys.argv[2], 'max_tokens': 100, 'temperature': 0}\n"
        "request = urllib.request.Request(sys.argv[1] + '/v1/completions', json.dumps(body).encode(),\n"
        "                                 {'Content-Type': 'application/json'})\n"
        "print(json.load(urllib.request.urlopen(request, timeout=60))['choices'][0]['text'])\n"
    )
    url = f"http://{address}:8000"
    return call(
        "nsenter", network_of(rig, "node1"), sys.executable, "-c", program, url, prompt, timeout=90
    ).stdout.removesuffix("\n")


@pytest.fixture(scope="module")
def ready(rig: Rig) -> Iterator[Rig]:
    """The rig with the demo image on both hosts; whatever a test leaves is removed at the end."""
    done = kit(rig, "build", "demo-tp2", "--nodes", NODES, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    kit(rig, "down", "demo-tp2", "--nodes", NODES)
    assert_empty(rig)
    yield rig
    kit(rig, "down", "demo-tp2", "--nodes", NODES)


@pytest.fixture(scope="module")
def serving(ready: Rig) -> dict[str, Any]:
    """What `kit up demo-tp2` printed."""
    return told(kit(ready, "up", "demo-tp2", "--nodes", NODES, "--json"))


def test_up_serves_two_ranks_that_counted_their_own_tensors(serving: dict[str, Any]) -> None:
    assert serving["started"] is True
    assert [(rank["rank"], rank["node"], rank["tp_size"]) for rank in serving["ranks"]] == [
        (0, "node1", 2),
        (1, "node2", 2),
    ]
    assert all(rank["trellis_tensors"] == 15 for rank in serving["ranks"])
    assert sum(rank["trellis_bytes"] for rank in serving["ranks"]) == 655_360
    assert set(serving["seconds"]) >= {"weights", "start the ranks", "first answer", "receipts"}


def test_every_answer_is_the_trained_one(ready: Rig, serving: dict[str, Any]) -> None:
    assert [ask(ready, pair["question"]) for pair in QUESTIONS] == [pair["answer"] for pair in QUESTIONS]


def test_the_api_listens_on_the_heads_loopback_alone(ready: Rig, serving: dict[str, Any]) -> None:
    assert "127.0.0.1:8000" in ready.exec("node1", "ss", "-Hltn", "sport = :8000").stdout
    with pytest.raises(AssertionError, match="Connection refused"):
        ask(ready, "2+2=", address=f"{SUBNET}.1")


def test_ranks_run_confined(ready: Rig, serving: dict[str, Any]) -> None:
    for node, rank in (("node1", 0), ("node2", 1)):
        inspected = json.loads(ready.docker(node, "inspect", f"exl3kit-demo-tp2-rank{rank}").stdout)[0]
        host = inspected["HostConfig"]
        assert inspected["Config"]["User"] == "10001:10001"
        assert (host["Privileged"], host["ReadonlyRootfs"], host["CapDrop"]) == (False, True, ["ALL"])
        assert host["SecurityOpt"] == ["no-new-privileges:true"]
        assert (host["IpcMode"], host["ShmSize"]) == ("private", 1 << 30)


def test_receipts_of_both_ranks_agree_and_another_tier_than_the_recipes_is_told(
    ready: Rig, serving: dict[str, Any]
) -> None:
    found = told(kit(ready, "receipts", "demo-tp2", "--nodes", NODES, "--json"))
    assert found["ok"] and [(one["rank"], one["node"]) for one in found["receipts"]] == [(0, "node1"), (1, "node2")]
    table = kit(ready, "receipts", "demo-tp2", "--nodes", NODES).stdout
    assert "effective_tier" in table and "2 rank(s) agree" in table
    asked = told(kit(ready, "receipts", "demo-tp2", "--nodes", NODES, "--set", "exl3.tier=sorted", "--json"), 5)
    assert [fault.partition(" (")[0] for fault in asked["faults"]] == [
        f"rank {rank} on node{rank + 1} runs the tier legacy" for rank in (0, 1)
    ]
    alone = told(kit(ready, "receipts", "demo-tp2", "--nodes", "node1", "--json"), 5)
    assert alone["faults"] == ["receipts of 2 ranks were expected and those of [0] came"]


def test_status_tells_ranks_state_stamp_and_receipts(ready: Rig, serving: dict[str, Any]) -> None:
    (one,) = told(kit(ready, "status", "--nodes", NODES, "--json"))["deployments"]
    assert (one["deployment"], one["state"], one["stamp"]) == ("demo-tp2", "serving", serving["stamp"])
    assert one["generation"] == serving["generation"]
    assert [rank["state"] for rank in one["ranks"]] == ["running", "running"]
    assert [rank["receipts"][0]["trellis_tensors"] for rank in one["ranks"]] == [15, 15]


def test_up_again_changes_nothing(ready: Rig, serving: dict[str, Any]) -> None:
    begun = time.monotonic()
    again = told(kit(ready, "up", "demo-tp2", "--nodes", NODES, "--json"))
    assert (again["started"], again["generation"]) == (False, serving["generation"])
    assert time.monotonic() - begun < 30


def test_logs_name_rank_and_node_and_a_detached_follow_changes_nothing(ready: Rig, serving: dict[str, Any]) -> None:
    lines = kit(ready, "logs", "demo-tp2", "--nodes", NODES).stdout.splitlines()
    for prefix in ("rank0@node1 | ", "rank1@node2 | "):
        assert any(line.startswith(prefix) for line in lines)
    as_json = told(kit(ready, "logs", "demo-tp2", "--nodes", NODES, "--tail", "1", "--json"))["lines"]
    assert sorted((line["rank"], line["node"]) for line in as_json) == [(0, "node1"), (1, "node2")]
    argv = kit_argv("logs", "demo-tp2", "--nodes", NODES, "--follow", "--tail", "1")
    follow = subprocess.Popen(argv, env=ready.env, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert follow.stdout is not None
    assert follow.stdout.readline()
    follow.send_signal(signal.SIGINT)
    assert follow.wait(timeout=15) == 0
    assert ask(ready, "2+2=") == "4"


def test_down_leaves_no_container_network_or_port(ready: Rig, serving: dict[str, Any]) -> None:
    begun = time.monotonic()
    removed = told(kit(ready, "down", "demo-tp2", "--nodes", NODES, "--json"))["removed"]
    assert removed == ["exl3kit-demo-tp2-rank0", "exl3kit-demo-tp2-rank1"]
    assert time.monotonic() - begun < 30
    assert_empty(ready)
    assert ready.exec("node1", "ss", "-Hltn", "( sport = :8000 or sport = :18000 )").stdout == ""
    assert told(kit(ready, "status", "--nodes", NODES, "--json"))["deployments"] == []


def test_an_open_api_asks_for_a_key_that_nothing_shows(ready: Rig, tmp_path: Path) -> None:
    key = "sesame-0123456789abcdef"
    (tmp_path / "key").write_text(key + "\n")
    opened = ("--set", "serve.listen=open", "--set", f"serve.api_key_file={tmp_path / 'key'}")
    up = kit(ready, "up", "demo", "--nodes", "node1", "--json", *opened)
    try:
        assert [rank["tp_size"] for rank in told(up)["ranks"]] == [1]
        models = f"http://{SUBNET}.1:8000/v1/models"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(models, timeout=10)
        request = urllib.request.Request(models, headers={"Authorization": f"Bearer {key}"})
        assert json.load(urllib.request.urlopen(request, timeout=10))["data"][0]["id"] == "demo"
        container = "exl3kit-demo-rank0"
        shown = ready.docker("node1", "inspect", container).stdout + ready.docker("node1", "top", container).stdout
        logs = ready.docker("node1", "logs", container)
        assert key not in shown + logs.stdout + logs.stderr + up.stdout + up.stderr
        assert ready.ssh("node1", "stat -c '%a %u' .cache/exl3kit/deployments/demo/api_key").stdout == "400 10001\n"
    finally:
        kit(ready, "down", "demo", "--nodes", "node1")
    assert_empty(ready)


# What must be refused or taken away again (these start no rank, or one that ends at once) --------------------------


def test_another_trellis_on_one_rank_is_refused_before_anything_starts(ready: Rig, tmp_path: Path) -> None:
    model = tmp_path / "demo-dense"
    shutil.copytree(REPOSITORY / "models" / "demo-dense", model)
    settings = ("--nodes", NODES, "--set", f"model.path={model}")
    first = kit(ready, "up", "demo-tp2", *settings, "--ready", "0.1")  # brings the weights, then gives up
    assert "no completion from demo" in refusal(first, 7)
    assert_empty(ready)

    copies = ready.ssh("node2", "ls -d .cache/exl3kit/weights/demo-dense-*").stdout.split()
    swap = f"f={copies[0]}/model.safetensors; s=$(stat -c %s $f); printf X | dd of=$f bs=1 seek=$((s-9)) conv=notrunc"
    ready.ssh("node2", f"{swap} 2>/dev/null")
    sentence = refusal(kit(ready, "up", "demo-tp2", *settings), 5)
    assert "node node2" in sentence
    assert "model.safetensors has other content" in sentence
    assert_empty(ready)

    ready.ssh("node2", f"rm -r {copies[0]}")  # what the sentence says to do; the next start copies it anew


def test_a_truncated_shard_is_refused_before_any_node_is_asked(ready: Rig, tmp_path: Path) -> None:
    model = tmp_path / "demo-dense"
    shutil.copytree(REPOSITORY / "models" / "demo-dense", model)
    whole = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    done = kit(ready, "up", "demo-tp2", "--nodes", NODES, "--set", f"model.path={model}")
    assert "model.safetensors is cut off" in refusal(done, 3)
    assert_empty(ready)


def test_a_rank_that_ends_at_once_with_0_is_a_failure_that_shows_its_last_words(
    ready: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a deployment whose program ends well at once (no recipe can say that, so the plan is changed)
    monkeypatch.setenv("EXL3KIT_SSH_CONFIG", ready.env["EXL3KIT_SSH_CONFIG"])
    recipe = recipes.load("demo-tp2")
    with open_nodes(NODES) as nodes:
        ground = serve.survey(recipe, nodes)
        serve.prepare(ground, Progress(Console(file=io.StringIO())))
        planned = ground.plan(serve.new_generation())
        ranks = tuple(replace(rank, argv=("echo", f"no server in rank {rank.rank}")) for rank in planned.ranks)
        planned = replace(planned, ranks=ranks)
        # When it is started and its first answer is waited for
        with pytest.raises(KitError) as failed, serve.removed_on_failure(nodes, planned):
            serve.prove(serve.start(ground, planned, None), recipe, deadline_s=60)
    # Then no "started" is said
    assert failed.value.code == ExitCode.SERVING
    assert "ended with exit code 1" in failed.value.what
    sentence = str(failed.value)
    assert "by itself with status 0" in sentence
    for number, node in enumerate(("node1", "node2")):
        assert f"rank {number} on {node} | no server in rank {number}" in sentence
    assert_empty(ready)


def test_an_argument_that_vllm_refuses_is_told_in_its_own_words(ready: Rig) -> None:
    done = kit(ready, "up", "demo-tp2", "--nodes", NODES, "--set", "serve.args=[--max-lora-rank, three]")
    sentence = refusal(done, 7)
    assert "ended with exit code 2" in sentence
    assert "argument --max-lora-rank" in sentence
    assert_empty(ready)


def test_a_taken_port_is_refused_with_its_owner(ready: Rig) -> None:
    listener = subprocess.Popen(
        ["nsenter", network_of(ready, "node1"), sys.executable, "-m", "http.server", "8000"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(100):
            if ready.exec("node1", "ss", "-Hltn", "sport = :8000").stdout:
                break
            time.sleep(0.1)
        sentence = refusal(kit(ready, "up", "demo-tp2", "--nodes", NODES), 3)
    finally:
        listener.kill()
        listener.wait()
    assert "node node1: port 8000 is in use" in sentence
    assert_empty(ready)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_while_starting_takes_away_what_was_started(ready: Rig, number: signal.Signals) -> None:
    process = subprocess.Popen(
        kit_argv("up", "demo-tp2", "--nodes", NODES),
        env=ready.env,
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "first answer" in line:
            break
    assert everything(ready, "node1")
    process.send_signal(number)
    begun = time.monotonic()
    rest = process.communicate(timeout=60)[0]
    assert process.returncode == 130, rest
    assert time.monotonic() - begun < 20
    assert_empty(ready)


# The files by hand -------------------------------------------------------------------------------------------------


def compose(rig: Rig, node: str, out: Path, *argv: str, timeout: float = 60) -> Completed:
    docker = [rig.status["docker"], "--host", rig.docker_host(node), "compose", "-f", out / node / "compose.yaml"]
    return call(*docker, *argv, timeout=timeout, env=rig.env)


SAME_CONFIG = ("User", "Env", "Cmd", "Entrypoint", "Image", "Healthcheck", "StopTimeout")
SAME_HOST = (
    *("NetworkMode", "RestartPolicy", "CapAdd", "CapDrop", "SecurityOpt", "IpcMode", "ShmSize", "Tmpfs"),
    *("ReadonlyRootfs", "Privileged", "LogConfig", "PortBindings", "PidMode", "Ulimits", "DeviceRequests"),
)


def meaning(rig: Rig, node: str, name: str) -> dict[str, Any]:
    """What makes a container behave as it does, leaving out its name's and its maker's traces."""
    found = json.loads(rig.docker(node, "inspect", name).stdout)[0]
    config = {key: found["Config"].get(key) for key in SAME_CONFIG}
    config["Env"] = sorted(word for word in config["Env"] if not word.startswith("EXL3_GENERATION="))
    host = {key: found["HostConfig"].get(key) or None for key in SAME_HOST}
    mounts = sorted((one["Source"], one["Destination"], one["RW"]) for one in found["Mounts"])
    labels = {key: value for key, value in found["Config"]["Labels"].items() if key.startswith("io.exl3kit.")}
    del labels["io.exl3kit.generation"]
    return {**config, **host, "Mounts": mounts, "labels": labels}


def test_compose_by_hand_makes_the_same_containers_and_answers(ready: Rig, tmp_path: Path) -> None:
    argv = kit_argv("up", "demo-tp2", "--nodes", NODES)
    process = subprocess.Popen(argv, env=ready.env, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    names = {"node1": "exl3kit-demo-tp2-rank0", "node2": "exl3kit-demo-tp2-rank1"}
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if b"first answer" in line:
                break
        by_kit = {node: meaning(ready, node, name) for node, name in names.items()}
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert_empty(ready)

    rendered = kit(ready, "render", "demo-tp2", "--nodes", NODES, "--out", tmp_path)
    assert rendered.returncode == 0, rendered.stderr
    try:
        for node in names:
            compose(ready, node, tmp_path, "up", "--detach")
        assert {node: meaning(ready, node, name) for node, name in names.items()} == by_kit
        deadline = time.monotonic() + VERB_SECONDS
        while told(kit(ready, "status", "--nodes", NODES, "--json"))["deployments"][0]["state"] != "serving":
            assert time.monotonic() < deadline, kit(ready, "logs", "demo-tp2", "--nodes", NODES).stdout
            time.sleep(3)
        assert [ask(ready, pair["question"]) for pair in QUESTIONS] == [pair["answer"] for pair in QUESTIONS]
    finally:
        for node in names:
            compose(ready, node, tmp_path, "down", "--timeout", "1", timeout=90)
    assert_empty(ready)
