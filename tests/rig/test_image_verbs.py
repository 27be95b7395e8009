"""`kit image status|prune`, `kit rollback`, `kit fetch` and `kit bundle` as an operator runs them on two hosts."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit_verbs import kit, kit_argv, refusal, told
from rig_hosts import REPOSITORY, Completed, Rig, call

from exl3kit import builders, built_image, context, image, lock, nodes, recipes
from exl3kit.progress import Progress

OFFLINE_SECONDS = 1800  # the whole environment; a minute on two idle cores


@pytest.fixture(autouse=True)
def operator(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Rig:
    for name in ("EXL3KIT_SSH_CONFIG", "DOCKER_CONFIG", "PATH"):
        monkeypatch.setenv(name, rig.env[name])
    return rig


def quiet() -> Progress:
    from rich.console import Console

    return Progress(Console(quiet=True))


class Generations:
    """Small images that differ from each other by one input, each with a lock and a stamp of its own."""

    def __init__(self, tiny: str) -> None:
        self._tiny = tiny
        self.data = lock.make_lock(recipes.load("demo")).data

    def make(self, node: nodes.Node, number: int) -> lock.Lock:
        made = lock.Lock({**self.data, "rates": [number]})
        labels = {built_image.STAMP: made.stamp, built_image.LOCK: made.canonical().decode()}
        entries = [
            context.Entry(
                "Dockerfile", f"FROM {self._tiny}\nRUN echo {number} {os.urandom(8).hex()} > /number\n".encode()
            )
        ]
        progress = quiet()
        with progress.stage("image") as stage:
            builders.build(builders.Request(made.tag, {}, labels, entries), node, stage, progress)
        return made

    def part(self, node: nodes.Node, tag: str) -> None:
        entries = [context.Entry("Dockerfile", f"FROM {self._tiny}\nRUN echo {os.urandom(8).hex()} > /x\n".encode())]
        progress = quiet()
        with progress.stage("part") as stage:
            builders.build(builders.Request(tag, {}, {}, entries), node, stage, progress)


@pytest.fixture
def generations(tiny_image: str) -> Iterator[Generations]:
    made = Generations(tiny_image)
    yield made
    with nodes.open_nodes("node1,node2") as both:
        for node in both:
            for one in node.engine.images.list(filters={"label": built_image.STAMP}):
                if json.loads(one.labels[built_image.LOCK])["rates"] != made.data["rates"]:
                    node.engine.images.remove(str(one.id), force=True)
            for name in ("env:old", "env:new", "kernels:old", "kernels:new"):
                for one in node.engine.images.list(name=f"exl3kit-{name}"):
                    node.engine.images.remove(str(one.id), force=True)


def images(rig: Rig, node: str) -> dict[str, dict[str, Any]]:
    """What `kit image status --json` says of a node: stamp -> image."""
    shown = told(kit(rig, "image", "status", "--nodes", "node1,node2", "--json"))
    return {one["stamp"]: one for one in shown["nodes"][node]}


def test_an_earlier_image_comes_back_on_every_node(rig: Rig, generations: Generations) -> None:
    # given a second image that took the place of a first, both only on node1
    with nodes.open_nodes("node1") as (node,):
        old, new = (generations.make(node, number) for number in (7, 8))
        for one in (old, new):
            found = built_image.find(node, one.stamp)
            assert found is not None
            image.spread(found, "walk", node, [node], progress=quiet())
    assert images(rig, "node1")[new.stamp]["recipes"] == ["walk"]
    assert images(rig, "node1")[old.stamp]["previous_of"] == ["walk"]
    assert old.stamp not in images(rig, "node2")
    # when
    back = told(kit(rig, "rollback", "walk", "--nodes", "node1,node2", "--json"))
    # then both nodes have it, under the recipe's tag
    assert back["stamp"] == old.stamp
    for name in ("node1", "node2"):
        assert images(rig, name)[old.stamp]["recipes"] == ["walk"]
    # and forth again by its stamp; the two locks are explained
    assert told(kit(rig, "rollback", "walk", "--to", new.short, "--nodes", "node1,node2", "--json"))["tag"] == new.tag
    explained = kit(rig, "build", "--explain", old.short, new.short, "--nodes", "node1")
    assert explained.stdout.strip() == "rates changed from [7] to [8]"
    assert "no image 0123456789ab" in refusal(
        kit(rig, "rollback", "walk", "--to", "0123456789ab", "--nodes", "node1"), 3
    )


def test_prune_keeps_what_is_new_used_or_needed(rig: Rig, generations: Generations) -> None:
    # given four images, the oldest of them in use
    with nodes.open_nodes("node1") as (node,):
        made = [generations.make(node, number) for number in (3, 4, 5, 6)]
        # and environments and kernels that no image is made from: the newest is what the next build starts from
        for name in ("env:old", "env:new", "kernels:old", "kernels:new"):
            generations.part(node, f"exl3kit-{name}")
        container = node.engine.containers.create(made[0].tag, ["sleep", "9"])
        try:
            # when
            would = told(kit(rig, "image", "prune", "--keep", "1", "--nodes", "node1", "--dry-run", "--json"))
            before = set(images(rig, "node1"))
            did = told(kit(rig, "image", "prune", "--keep", "1", "--nodes", "node1", "--json"))
            after = set(images(rig, "node1"))
        finally:
            container.remove()
    # then
    going = {one["tag"] for one in would["would_remove"]} & {one.tag for one in made}
    assert going == {made[1].tag, made[2].tag}
    gone = {one["tag"] for one in did["removed"]}
    assert {"exl3kit-env:old", "exl3kit-kernels:old"} <= gone
    assert not {"exl3kit-env:new", "exl3kit-kernels:new"} & gone
    assert going <= gone and would["removed"] == []
    assert {one.stamp for one in made} <= before
    assert {made[0].stamp, made[3].stamp} <= after and not {made[1].stamp, made[2].stamp} & after


def test_case_2_nodes_that_lack_the_recipes_image_are_named_and_no_build_refuses(rig: Rig, tmp_path: Path) -> None:
    # given a checkout whose overlay was changed
    for name in ("Dockerfile", "exl3kit", "overlay", "locks", "recipes", "models", "compose"):
        if (REPOSITORY / name).is_dir():
            shutil.copytree(REPOSITORY / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "build"))
        else:
            shutil.copy(REPOSITORY / name, tmp_path / name)
    (tmp_path / "overlay" / "exl3_vllm" / "new.py").write_text("# new\n")

    def changed(*argv: str) -> Completed:
        return call(*kit_argv(*argv), check=False, timeout=300, env=rig.env, cwd=tmp_path)

    # when
    fields = told(changed("image", "status", "demo", "--nodes", "node1,node2", "--json"), 5)
    said = refusal(changed("up", "demo-tp2", "--nodes", "node1,node2", "--no-build"), 3)
    # then
    lacking = {"node1": "has no image of it", "node2": "has no image of it"}
    assert fields["match"] is False and fields["differing"] == lacking
    assert "is not on every node" in said and "node2 has no image of it" in said


@pytest.mark.full
def test_case_10_a_worker_with_300_mb_is_refused_before_anything_is_copied(rig: Rig) -> None:
    # given the demo's image on node1, and an engine on node2 whose disk has 300 MB
    told(kit(rig, "build", "demo-tp2", "--nodes", "node1", "--json", timeout=OFFLINE_SECONDS))
    rig.engine("node2", "stop")
    rig.exec("node2", "mount", "-t", "tmpfs", "-o", "size=300m", "small", "/var/lib/docker")
    rig.engine("node2", "start")
    try:
        # when
        said = refusal(kit(rig, "up", "demo-tp2", "--nodes", "node1,node2"), 3)
        there = rig.docker("node2", "image", "ls", "--all", "--quiet").stdout
    finally:
        rig.engine("node2", "stop")
        rig.exec("node2", "umount", "/var/lib/docker")
        rig.engine("node2", "start")
    # then the node and the amount are named, and nothing was sent
    assert "node2" in said and re.search(r"\d\.\d+ GB are missing", said)
    assert there == ""


# ---- without a network -----------------------------------------------------------------------------------------------


@pytest.mark.full
def test_case_7_after_one_fetch_a_build_needs_no_network_at_all(rig: Rig) -> None:
    """Given a full cache, then the demo's image is built on an engine without a network by an operator without one."""
    assert rig.status["options"]["nat"] is False
    argv = [sys.executable, "-m", "exl3kit.cli"]
    subprocess.run([*argv, "fetch", "demo"], check=True, cwd=REPOSITORY, capture_output=True, timeout=OFFLINE_SECONDS)
    environment = rig.env | {"DOCKER_HOST": rig.docker_host("node1")}
    alone = ["unshare", "--net"]
    interfaces = subprocess.run([*alone, "ip", "-brief", "address"], capture_output=True, text=True, check=True).stdout
    assert [line.split()[:2] for line in interfaces.splitlines()] == [["lo", "DOWN"]]
    # when
    done = subprocess.run([*alone, *argv, "build", "demo", "--offline", "--json"], cwd=REPOSITORY, env=environment,
                          capture_output=True, text=True, timeout=OFFLINE_SECONDS)  # fmt: skip
    # then
    assert done.returncode == 0, done.stderr
    with nodes.open_nodes("node1") as (node,):
        assert built_image.find(node, json.loads(done.stdout)["stamp"]) is not None


@pytest.mark.full
def test_a_bundle_carries_image_and_sources_to_a_site_without_a_network(rig: Rig, tmp_path: Path) -> None:
    """Given the demo's image on node1, then a bundle brings it to node2 and fills an empty cache."""
    if shutil.disk_usage(tmp_path).free < 12_000_000_000:
        pytest.skip("a bundle of the demo, its spool and what is loaded need 12 GB here")
    built = told(kit(rig, "build", "demo", "--nodes", "node1", "--json", timeout=OFFLINE_SECONDS))
    file = tmp_path / "site.tar"
    saved = told(
        kit(rig, "bundle", "save", file, "demo", "--nodes", "node1", "--no-kit", "--models", "--json", timeout=900)
    )
    assert saved["images"] == [{"stamp": built["stamp"], "platform": "linux/amd64"}]
    with nodes.open_nodes("node2") as (node,):
        for one in node.engine.images.list(filters={"label": f"{built_image.STAMP}={built['stamp']}"}):
            node.engine.images.remove(str(one.id), force=True)
    # when an operator with an empty cache and no network loads it
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PIP_NO_INDEX": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "exl3kit.cli", "bundle", "load", file, "--nodes", "node2", "--models-into",
         tmp_path / "models", "--json"],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    # then
    assert done.returncode == 0, done.stderr
    with nodes.open_nodes("node1,node2") as both:
        here, there = (built_image.find(node, built["stamp"]) for node in both)
        assert here is not None and there is not None and here.same_content(there)
    assert (tmp_path / "models" / "demo-dense" / "config.json").is_file()
    # and the sources suffice for a build
    code = (
        "from exl3kit import offline, recipes, wheelhouse; from exl3kit.progress import Progress; "
        "from rich.console import Console; offline.choose(); "
        "wheelhouse.fetch(wheelhouse.of(recipes.load('demo')), Progress(Console()))"
    )
    fetched = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300
    )
    assert fetched.returncode == 0, fetched.stderr
