"""A deployment for other tools: the same argv, environment and rights as its compose file; a manifest that holds."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from spark_nodes import Spark, node_facts
from test_render import HERE, TWO, plan

from exl3kit import elsewhere, recipes, render
from exl3kit.deployment import NodeFacts
from exl3kit.errors import KitError

SCHEMA: dict[str, Any] = json.loads((Path(__file__).parent / "leader_worker_set.schema.json").read_text())


def check(value: Any, schema: dict[str, Any], where: str = "$") -> list[str]:
    """What is wrong with a value by the words of JSON Schema that the file uses."""
    if "$ref" in schema:
        return check(value, SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]], where)
    if "enum" in schema:
        return [] if value in schema["enum"] else [f"{where}: {value!r}"]
    kinds: dict[str, type] = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
    kind = schema.get("type")
    if kind and (not isinstance(value, kinds[kind]) or (kind == "integer" and isinstance(value, bool))):
        return [f"{where}: {value!r} is no {kind}"]
    if beyond(value, schema):
        return [f"{where}: {value!r}"]
    faults = [f"{where}: no {name}" for name in schema.get("required", []) if name not in value]
    if isinstance(value, dict):
        known = schema.get("properties", {})
        for name, item in value.items():
            if name in known:
                faults += check(item, known[name], f"{where}.{name}")
            elif schema.get("additionalProperties") is False:
                faults.append(f"{where}: unknown {name}")
    for number, item in enumerate(value if isinstance(value, list) else []):
        faults += check(item, schema.get("items", {}), f"{where}[{number}]")
    return faults


def beyond(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value is outside of the limits of its schema."""
    if isinstance(value, str):
        odd = "pattern" in schema and not re.search(schema["pattern"], value)
        return odd or len(value) > schema.get("maxLength", len(value))
    if isinstance(value, list):
        return len(value) < schema.get("minItems", 0)
    if isinstance(value, int):
        return not schema.get("minimum", value) <= value <= schema.get("maximum", value)
    return False


def test_docker_run_gives_what_compose_gives() -> None:
    """Given both forms of one rank, then image, argv, user, rights, mounts, labels and restart are the same."""
    made = plan(*TWO, key=True)
    for rank in made.ranks:
        service = yaml.safe_load(render.compose(made, rank.node))["services"][rank.service]
        argv = elsewhere.docker_run(made, rank)
        at = argv.index(made.image)
        assert argv[at + 1 :] == [*service["entrypoint"][1:], *service["command"]]
        assert argv[argv.index("--entrypoint") + 1] == service["entrypoint"][0]
        given = set(pairwise(argv))
        assert {("--user", service["user"]), ("--cap-drop", "ALL"), ("--restart", service["restart"])} <= given
        assert {("--security-opt", one) for one in service["security_opt"]} <= given
        assert {("--label", f"{key}={value}") for key, value in service["labels"].items()} <= given
        mounts = [word for flag, word in given if flag == "--mount"]
        assert len(mounts) == len(service["volumes"])
        assert all(any(f"target={one['target']}" in word for word in mounts) for one in service["volumes"])
        assert "--read-only" in argv and "--init" in argv and ("--network", "host") in given


def test_the_scripts_lines_are_what_a_shell_reads(tmp_path: Path) -> None:
    made = plan(*HERE)
    script = elsewhere.docker_files(made)["local/run.sh"]
    for shell in ("sh", "bash"):
        assert subprocess.run([shell, "-n"], input=script, text=True, capture_output=True).returncode == 0
    lines = [shlex.split(line) for line in script.splitlines() if line.startswith("docker run")]
    assert lines == [elsewhere.docker_run(made, rank) for rank in made.ranks]
    assert shlex.join(["docker", "network", "create", made.project]) in script
    assert not any("secret" in line and "readonly" not in line for line in script.splitlines() if "--mount" in line)


RECORDER = """#!/bin/sh
# Stands for docker: one line for each word that it was given, and `--` after each call.
for word; do printf '%s\\n' "$word"; done >> "$RECORD"
echo -- >> "$RECORD"
case "$*" in *--env-file*) test -f "$(echo "$*" | sed 's/.*--env-file \\([^ ]*\\) .*/\\1/')" ;; esac
"""


@pytest.mark.parametrize("nodes", [TWO, HERE], ids=["two nodes", "one engine"])
def test_the_script_runs_from_anywhere_and_calls_docker_with_the_argv_of_compose(
    nodes: tuple[NodeFacts, ...], tmp_path: Path
) -> None:
    made = plan(*nodes)
    for path in render.write_files(elsewhere.docker_files(made), tmp_path / "out"):
        if path.name != "run.sh":
            continue
        record, tools = tmp_path / f"{path.parent.name}.txt", tmp_path / "bin"
        tools.mkdir(exist_ok=True)
        (tools / "docker").write_text(RECORDER)
        (tools / "docker").chmod(0o755)
        # when an operator runs it from another folder
        environment = {"PATH": f"{tools}:/usr/bin:/bin", "RECORD": str(record)}
        done = subprocess.run(["sh", path], cwd="/", env=environment, capture_output=True, text=True)
        # then docker gets the words that are planned, and the env files are where it looks for them
        assert done.returncode == 0, done.stderr
        node = path.parent.name
        wanted = [["docker", "network", "create", made.project]] if made.bridge else []
        wanted += [elsewhere.docker_run(made, rank) for rank in made.on(node)]
        assert record.read_text() == "".join("\n".join([*argv[1:], "--", ""]) for argv in wanted)


def test_the_env_file_is_what_docker_run_reads() -> None:
    """Given values with blanks, quotes and braces, then each line is the name, `=`, and the value as it is."""
    odd = {"A": 'two "words" $x', "B": "it's", "C": '{"a": [1]}', "D": ""}
    made = plan(*TWO, sets=(f"serve.env={json.dumps(odd)}",))
    for rank in made.ranks:
        lines = elsewhere.docker_files(made)[f"{rank.node}/{rank.service}.env"].splitlines()
        assert dict(line.split("=", 1) for line in lines) == rank.env
    with pytest.raises(KitError, match="line break"):
        elsewhere.env_file({"A": "one\ntwo"})


def test_a_mount_with_commas_is_quoted() -> None:
    assert elsewhere.mount("bind", "/a,b", "/c", read_only=True)[1] == 'type=bind,"source=/a,b",target=/c,readonly'


def test_the_manifest_holds_against_the_schema_and_places_ranks_by_the_pods_index() -> None:
    made = plan(*TWO, key=True)
    manifest = elsewhere.leader_worker_set(made, "registry.example/exl3kit:1", "model")
    assert check(manifest, SCHEMA) == []
    group = manifest["spec"]["leaderWorkerTemplate"]
    assert group["size"] == 2 and group["restartPolicy"] == "RecreateGroupOnPodRestart"
    for name, template in (("leader", group["leaderTemplate"]), ("worker", group["workerTemplate"])):
        container = template["spec"]["containers"][0]
        args = container["args"]
        assert args[args.index("--node-rank") + 1] == "$(LWS_WORKER_INDEX)"
        assert args[args.index("--master-addr") + 1] == "$(LWS_LEADER_ADDRESS)"
        assert ("--headless" in args) == (name == "worker")
        names = [one["name"] for one in container["env"]]
        assert len(names) == len(set(names))
        peers = next(one["value"] for one in container["env"] if one["name"] == "EXL3_PEERS")
        assert peers.split(",")[1].startswith("demo-tp2-0-1.demo-tp2:")
        assert not any("10.0.0." in json.dumps(one) for one in (container["env"], args))
    assert "secretName" in json.dumps(manifest) and "ports" in group["leaderTemplate"]["spec"]["containers"][0]


FAULTS: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda lws: lws["spec"]["leaderWorkerTemplate"].update(restartPolicy="Sometimes"), "Sometimes"),
    (lambda lws: container_of(lws).update(volumeMount=[]), "unknown volumeMount"),
    (lambda lws: container_of(lws).pop("image"), "no image"),
    (lambda lws: container_of(lws)["env"].append({"name": "A-B", "value": "x"}), "A-B"),
    (lambda lws: container_of(lws)["env"].append({"name": "A", "value": 1}), "1 is no string"),
    (lambda lws: lws["spec"].update(replicas=True), "True is no integer"),
    (lambda lws: lws["metadata"].update(name="Demo"), "Demo"),
    (lambda lws: lws["spec"]["leaderWorkerTemplate"].pop("workerTemplate"), "no workerTemplate"),
]


def container_of(lws: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = lws["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][0]
    return found


@pytest.mark.parametrize(("spoil", "says"), FAULTS, ids=[says for _, says in FAULTS])
def test_the_check_finds_faults(spoil: Callable[[dict[str, Any]], object], says: str) -> None:
    manifest = json.loads(json.dumps(elsewhere.leader_worker_set(plan(*TWO), "a/b:1", "model")))
    spoil(manifest)
    assert [says in one for one in check(manifest, SCHEMA)] == [True]


def many() -> Iterator[tuple[str, dict[str, Any]]]:
    """Manifests of every shipped recipe of two nodes, GPU ones on played Sparks among them."""
    sparks = [replace(node_facts(Spark(number=n)), name=f"spark{n}") for n in (1, 2)]
    for ref in [path.stem for path in recipes.shipped()]:
        recipe = recipes.load(ref)
        nodes = sparks if recipe.fabric.require == "rdma" else list(TWO)
        yield ref, elsewhere.leader_worker_set(plan(*nodes[: recipe.parallel.nodes], ref=ref), "a/b:1", "model")


@pytest.mark.parametrize(("sets", "gpus"), [((), "1"), (("parallel.tensor=8", "parallel.pipeline=2"), "8")])
def test_a_pod_asks_for_a_gpu_for_each_of_its_ranks(sets: tuple[str, ...], gpus: str) -> None:
    manifest = elsewhere.leader_worker_set(
        plan(*TWO, ref="llama-3.3-70b-2x-spark", sets=("fabric.require=any", *sets)), "a/b:1", "m"
    )
    assert container_of(manifest)["resources"] == {"limits": {"nvidia.com/gpu": gpus}}


def test_manifests_of_all_shipped_recipes_hold() -> None:
    assert {ref: faults for ref, manifest in many() if (faults := check(manifest, SCHEMA))} == {}


CLIENT = "kubernetes==37.0.2"  # whose models refuse what they do not know, and other types
BY_THE_CLIENT = """
import json, sys
from kubernetes.client import V1PodTemplateSpec
for template in json.load(sys.stdin):
    V1PodTemplateSpec.model_validate_json(json.dumps(template))
try:
    V1PodTemplateSpec.model_validate_json('{"spec": {"containers": [{"name": "a", "volumeMount": []}]}}')
except ValueError:
    print("checked")
"""


@pytest.mark.full
def test_the_pods_hold_by_the_models_of_kubernetes_own_client(tmp_path: Path) -> None:
    """Given the client of Kubernetes from PyPI, then it takes every pod of every shipped recipe."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "client"], check=True)
    python = tmp_path / "client" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--only-binary", ":all:", CLIENT], check=True)
    groups = [manifest["spec"]["leaderWorkerTemplate"] for _, manifest in many()]
    templates = [one[key] for one in groups for key in ("leaderTemplate", "workerTemplate")]
    done = subprocess.run([python, "-c", BY_THE_CLIENT], input=json.dumps(templates), text=True, capture_output=True)
    assert done.stdout == "checked\n", done.stderr[-2000:]


def test_ranks_of_one_engine_are_no_pods() -> None:
    with pytest.raises(KitError, match="own pod"):
        elsewhere.leader_worker_set(plan(*HERE), "a/b:1", "model")
