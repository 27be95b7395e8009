"""Building on a real engine over ssh, with both builders, and bringing an image from engine to engine."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rig_hosts import REPOSITORY, Completed, Rig, call

from exl3kit import builders, built_image, context, nodes, pins, recipes, transfer
from exl3kit import image as images
from exl3kit import lock as locks
from exl3kit.errors import ExitCode, KitError
from exl3kit.progress import Progress

STAMP = "5" * 64
NO_OP_SECONDS = 2.0
OVERLAY_SECONDS = 60.0  # a change of Python in the overlay, nearly all of it the self-check


@pytest.fixture(autouse=True)
def operator(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """This process sees the rig as an operator does."""
    for name in ("EXL3KIT_SSH_CONFIG", "DOCKER_CONFIG", "PATH"):
        monkeypatch.setenv(name, rig.env[name])
    return rig


@pytest.fixture(params=["buildx", "classic"])
def builder(request: pytest.FixtureRequest, operator: Rig, monkeypatch: pytest.MonkeyPatch) -> str:
    """Either builder; without a docker program there is only the classic one."""
    if request.param == "classic":
        monkeypatch.setenv(builders.DOCKER_VARIABLE, "/bin/false")
    assert builders.buildkit() == (None if request.param == "classic" else "buildx")
    return str(request.param)


@pytest.fixture
def node1(operator: Rig, tiny_image: str) -> Iterator[nodes.Node]:
    with nodes.open_nodes("node1") as (node,):
        yield node


def reporter() -> Progress:
    return Progress(Console(file=io.StringIO(), width=200))


def request_of(tag: str, run: str, labels: dict[str, str], base: str = "exl3kit-test-tiny:1") -> builders.Request:
    dockerfile = f"ARG BASE\nFROM ${{BASE}}\nCOPY some/file /file\n{run}\n"
    entries = [context.Entry("Dockerfile", dockerfile.encode()), context.Entry("some/file", b"content", None, True)]
    return builders.Request(tag, {"BASE": base}, labels, entries)


def build(node: nodes.Node, request: builders.Request, progress: Progress | None = None) -> None:
    progress = progress or reporter()
    with progress.stage("image") as stage:
        builders.build(request, node, stage, progress)


def removed(node: nodes.Node, *tags: str) -> None:
    for tag in tags:
        for image in node.engine.images.list(name=tag):
            node.engine.images.remove(image.id, force=True)


# ---- builders --------------------------------------------------------------------------------------------------------


def test_a_build_has_no_network_and_carries_large_labels(node1: nodes.Node, builder: str) -> None:
    # given a label as large as a lock
    lock, tag = "x" * 60_000, f"exl3kit-test-{builder}:1"
    progress = reporter()
    # when
    build(node1, request_of(tag, "RUN cat /proc/net/dev > /devices && sleep 1", {"l": lock, "m": "a b=c"}), progress)
    # then
    image = node1.engine.images.get(tag)
    said = node1.engine.containers.run(tag, ["cat", "/file", "/devices"], remove=True, network_mode="none").decode()
    removed(node1, tag)
    assert image.labels["l"] == lock and image.labels["m"] == "a b=c"
    assert said.startswith("content") and " lo:" in said and "eth0" not in said
    steps = [t.name.partition("RUN")[1:] for t in progress.timings if t.depth == 1]
    assert ("RUN", " cat /proc/net/dev > /devices && sleep 1") in steps


def test_a_failing_step_is_named_with_its_words_and_leaves_nothing(node1: nodes.Node, builder: str) -> None:
    # given
    before = {image.id for image in node1.engine.images.list(all=True)} if builder == "buildx" else set()
    tag, progress = f"exl3kit-test-{builder}:2", reporter()
    # when
    with pytest.raises(KitError, match="the build failed in") as refused:
        build(node1, request_of(tag, "RUN echo because && false", {}), progress)
    # then
    assert refused.value.code == ExitCode.BUILD and "RUN echo because && false" in refused.value.what
    assert "node1" in str(refused.value.where)
    log = Path(str(refused.value.next_step).removeprefix("read "))
    assert "because" in log.read_text()
    assert not node1.engine.images.list(name=tag)
    assert not node1.engine.containers.list(all=True, filters={"ancestor": "exl3kit-test-tiny:1"})
    if builder == "buildx":
        assert {image.id for image in node1.engine.images.list(all=True)} == before


INTERRUPTED = """
import sys
from test_image import build, request_of
from exl3kit import nodes
with nodes.open_nodes("node1") as (node,):
    print("open", flush=True)
    build(node, request_of(sys.argv[1], "RUN sleep 97", {}))
"""


def test_ctrl_c_ends_the_build_on_the_node_too(rig: Rig, node1: nodes.Node, builder: str) -> None:
    # given a build that is in the middle of a step
    tag = f"exl3kit-test-{builder}:3"
    paths = os.pathsep.join(str(REPOSITORY / folder) for folder in (".", "tests/rig", "scripts"))
    kit = subprocess.Popen([sys.executable, "-c", INTERRUPTED, tag], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                           env={**os.environ, "PYTHONPATH": paths}, text=True)  # fmt: skip
    assert kit.stdout is not None and kit.stdout.readline() == "open\n"
    _wait(lambda: _sleeps(rig), seconds=20)
    # when
    kit.send_signal(signal.SIGINT)
    kit.wait(timeout=15)
    kit.stdout.close()
    # then
    _wait(lambda: not _sleeps(rig), seconds=15)
    assert not node1.engine.images.list(name=tag)


def _sleeps(rig: Rig) -> bool:
    return rig.exec("node1", "pgrep", "-f", "sleep 97", check=False).returncode == 0


def _wait(condition: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.2)


# ---- transfer --------------------------------------------------------------------------------------------------------


@pytest.fixture
def stamped(node1: nodes.Node) -> Iterator[built_image.BuiltImage]:
    """A small image of the kit on node1 only."""
    tag = f"exl3kit:{STAMP[:12]}"
    build(node1, request_of(tag, "RUN echo more > /more", {built_image.STAMP: STAMP}))
    found = built_image.find(node1, STAMP)
    assert found is not None and found.tag == tag
    yield found
    removed(node1, tag)


def test_an_image_arrives_whole_and_under_its_tag(stamped: built_image.BuiltImage) -> None:
    with nodes.open_nodes("node1,node2") as (source, target):
        assert built_image.find(target, STAMP) is None
        # when
        progress = reporter()
        transfer.spread(source, [target], stamped, progress=progress)
        # then
        arrived = built_image.find(target, STAMP)
        assert arrived is not None and arrived.same_content(stamped)
        assert [t.name for t in progress.timings] == ["image to node2"]
        assert target.engine.containers.run(stamped.tag, ["cat", "/file", "/more"], remove=True) == b"contentmore\n"
        removed(target, stamped.tag)


def test_layers_that_are_there_are_not_sent_again(node1: nodes.Node) -> None:
    # given a new image of 30 MB, and one more layer on top of it
    noise = f"RUN /bin/busybox head -c 30000000 /dev/urandom > /noise && echo {os.urandom(8).hex()}"
    tags = [f"exl3kit:{digit * 12}" for digit in "78"]
    build(node1, request_of(tags[0], noise, {built_image.STAMP: "7" * 64}))
    build(node1, request_of(tags[1], "RUN echo top > /top", {built_image.STAMP: "8" * 64}, base=tags[0]))
    with nodes.open_nodes("node1,node2") as (source, target):
        progress = reporter()
        try:
            for digit in "78":
                built = built_image.find(source, digit * 64)
                assert built is not None
                # when
                transfer.spread(source, [target], built, progress=progress)
            said = target.engine.containers.run(tags[1], ["cat", "/top"], remove=True, network_mode="none")
        finally:
            for node in (source, target):
                removed(node, *reversed(tags))
    # then
    first, second = (timing.outcome for timing in progress.timings)
    assert "30 MB" in first and "kB" in second
    assert said == b"top\n"


def test_case_10_no_room_is_refused_before_anything_is_sent(
    stamped: built_image.BuiltImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given an engine that needs a thousand terabytes for it
    monkeypatch.setattr(transfer, "ROOM_PER_BYTE", 1e15)  # for the few bytes of its topmost layer
    with nodes.open_nodes("node1,node2") as (source, target):
        with pytest.raises(KitError, match="GB are missing") as refused:
            transfer.spread(source, [target], stamped, progress=reporter())
        assert refused.value.code == ExitCode.PREFLIGHT and refused.value.where == "node node2"
        assert built_image.find(target, STAMP) is None


def test_case_4_another_image_under_the_same_stamp_is_not_taken_for_it(stamped: built_image.BuiltImage) -> None:
    # given node2 with an image that has the stamp and other layers
    with nodes.open_nodes("node1,node2") as (source, target):
        build(target, request_of(stamped.tag, "RUN echo other > /more", {built_image.STAMP: STAMP}))
        other = built_image.find(target, STAMP)
        assert other is not None and not other.same_content(stamped)
        # when
        transfer.spread(source, [target], stamped, progress=reporter())
        # then
        there = built_image.find(target, STAMP)
        assert there is not None and there.same_content(stamped)
        for image in target.engine.images.list(filters={"label": f"{built_image.STAMP}={STAMP}"}):
            target.engine.images.remove(image.id, force=True)


def test_a_cable_pulled_while_copying_is_one_sentence_and_leaves_no_image(rig: Rig, node1: nodes.Node) -> None:
    # given an image large enough to be cut on a slow link
    tag = f"exl3kit:{STAMP[:12]}"
    run = "RUN head -c 60000000 /dev/urandom > /noise"
    build(node1, request_of(tag, run.replace("head", "/bin/busybox head"), {built_image.STAMP: STAMP}))
    found = built_image.find(node1, STAMP)
    assert found is not None
    rig.link("node2", "slow", "--mbit", "40")
    cut = threading.Timer(4, rig.link, ("node2", "down"))
    try:
        with nodes.open_nodes("node1,node2") as (source, target):
            cut.start()
            # when
            with pytest.raises(KitError, match="broke off") as refused:
                transfer.spread(source, [target], found, progress=reporter())
    finally:
        cut.join()
        rig.link("node2", "up")
    # then
    assert refused.value.where == "node node2" and refused.value.code == ExitCode.UNREACHABLE
    with nodes.open_nodes("node2") as (target,):
        assert built_image.find(target, STAMP) is None
    removed(node1, tag)


# ---- the demo's image ------------------------------------------------------------------------------------------------


def kit(rig: Rig, *argv: str, cwd: Path = REPOSITORY, timeout: float = 900) -> Completed:
    return call(sys.executable, "-m", "exl3kit.cli", *argv, check=False, timeout=timeout, env=rig.env, cwd=cwd)


def told(done: Completed, code: int = 0) -> dict[str, Any]:
    assert done.returncode == code, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def tree(rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the kit builds from, to change."""
    copy = tmp_path_factory.mktemp("tree") / "kit"
    copy.mkdir()
    for name in ("Dockerfile", "exl3kit", "overlay", "locks", "recipes", "models"):
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__", "build"))
        else:
            shutil.copy(source, copy / name)
    return copy


@pytest.fixture(scope="module")
def built(rig: Rig, tree: Path) -> dict[str, Any]:
    """The demo's image on node1, as `kit build --json` tells it."""
    return told(kit(rig, "build", "demo", "--nodes", "node1", "--json", cwd=tree))


def test_the_demo_image_is_labelled_runs_as_nobody_and_imports(rig: Rig, built: dict[str, Any]) -> None:
    with nodes.open_nodes("node1") as (node,):
        image = node.engine.images.get(built["tag"])
        probe = (
            "import os, exl3_vllm, torch; print(os.getuid(), torch.__version__, os.environ['TORCH_COMPILE_DISABLE'])"
        )
        said = node.engine.containers.run(
            built["tag"],
            ["-c", probe],
            entrypoint="python",
            remove=True,
            network_mode="none",
            read_only=True,
            tmpfs={"/tmp": ""},
        ).decode()
    assert image.labels["io.exl3kit.stamp"] == built["stamp"] and built["tag"] == f"exl3kit:{built['stamp'][:12]}"
    assert image.attrs["Config"]["Entrypoint"] == ["python", "-m", "exl3_vllm.rank"]
    assert said.split() == ["10001", "2.13.0+cpu", "1"]
    assert "exl3kit:demo" in image.tags
    assert image.attrs["Size"] < 2_300_000_000


def test_nothing_to_do_takes_two_seconds_also_after_a_touch(rig: Rig, built: dict[str, Any], tree: Path) -> None:
    # given another clock on an overlay file, and another mode
    file = tree / "overlay" / "exl3_vllm" / "decode.py"
    os.utime(file, (1, 1))
    file.chmod(0o600)
    # when
    again = told(kit(rig, "build", "demo", "--nodes", "node1", "--json", cwd=tree))
    # then
    assert again["stamp"] == built["stamp"] and again["layers"] == built["layers"]
    assert again["built"] is False and again["seconds"] < NO_OP_SECONDS


def test_one_byte_rebuilds_only_the_last_layers_and_is_explained(rig: Rig, built: dict[str, Any], tree: Path) -> None:
    # given one byte more in an overlay file
    file = tree / "overlay" / "exl3_vllm" / "decode.py"
    file.write_bytes(file.read_bytes() + b"\n")
    # when
    explained = kit(rig, "build", "demo", "--nodes", "node1", "--explain", cwd=tree)
    rebuilt = told(kit(rig, "build", "demo", "--nodes", "node1", "--json", cwd=tree))
    # then
    assert explained.stdout.strip() == "node1: overlay/exl3_vllm/decode.py changed"
    assert rebuilt["changes"] == ["overlay/exl3_vllm/decode.py changed"]
    assert rebuilt["stamp"] != built["stamp"] and rebuilt["built"] is True
    assert not {"environment", "kernels"} & set(rebuilt["stages"]) and rebuilt["seconds"] < OVERLAY_SECONDS
    shared = [a for a, b in zip(built["layers"], rebuilt["layers"], strict=False) if a == b]
    assert len(shared) >= 4  # base, user, wheels, requirements
    with nodes.open_nodes("node1") as (node,):
        assert "exl3kit:demo" in node.engine.images.get(rebuilt["tag"]).tags
        removed(node, rebuilt["tag"])
        node.engine.images.get(built["tag"]).tag("exl3kit", "demo")


def test_an_overlay_that_decodes_wrong_makes_no_image(rig: Rig, built: dict[str, Any], tree: Path) -> None:
    # given one wrong constant
    file = tree / "overlay" / "exl3_vllm" / "decode.py"
    text = file.read_text()
    assert "0xCBAC1FED" in text
    file.write_text(text.replace("0xCBAC1FED", "0xCBAC1FEF"))
    # when
    try:
        done = kit(rig, "build", "demo", "--nodes", "node1", "--json", cwd=tree)
    finally:
        file.write_text(text)
    # then
    error = told(done, ExitCode.BUILD)["error"]
    assert "selfcheck" in error["what"]
    assert "mcg codebook at 3 bits decodes to other weights" in done.stderr
    with nodes.open_nodes("node1") as (node,):
        assert node.engine.images.get("exl3kit:demo").labels["io.exl3kit.stamp"] == built["stamp"]


@pytest.mark.full
def test_a_build_on_a_named_node_is_made_there_and_copied_to_the_others(
    rig: Rig, built: dict[str, Any], tree: Path
) -> None:
    # given the image on node1, and room for another; when it is to be built anew on node2
    rig.docker("node1", "builder", "prune", "--all", "--force", timeout=120)
    argv = ("build", "demo", "--nodes", "node1,node2", "--on", "node2", "--no-cache", "--json")
    fields = told(kit(rig, *argv, cwd=tree))
    # then it is built there, and node1 gets that one
    assert fields["built"] is True and fields["stages"]["environment"] > 0
    assert "image to node1" in fields["stages"] and "image to node2" not in fields["stages"]
    with nodes.open_nodes("node1,node2") as both:
        here, there = (built_image.find(node, fields["stamp"]) for node in both)
    assert here is not None and there is not None and here.same_content(there)
    assert list(there.layers) == fields["layers"]
    assert "is none of the nodes" in kit(rig, "build", "demo", "--nodes", "node1", "--on", "node2", cwd=tree).stderr


@pytest.mark.full
def test_a_base_that_has_vllm_gets_the_overlay_and_nothing_else(
    rig: Rig, built: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a base whose own Python has vLLM, as a registry's image has, then its packages stay and ours come along."""
    digest = "sha256:" + "ab" * 32
    tag = f"exl3kit-base:{digest.removeprefix('sha256:')[:12]}"
    recipe = recipes.load("demo")
    pinned = pins.load(recipe.image)
    known = dataclasses.replace(pinned, base=pins.Registry("example/vllm:1", digest), wheels=())
    monkeypatch.setattr(pins, "load", lambda image, platform=None: known)
    with nodes.open_nodes("node1") as (node,):
        environment = next(
            tag for one in node.engine.images.list(filters={"label": built_image.ENVIRONMENT}) for tag in one.tags
            if tag.startswith("exl3kit-env:")
        )  # fmt: skip
        moved = "RUN mkdir -p /usr/local/lib/python3.11 && mv /opt/venv/lib/python3.11/site-packages "
        moved += "/usr/local/lib/python3.11/dist-packages && rm -r /opt/venv /opt/exl3"
        entries = [context.Entry("Dockerfile", f"FROM {environment}\nUSER 0\n{moved}\n".encode())]
        progress = reporter()
        with progress.stage("base") as stage:
            builders.build(builders.Request(tag, {}, {}, entries), node, stage, progress)
        try:
            # when
            locked = locks.make_lock(recipe)
            made = images.build(recipe, locked, node, progress=progress)
            said = node.engine.containers.run(made.tag, ["-c", "import vllm, exl3_vllm; print(vllm.__file__)"],
                                              entrypoint="python", remove=True, network_mode="none")  # fmt: skip
        finally:
            for image in node.engine.images.list(filters={"label": f"{built_image.STAMP}={locked.stamp}"}):
                node.engine.images.remove(image.id, force=True)
            removed(node, tag)
    # then
    assert said.decode().strip().endswith("/vllm/__init__.py")
    assert [t.name for t in progress.timings if t.depth == 0] == ["base", "wheels", "environment", "image"]
