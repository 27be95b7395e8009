"""`kit up`, `status`, `logs`, `down` and `render` on two hosts: real ssh, real engines, vLLM at TP2 on real ranks."""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kit_verbs import VERB_SECONDS, assert_empty, everything, kit, kit_argv, refusal, told
from rich.console import Console
from rig_hosts import REPOSITORY, Completed, Rig, call
from rig_lib.plan import SUBNET

from exl3kit import proving, recipes, serve
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


@contextmanager
def listening(rig: Rig, node: str, port: int) -> Iterator[None]:
    """Something foreign listens on a port of a host."""
    argv = ["nsenter", network_of(rig, node), sys.executable, "-m", "http.server", str(port)]
    listener = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(100):
            if rig.exec(node, "ss", "-Hltn", f"sport = :{port}").stdout:
                break
            time.sleep(0.1)
        yield
    finally:
        listener.kill()
        listener.wait()


LOAD = """
import collections, http.client, json, sys, threading, time
pairs, seconds, stop = json.loads(sys.argv[1]), float(sys.argv[2]), threading.Event()
seen, lock = collections.Counter(), threading.Lock()
def ask(pair):
    body = {"model": "demo", "prompt": pair["question"], "max_tokens": 100, "temperature": 0}
    connection = http.client.HTTPConnection("127.0.0.1", 8000, timeout=seconds)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
    except TimeoutError:
        return "hung"
    except (OSError, http.client.HTTPException):
        return "refused"
    finally:
        connection.close()
    if answer.status != 200:
        return "refused" if answer.status >= 500 else f"status {answer.status}"
    return "exact" if json.loads(text)["choices"][0]["text"] == pair["answer"] else "wrong"
def client(number):
    while not stop.is_set():
        outcome = ask(pairs[number % len(pairs)])
        with lock:
            seen[outcome] += 1
        if outcome == "refused":
            time.sleep(0.2)
threads = [threading.Thread(target=client, args=(number,)) for number in range(int(sys.argv[3]))]
for thread in threads: thread.start()
sys.stdin.read()
stop.set()
for thread in threads: thread.join()
print(json.dumps(seen))
"""


@contextmanager
def clients(rig: Rig, number: int) -> Iterator[Callable[[], dict[str, int]]]:
    """Clients on node1 that ask without pause; the function gives how often each outcome was, after they have ended."""
    argv = ["nsenter", network_of(rig, "node1"), sys.executable, "-c", LOAD, json.dumps(QUESTIONS), "120", str(number)]
    load = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    told_by_it: list[str] = []
    try:
        time.sleep(2)
        yield lambda: json.loads(told_by_it[0])
        time.sleep(2)
        told_by_it.append(load.communicate(input="", timeout=150)[0])
    finally:
        load.kill()
        load.wait()


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
    assert "effective_tier" in table and "2 ranks agree" in table
    asked = told(kit(ready, "receipts", "demo-tp2", "--nodes", NODES, "--set", "exl3.tier=sorted", "--json"), 5)
    assert [fault.partition(" (")[0] for fault in asked["faults"]] == [
        f"rank {rank} on node{rank + 1} runs the tier legacy" for rank in (0, 1)
    ]
    alone = told(kit(ready, "receipts", "demo-tp2", "--nodes", "node1", "--json"), 5)
    assert alone["faults"] == ["receipts of 2 ranks were expected and those of [0] came"]


def test_status_tells_ranks_state_progress_network_and_receipts(ready: Rig, serving: dict[str, Any]) -> None:
    (one,) = told(kit(ready, "status", "--nodes", NODES, "--json"))["deployments"]
    assert (one["deployment"], one["state"], one["stamp"]) == ("demo-tp2", "serving", serving["stamp"])
    assert (one["generation"], one["incarnation"] >= 1) == (serving["generation"], True)
    head, worker = one["ranks"]
    assert [rank["state"] for rank in (head, worker)] == ["serving", "serving"]
    assert [rank["receipts"][0]["trellis_tensors"] for rank in (head, worker)] == [15, 15]
    assert head["progress"]["generation_tokens"] > 0 and worker["progress"] is None
    assert head["memory"]["available"] > 0
    for rank, peer in ((head, 2), (worker, 1)):
        assert rank["transport"]["kind"] == "tcp"
        assert rank["transport"]["says"].startswith("Gloo, TCP over ")
        assert rank["transport"]["says"].endswith(f" to {SUBNET}.{peer}")
    table = kit(ready, "status", "demo-tp2", "--nodes", NODES).stdout
    for words in ("demo-tp2  serving", "Gloo, TCP over", "GiB free", "legacy"):
        assert words in table, table


def test_receipts_name_the_network_that_each_rank_uses(serving: dict[str, Any]) -> None:
    assert [receipt["transport"]["kind"] for receipt in serving["ranks"]] == ["tcp", "tcp"]


def incarnations(rig: Rig) -> list[str]:
    """Ids and start times of both ranks' containers: equal means that nothing was restarted."""
    names = (("node1", "exl3kit-demo-tp2-rank0"), ("node2", "exl3kit-demo-tp2-rank1"))
    return [
        rig.docker(node, "inspect", "--format", "{{.Id}} {{.State.StartedAt}} {{.RestartCount}}", name).stdout
        for node, name in names
    ]


def test_up_again_restarts_nothing_and_wait_returns_at_once(ready: Rig, serving: dict[str, Any]) -> None:
    before = incarnations(ready)
    begun = time.monotonic()
    again = told(kit(ready, "up", "demo-tp2", "--nodes", NODES, "--json"))
    assert (again["started"], again["generation"]) == (False, serving["generation"])
    assert time.monotonic() - begun < 30
    assert told(kit(ready, "wait", "demo-tp2", "--nodes", NODES, "--json"))["answer"] == "4"
    assert incarnations(ready) == before


def test_what_preflight_refuses_leaves_the_old_one_serving(ready: Rig, serving: dict[str, Any]) -> None:
    before = incarnations(ready)
    with listening(ready, "node1", 8100):
        for verb in ("up", "restart"):
            done = kit(ready, verb, "demo-tp2", "--nodes", NODES, "--set", "serve.port=8100")
            assert "port 8100 is in use" in refusal(done, 3)
    assert incarnations(ready) == before
    assert ask(ready, "2+2=") == "4"


def test_render_shows_every_ranks_environment_with_its_sources(ready: Rig, serving: dict[str, Any]) -> None:
    ranks = told(kit(ready, "render", "demo-tp2", "--nodes", NODES, "--env", "--json"))["ranks"]
    shown = {rank["rank"]: {one["name"]: one for one in rank["env"]} for rank in ranks}
    inspected = json.loads(ready.docker("node1", "inspect", "exl3kit-demo-tp2-rank0").stdout)[0]["Config"]["Env"]
    given = dict(entry.split("=", 1) for entry in inspected)
    del given["EXL3_GENERATION"]
    assert {name: shown[0][name]["value"] for name in given} == given
    assert shown[1]["VLLM_HOST_IP"] == {
        **dict.fromkeys(("instead_of",)), "name": "VLLM_HOST_IP", "value": f"{SUBNET}.2", "source": "facts"
    }  # fmt: skip
    difference = kit(ready, "render", "demo-tp2", "--nodes", NODES, "--diff").stdout
    assert f"rank 0: VLLM_HOST_IP={SUBNET}.1  (facts)" in difference
    assert "HF_HUB_OFFLINE" not in difference


def test_logs_name_rank_and_node_and_a_detached_follow_changes_nothing(ready: Rig, serving: dict[str, Any]) -> None:
    lines = kit(ready, "logs", "demo-tp2", "--nodes", NODES).stdout.splitlines()
    for prefix in ("rank0@node1 | ", "rank1@node2 | "):
        assert any(line.startswith(prefix) for line in lines)
    as_json = told(kit(ready, "logs", "demo-tp2", "--nodes", NODES, "--tail", "1", "--json"))["lines"]
    assert sorted((line["rank"], line["node"]) for line in as_json) == [(0, "node1"), (1, "node2")]
    every = told(kit(ready, "logs", "demo-tp2", "--nodes", NODES, "--since", "1d", "--json"))["lines"]
    assert [line["time"] for line in every] == sorted(line["time"] for line in every)
    assert {line["rank"] for line in every} == {0, 1}
    middle = every[len(every) // 2]["time"]
    later = told(kit(ready, "logs", "demo-tp2", "--nodes", NODES, "--since", middle[:26] + "+00:00", "--json"))["lines"]
    assert later and all(line["time"][:26] >= middle[:26] for line in later) and len(later) < len(every)
    for node in ("node1", "node2"):  # of deaths that other tests caused
        ready.exec(node, "sh", "-c", 'rm -f "$HOME"/.cache/exl3kit/deployments/demo-tp2/post-mortem-*')
    assert "no death of demo-tp2" in refusal(kit(ready, "logs", "demo-tp2", "--nodes", NODES, "--post-mortem"), 2)
    argv = kit_argv("logs", "demo-tp2", "--nodes", NODES, "--follow", "--tail", "1")
    follow = subprocess.Popen(argv, env=ready.env, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert follow.stdout is not None
    assert follow.stdout.readline()
    follow.send_signal(signal.SIGINT)
    assert follow.wait(timeout=15) == 0
    assert ask(ready, "2+2=") == "4"


@pytest.mark.full
def test_wait_follows_a_gang_that_reforms_after_both_nodes_lost_power(ready: Rig, serving: dict[str, Any]) -> None:
    """Given both nodes without power, one of them for longer, when `kit wait` runs meanwhile, then it ends well."""
    (before,) = told(kit(ready, "status", "--nodes", NODES, "--json"))["deployments"]
    ready.power_off("node2")
    ready.power_cycle("node1")
    waiting = launched(ready, "wait", "demo-tp2", "--nodes", NODES)
    seen = read_until(waiting, "node2: ")
    ready.power_on("node2")
    rest = waiting.communicate(timeout=VERB_SECONDS)[0]
    assert waiting.returncode == 0, seen + rest
    assert "it answers, " in rest
    (after,) = told(kit(ready, "status", "--nodes", NODES, "--json"))["deployments"]
    assert (after["state"], after["generation"]) == ("serving", before["generation"])
    assert after["incarnation"] > before["incarnation"]
    assert ask(ready, "2+2=") == "4"


@pytest.mark.full
def test_restart_under_load_answers_or_refuses_every_request_while_a_second_operator_is_refused(
    ready: Rig, serving: dict[str, Any]
) -> None:
    """Given eight clients without pause, when the gang is restarted, then no request hangs or gets a wrong answer."""
    before = incarnations(ready)
    with clients(ready, 8) as outcomes:
        argv = kit_argv("restart", "demo-tp2", "--nodes", NODES, "--json")
        restart = subprocess.Popen(argv, env=ready.env, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            assert restart.stderr is not None
            for line in restart.stderr:
                if b"start the ranks" in line:
                    break
            sentence = refusal(kit(ready, "down", "demo-tp2", "--nodes", "node2,node1"), 3)
            printed = restart.communicate(timeout=VERB_SECONDS)
        finally:
            restart.kill()
            restart.wait()
    assert "your own `kit restart demo-tp2` is changing what runs there" in sentence
    assert "`kit restart demo-tp2`, process" in sentence
    assert restart.returncode == 0, printed
    again = json.loads(printed[0])
    assert again["started"] and again["generation"] > serving["generation"]
    assert all(old.split()[0] != new.split()[0] for old, new in zip(before, incarnations(ready), strict=True))
    seen = outcomes()
    assert set(seen) <= {"exact", "refused"}, seen
    assert seen["exact"] > 8 and seen["refused"] > 0, seen  # of both gangs, and between them


def test_down_with_a_node_gone_says_what_may_run_there_and_how_to_finish(ready: Rig, serving: dict[str, Any]) -> None:
    ready.link("node2", "down")
    try:
        done = kit(ready, "status", "--nodes", NODES, "--json")
        (one,) = told(done, 6)["deployments"]
        assert (one["state"], one["ranks"][1]["state"], one["ranks"][1]["node"]) == (
            "unreachable",
            "unreachable",
            "node2",
        )
        assert "rank 1 on node2 cannot be asked" in one["note"]
        found = told(kit(ready, "down", "demo-tp2", "--nodes", NODES, "--json"), 6)
        assert found["removed"] == ["exl3kit-demo-tp2-rank0"]
        assert (found["unreachable"], found["absent"]) == (["node2"], [1])
        assert "demo-tp2 may still run on node2 (rank 1 of it)" in found["error"]["what"]
        assert "`kit down demo-tp2 --nodes node2`" in found["error"]["next"]
        assert everything(ready, "node1") == []
    finally:
        ready.link("node2", "up")
    assert everything(ready, "node2") == ["container exl3kit-demo-tp2-rank1"]
    begun = time.monotonic()
    removed = told(kit(ready, "down", "demo-tp2", "--nodes", "node2", "--json"))["removed"]
    assert removed == ["exl3kit-demo-tp2-rank1"]
    assert time.monotonic() - begun < 40
    assert_empty(ready)
    for node in ("node1", "node2"):
        ports = "( sport = :8000 or sport = :18000 or sport = :28000 )"
        assert ready.exec(node, "ss", "-Hltun", ports).stdout == ""
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
        with pytest.raises(urllib.error.HTTPError, match="401"):  # which vLLM by itself answers without a key
            urllib.request.urlopen(models.replace("/v1/models", "/invocations"), data=b"{}", timeout=10)
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
            proving.prove(serve.start(ground, planned, None), recipe, deadline_s=60)
    # Then no "started" is said
    assert failed.value.code == ExitCode.SERVING
    assert "ended by itself with status 0; a server that nobody stopped has failed" in failed.value.what
    sentence = str(failed.value)
    # The other rank may have been ended before it said a word of its own.
    first = failed.value.what[len("rank ")]
    assert f"rank {first} on node{int(first) + 1} | no server in rank {first}" in sentence
    assert_empty(ready)


def test_an_argument_that_vllm_refuses_is_told_in_its_own_words(ready: Rig) -> None:
    done = kit(ready, "up", "demo-tp2", "--nodes", NODES, "--set", "serve.args=[--max-lora-rank, three]")
    sentence = refusal(done, 7)
    assert "ended by itself with status 2" in sentence
    assert "argument --max-lora-rank" in sentence
    assert_empty(ready)
    # and what the ranks wrote of it outlives their containers
    kept = kit(ready, "logs", "demo-tp2", "--nodes", NODES, "--post-mortem").stdout
    assert "first: rank " in kept and "argument --max-lora-rank" in kept, kept


def test_a_taken_port_is_refused_with_its_owner(ready: Rig) -> None:
    with listening(ready, "node1", 8000):
        sentence = refusal(kit(ready, "up", "demo-tp2", "--nodes", NODES), 3)
    assert "node node1: port 8000 is in use" in sentence
    assert_empty(ready)


def test_a_container_of_another_recipe_under_the_same_name_is_refused(ready: Rig, tiny_image: str) -> None:
    """Given a rank of `demo.tp2`, whose container has the name that a rank of `demo-tp2` would have."""
    name = "exl3kit-demo-tp2-rank1"
    ready.docker("node2", "create", "--name", name, "--label", "io.exl3kit.deployment=demo.tp2", tiny_image, "true")
    try:
        sentence = refusal(kit(ready, "up", "demo-tp2", "--nodes", NODES), 3)
    finally:
        ready.docker("node2", "rm", name)
    assert f"node node2: the container {name} is not of demo-tp2" in sentence
    assert "`kit down demo.tp2`" in sentence
    assert_empty(ready)


def test_nothing_that_stands_is_nothing_to_restart_or_to_wait_for(ready: Rig) -> None:
    assert "no rank of demo-tp2 is there to restart" in refusal(kit(ready, "restart", "demo-tp2", "--nodes", NODES), 3)
    assert "nothing of demo-tp2 stands there" in refusal(kit(ready, "wait", "demo-tp2", "--nodes", NODES), 7)


def launched(rig: Rig, *argv: str) -> subprocess.Popen[str]:
    """A verb that runs."""
    return subprocess.Popen(
        kit_argv(*argv), env=rig.env, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def read_until(process: subprocess.Popen[str], words: str) -> str:
    """What a verb prints until a line with these words, or until it ends."""
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        if words in line:
            break
    return text


def test_of_two_operators_at_once_one_wins_and_ctrl_c_takes_away_what_it_started(ready: Rig) -> None:
    """Given two who start at the same time, in other orders of the nodes, then one is refused with owner and age."""
    both = [launched(ready, "up", "demo-tp2", "--nodes", nodes) for nodes in (NODES, "node2,node1")]
    with ThreadPoolExecutor() as pool:
        printed = list(pool.map(lambda process: read_until(process, "first answer"), both))
    lost, won = sorted(range(2), key=lambda number: "first answer" in printed[number])
    assert "first answer" in printed[won] and "first answer" not in printed[lost], printed
    assert both[lost].wait(timeout=30) == 3
    assert re.search(r"your own .*`kit up demo-tp2`, process \d+, for \d+ s", printed[lost]), printed[lost]
    interrupted(ready, both[won], signal.SIGINT)


def test_sigterm_while_starting_takes_away_what_was_started(ready: Rig) -> None:
    process = launched(ready, "up", "demo-tp2", "--nodes", NODES)
    read_until(process, "first answer")
    assert everything(ready, "node1")
    interrupted(ready, process, signal.SIGTERM)


def interrupted(rig: Rig, process: subprocess.Popen[str], number: signal.Signals) -> None:
    """End a start by a signal: it ends as interrupted, soon, and nothing of it is left."""
    process.send_signal(number)
    sent = time.monotonic()
    rest = process.communicate(timeout=60)[0]
    assert process.returncode == 130, rest
    assert time.monotonic() - sent < 20
    assert_empty(rig)


def test_a_kit_that_is_killed_leaves_no_lock_and_down_clears_what_it_left(ready: Rig) -> None:
    process = launched(ready, "up", "demo-tp2", "--nodes", NODES)
    read_until(process, "first answer")
    assert "up demo-tp2" in ready.ssh("node2", "cat /tmp/exl3kit-deployment-lock").stdout
    process.kill()
    process.wait()
    assert told(kit(ready, "down", "demo-tp2", "--nodes", NODES, "--json"))["removed"] == [
        "exl3kit-demo-tp2-rank0",
        "exl3kit-demo-tp2-rank1",
    ]
    assert ready.ssh("node2", "ls /tmp/exl3kit-deployment-lock", check=False).returncode != 0
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
