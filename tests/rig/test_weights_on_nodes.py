"""Weights on two hosts: fetched from a hub, linked, copied over the fabric, verified, and repaired after a cut."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit_verbs import kit, kit_argv, told
from rig_hosts import REPOSITORY, Rig, call
from rig_lib.plan import GATEWAY

sys.path.append(str(REPOSITORY / "tests" / "vllm"))
from hub_stand_in import COMMIT, Hub, serving

NODES = "node1,node2"
MODEL = REPOSITORY / "models" / "demo-dense"
SECRET = "hf_" + "s" * 34


@pytest.fixture(scope="module")
def ready(rig: Rig) -> Rig:
    """The rig with the demo image on both hosts."""
    done = kit(rig, "build", "demo-tp2", "--nodes", NODES, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return rig


@pytest.fixture(autouse=True)
def no_copies(ready: Rig) -> Iterator[None]:
    """Hosts without weights before and after each test."""

    def clear() -> None:
        for node in ("node1", "node2"):
            ready.exec(node, "rm", "-rf", "/root/.cache/exl3kit/weights", "/root/.cache/huggingface")

    clear()
    yield
    clear()


def recipe_of(folder: Path, model: str) -> Path:
    """A recipe like demo-tp2 with other weights."""
    path = folder / "other.yaml"
    path.write_text(f"recipe: 1\nextends: demo-tp2\nname: other\nmodel: {model}\n")
    return path


def large(folder: Path, megabytes: int) -> Path:
    """The demo model with a file beside it that takes a while to copy."""
    shutil.copytree(MODEL, folder / "large")
    (folder / "large" / "noise.bin").write_bytes(os.urandom(megabytes * 1_000_000))
    return folder / "large"


def folder_on(rig: Rig, node: str, done: dict[str, Any]) -> Path:
    """A host's copy, as this machine sees it."""
    return Path(rig.node(node)["disk"]) / "upper" / str(done["nodes"][node]["folder"]).lstrip("/")


def cached_bytes(path: Path) -> int:
    """Bytes of a file that are in the page cache."""
    said = json.loads(call("fincore", "--json", "--bytes", path).stdout)
    return int(said["fincore"][0]["res"])


def test_case_24_weights_of_this_machine_reach_both_hosts_and_the_second_over_the_fabric(ready: Rig) -> None:
    # when
    done = told(kit(ready, "weights", "sync", "demo-tp2", "--nodes", NODES, "--json"))
    # then the second copy came from the first host
    words = {name: one["done"] for name, one in done["nodes"].items()}
    assert words == {"node1": "copied", "node2": "copied from node1 over the fabric"}
    for node in ("node1", "node2"):
        for path in MODEL.iterdir():
            if path.is_file():
                assert (folder_on(ready, node, done) / path.name).read_bytes() == path.read_bytes()
    # and nothing of the copy is left: no daemon, no password
    for node in ("node1", "node2"):
        assert "rsync" not in ready.exec(node, "ps", "-eo", "comm").stdout
        assert ready.exec(node, "sh", "-c", "ls -d /tmp/tmp.* 2>/dev/null", check=False).stdout == ""
    # and again there is nothing to do
    again = told(kit(ready, "weights", "sync", "demo-tp2", "--nodes", NODES, "--json"))
    assert {one["done"] for one in again["nodes"].values()} == {"there already"}


def test_case_21_the_page_cache_of_the_copies_is_dropped(ready: Rig, tmp_path: Path) -> None:
    if shutil.which("fincore") is None:
        pytest.skip("this machine has no fincore to look at the page cache with")
    recipe = recipe_of(tmp_path, f"{{path: {large(tmp_path, 40)}, served_name: demo}}")
    done = told(kit(ready, "weights", "sync", recipe, "--nodes", NODES, "--json"))
    copies = {node: folder_on(ready, node, done) / "noise.bin" for node in ("node1", "node2")}
    assert {node: cached_bytes(path) for node, path in copies.items()} == {"node1": 0, "node2": 0}


@pytest.mark.full
def test_case_24_a_link_cut_in_the_middle_of_a_copy_ends_soon_and_the_next_one_goes_on(
    ready: Rig, tmp_path: Path
) -> None:
    # given 60 MB, of which node1 has a copy, and a cable that lets 5 MB a second through
    recipe = recipe_of(tmp_path, f"{{path: {large(tmp_path, 60)}, served_name: demo}}")
    done = told(kit(ready, "weights", "sync", recipe, "--nodes", "node1", "--json"))
    ready.link("node2", "slow", "--mbit", "40")
    folder = str(done["nodes"]["node1"]["folder"]).lstrip("/")  # and no other: earlier tests left theirs
    partial = Path(ready.node("node2")["disk"]) / "upper" / f"{folder}.partial" / "noise.bin"
    argv = kit_argv("weights", "sync", recipe, "--nodes", NODES)
    running = subprocess.Popen(argv, env=ready.env, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not partial.exists() or partial.stat().st_size < 10_000_000:
            assert running.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        # when
        ready.link("node2", "down")
        begun = time.monotonic()
        _, said = running.communicate(timeout=60)
        seconds = time.monotonic() - begun
    finally:
        ready.link("node2", "up")
    # then
    assert running.returncode == 6 and "node2" in said and seconds < 15, (running.returncode, seconds, said)
    assert partial.stat().st_size >= 10_000_000
    done = told(kit(ready, "weights", "sync", recipe, "--nodes", NODES, "--json"))
    assert done["nodes"]["node2"]["done"] == "copied from node1 over the fabric"
    assert (folder_on(ready, "node2", done) / "noise.bin").read_bytes() == (tmp_path / "large/noise.bin").read_bytes()


DAMAGE = """
truncate -s -1000 model.safetensors
ln -sf ../../blobs/0123 tokenizer.json
rm generation_config.json
echo >> tokenizer_config.json
"""


def test_case_23_damage_on_one_rank_is_found_in_seconds_and_named(ready: Rig) -> None:
    """Given a copy with a cut shard, a dangling link, a missing file and another content, then each is named."""
    done = told(kit(ready, "weights", "sync", "demo-tp2", "--nodes", NODES, "--json"))
    ready.exec("node2", "sh", "-ec", f"cd {done['nodes']['node2']['folder']}\n{DAMAGE}")
    begun = time.monotonic()
    found = kit(ready, "weights", "verify", "demo-tp2", "--nodes", NODES, "--json")
    assert time.monotonic() - begun < 60  # 5 s on an idle machine
    held = {one["where"]: one for one in told(found, 5)["held"]}
    assert {where: one["state"] for where, one in held.items()} == {
        "this machine": "whole", "node node1": "whole", "node node2": "differs",
    }  # fmt: skip
    problems = "\n".join(held["node node2"]["problems"])
    for said in (
        "model.safetensors is cut off",
        "tokenizer.json is a link to nothing",
        "generation_config.json is missing, and is there on this machine",
        "tokenizer_config.json has other content than on this machine",
    ):
        assert said in problems
    # and up refuses it before any rank starts
    refused = kit(ready, "up", "demo-tp2", "--nodes", NODES)
    assert refused.returncode == 3 and "model.safetensors is cut off" in refused.stderr


def test_weights_that_one_host_lacks_are_missing_and_no_failure_of_the_other(ready: Rig) -> None:
    told(kit(ready, "weights", "sync", "demo-tp2", "--nodes", "node1", "--json"))
    found = told(kit(ready, "weights", "verify", "demo-tp2", "--nodes", NODES, "--json"), 3)
    assert [one["state"] for one in found["held"]] == ["whole", "whole", "missing"]


def test_fetched_on_one_host_with_a_token_then_linked_there_and_copied_to_the_other(ready: Rig, tmp_path: Path) -> None:
    """Given a gated repository, then only the token opens it, and it is nowhere to be seen but in the request."""
    files = {path.name: path.read_bytes() for path in MODEL.iterdir() if path.suffix in (".json", ".safetensors")}
    recipe = recipe_of(tmp_path, f"{{repo: a/b, revision: '{COMMIT}', path: null, served_name: demo}}")
    (tmp_path / "token").write_text(SECRET + "\n")
    environment = {"HF_HUB_CACHE": str(tmp_path / "none"), "HF_TOKEN_PATH": str(tmp_path / "no-login")}
    with serving(Hub("a/b", files, token=SECRET), GATEWAY) as hub:
        env = ready.env | environment | {"HF_ENDPOINT": hub.url}
        env.pop("HF_TOKEN", None)

        def run(*words: str | Path, code: int = 0) -> str:
            done = subprocess.run(kit_argv("weights", *words), env=env, cwd=REPOSITORY, capture_output=True, text=True,
                                  timeout=120)  # fmt: skip
            assert done.returncode == code, done.stdout + done.stderr
            assert SECRET not in done.stdout + done.stderr
            return done.stdout if "--json" in words else done.stderr

        # when no token is given
        assert "a/b is gated, and no token was given" in run("fetch", recipe, "--nodes", "node1", code=3)
        # when it is
        with watched_containers(ready, "node1") as seen:
            fetched = json.loads(run("fetch", recipe, "--nodes", "node1", "--token-file", tmp_path / "token", "--json"))
    # then
    assert fetched["state"] == "whole" and fetched["folder"].endswith(f"models--a--b/snapshots/{COMMIT}")
    assert seen and SECRET not in "".join(seen)
    full = json.loads(run("verify", recipe, "--nodes", "node1", "--full-hash", "--json"))
    assert [(one["where"], one["state"]) for one in full["held"]] == [("node node1", "whole")]
    # and the other host gets it from there, without this machine having it
    done = json.loads(run("sync", recipe, "--nodes", NODES, "--json"))
    words = {name: one["done"] for name, one in done["nodes"].items()}
    assert words == {"node1": "linked", "node2": "copied from node1 over the fabric"}
    copy = folder_on(ready, "node1", done) / "model.safetensors"
    assert copy.stat().st_nlink == 2, "a hard link costs no space"
    assert (folder_on(ready, "node2", done) / "model.safetensors").read_bytes() == files["model.safetensors"]


class watched_containers:
    """What `docker inspect` shows of every container that stands on a host meanwhile."""

    def __init__(self, rig: Rig, node: str) -> None:
        self._rig, self._node, self._seen = rig, node, list[str]()

    def __enter__(self) -> list[str]:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self._seen

    def _watch(self) -> None:
        while not self._ended.wait(0.05):
            names = self._rig.docker(self._node, "ps", "-aq", check=False).stdout.split()
            if names:
                shown = self._rig.docker(self._node, "inspect", *names, check=False).stdout
                logs = self._rig.docker(self._node, "logs", names[0], check=False)
                self._seen.append(shown + logs.stdout + logs.stderr)

    def __exit__(self, *failure: object) -> None:
        self._ended.set()
        self._thread.join()


@pytest.mark.full
def test_case_24_up_without_rsync_on_a_host_copies_through_this_machine(ready: Rig, tmp_path: Path) -> None:
    """Given weights that only node1 has, and no rsync on node2, then they come all the same, and it is said how."""
    there = "/root/elsewhere/demo"
    inside = Path(ready.node("node1")["disk"]) / "upper" / there.lstrip("/")
    shutil.copytree(MODEL, inside)
    recipe = recipe_of(tmp_path, f"{{path: {there}, served_name: demo}}")
    ready.exec("node2", "mv", "/usr/bin/rsync", "/usr/bin/rsync.away")
    try:
        done = told(kit(ready, "weights", "sync", recipe, "--nodes", NODES, "--json"))
    finally:
        ready.exec("node2", "mv", "/usr/bin/rsync.away", "/usr/bin/rsync")
        shutil.rmtree(inside.parent)
    assert re.match("copied from node1 through this machine", done["nodes"]["node2"]["done"])
    assert (folder_on(ready, "node2", done) / "model.safetensors").read_bytes() == (
        MODEL / "model.safetensors"
    ).read_bytes()
