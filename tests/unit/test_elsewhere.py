"""A deployment for other tools: the same argv, environment and rights as its compose file; a manifest that holds."""

from __future__ import annotations

import json
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_render import HERE, TWO, plan

from exl3kit import elsewhere, render
from exl3kit.errors import KitError

SCHEMA: dict[str, Any] = json.loads((Path(__file__).parent / "leader_worker_set.schema.json").read_text())


def check(value: Any, schema: dict[str, Any], where: str = "$") -> list[str]:
    """What is wrong with a value by the few words of JSON Schema that the file uses."""
    if "$ref" in schema:
        return check(value, SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]], where)
    if "enum" in schema:
        return [] if value in schema["enum"] else [f"{where}: {value!r}"]
    kinds: dict[str, type] = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
    kind = schema.get("type")
    if kind and (not isinstance(value, kinds[kind]) or (kind == "integer" and isinstance(value, bool))):
        return [f"{where}: {value!r} is no {kind}"]
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
    assert subprocess.run(["sh", "-n"], input=script, text=True, capture_output=True).returncode == 0
    lines = [shlex.split(line) for line in script.splitlines() if line.startswith("docker run")]
    assert lines == [elsewhere.docker_run(made, rank) for rank in made.ranks]
    assert shlex.join(["docker", "network", "create", made.project]) in script
    assert not any("secret" in line and "readonly" not in line for line in script.splitlines() if "--mount" in line)


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


def test_the_check_finds_faults() -> None:
    manifest = elsewhere.leader_worker_set(plan(*TWO), "a/b:1", "model")
    manifest["spec"]["leaderWorkerTemplate"]["restartPolicy"] = "Sometimes"
    manifest["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][0]["volumeMount"] = []
    assert len(check(manifest, SCHEMA)) == 2


def test_ranks_of_one_engine_are_no_pods() -> None:
    with pytest.raises(KitError, match="own pod"):
        elsewhere.leader_worker_set(plan(*HERE), "a/b:1", "model")
