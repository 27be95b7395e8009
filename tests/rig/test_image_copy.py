"""An image from node to node over the fabric: what moves, what a cut leaves, what comes after it."""

from __future__ import annotations

import io
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from rig_hosts import REPOSITORY, Rig, call

from exl3kit import builders, built_image, context, fabric_copy, nodes, transfer
from exl3kit.errors import ExitCode, KitError
from exl3kit.progress import Progress

STAMPS = {name: str(number) * 64 for number, name in enumerate(("first", "second"), start=1)}
CUT_SECONDS = 15.0
TOOLBOX_MODULES = "http.server,gzip,base64,secrets,struct,importlib,hashlib,threading,random,tempfile"


@pytest.fixture(autouse=True)
def operator(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Rig:
    for name in ("EXL3KIT_SSH_CONFIG", "DOCKER_CONFIG", "PATH"):
        monkeypatch.setenv(name, rig.env[name])
    return rig


@pytest.fixture(scope="module")
def python_base(rig: Rig) -> str:
    """An image with Python on node1, and none on node2: this machine's interpreter, as the server packs it."""
    code = (
        "import sys; from exl3kit.aboard import layer_server as s; s.toolbox(sys.argv[1].split(','), sys.stdout.buffer)"
    )
    packed = subprocess.run(
        [sys.executable, "-c", code, ",".join([TOOLBOX_MODULES, *fabric_copy.layer_loader.MODULES])],
        cwd=REPOSITORY,
        capture_output=True,
        check=True,
    )
    argv = [rig.status["docker"], "--host", rig.docker_host("node1"), "import", "-", "exl3kit-test-python:1"]
    subprocess.run(argv, input=packed.stdout, check=True, capture_output=True)
    return "exl3kit-test-python:1"


@pytest.fixture
def pair(python_base: str) -> Iterator[tuple[nodes.Node, nodes.Node]]:
    with nodes.open_nodes("node1,node2") as (source, target):
        yield source, target
    with nodes.open_nodes("node1,node2") as both:
        for node in both:
            for stamp in STAMPS.values():
                for image in node.engine.images.list(filters={"label": f"{built_image.STAMP}={stamp}"}):
                    node.engine.images.remove(image.id, force=True)


def reporter() -> Progress:
    return Progress(Console(file=io.StringIO(), width=200))


def noise(megabytes: int) -> str:
    """A build step that makes a file nobody can compress."""
    code = f"import os; f = open('/noise{megabytes}', 'wb'); [f.write(os.urandom(1000000)) for _ in range({megabytes})]"
    return f'RUN ["python3", "-c", "{code}"]'


def made(node: nodes.Node, name: str, run: str, base: str = "exl3kit-test-python:1") -> built_image.BuiltImage:
    stamp = STAMPS[name]
    entries = [context.Entry("Dockerfile", f"ARG BASE\nFROM ${{BASE}}\n{run}\n".encode())]
    labels = {built_image.STAMP: stamp, built_image.ENVIRONMENT: "test"}
    request = builders.Request(f"exl3kit:{stamp[:12]}", {"BASE": base}, labels, entries)
    progress = reporter()
    with progress.stage("image") as stage:
        builders.build(request, node, stage, progress)
    found = built_image.find(node, stamp)
    assert found is not None
    return found


def received(rig: Rig, node: str) -> int:
    """Bytes that came to a node over its cable."""
    process = rig.docker_host(node).removeprefix("unix://").split("/")[2]  # /proc/PID/root/run/docker.sock
    lines = Path(f"/proc/{process}/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[0]) for line in lines if line.lstrip().startswith("eth0:"))


def sent_by_operator(rig: Rig) -> int:
    """Bytes that this machine itself sent into the rig's network; what the nodes send each other does not count."""
    for interface in json.loads(call("ip", "-json", "-stats", "address").stdout):
        if rig.status["gateway"] in [address.get("local") for address in interface["addr_info"]]:
            return int(interface["stats64"]["tx"]["bytes"])
    raise AssertionError("the rig has no gateway")


def leftovers(rig: Rig, node: nodes.Node) -> list[str]:
    """Containers, toolboxes, volumes and kept layers."""
    found = [str(one.name) for one in node.engine.containers.list(all=True, ignore_removed=True)]
    found += [tag for image in node.engine.images.list() for tag in image.tags if fabric_copy.TOOLBOX in tag]
    found += [str(volume.name) for volume in node.engine.volumes.list()]
    under_way = rig.exec(node.name, "ls", "-A", "/var/lib/docker/tmp").stdout.split()
    return found + [name for name in under_way if not name.startswith("moby-detect-")]  # an engine's own, at its start


def test_an_image_goes_from_node_to_node_and_a_new_layer_alone(rig: Rig, pair: tuple[nodes.Node, nodes.Node]) -> None:
    source, target = pair
    # given 40 MB on node1, of which node2 has nothing
    first = made(source, "first", noise(40))
    before, operator_before = received(rig, "node2"), sent_by_operator(rig)
    progress = reporter()
    # when
    transfer.spread(source, [target], first, progress=progress)
    # then it is there, nothing of it went through this machine, and nothing else is left
    moved, through_operator = received(rig, "node2") - before, sent_by_operator(rig) - operator_before
    assert first.size < moved * 1.05
    assert through_operator < 2_000_000
    assert "through this machine" not in progress.timings[-1].outcome
    assert leftovers(rig, source) == leftovers(rig, target) == []

    # given one more layer of 10 MB
    second = made(source, "second", noise(10), base=first.tag)
    before = received(rig, "node2")
    # when
    transfer.spread(source, [target], second, progress=progress)
    # then that layer is all that moves
    assert received(rig, "node2") - before < 1.1 * 10_000_000
    said = target.engine.containers.run(second.tag, ["-c", "import os; print(os.path.getsize('/noise10'))"],
                                        entrypoint="python3", remove=True, network_mode="none")  # fmt: skip
    assert said == b"10000000\n"


def test_a_cut_copy_says_so_within_seconds_and_goes_on_where_it_stopped(
    rig: Rig, pair: tuple[nodes.Node, nodes.Node]
) -> None:
    # given node2 with the first image, and a second one that takes its time on a slow link
    source, target = pair
    first = made(source, "first", noise(1))
    transfer.spread(source, [target], first, progress=reporter())
    second = made(source, "second", noise(60), base=first.tag)
    rig.link("node2", "slow", "--mbit", "30")
    cut_at: list[float] = []

    def cut_when_under_way() -> None:
        before = received(rig, "node2")
        while received(rig, "node2") < before + 20_000_000:
            time.sleep(0.1)
        rig.link("node2", "down")
        cut_at.append(time.monotonic())

    # when the cable is pulled
    with nodes.open_nodes("node1,node2") as (near, far):
        cutter = threading.Thread(target=cut_when_under_way)
        cutter.start()
        try:
            with pytest.raises(KitError, match="broke off") as refused:
                transfer.spread(near, [far], second, progress=reporter())
            seconds = time.monotonic() - cut_at[0]
        finally:
            cutter.join()
            rig.link("node2", "up")
    # then
    assert refused.value.code == ExitCode.UNREACHABLE and refused.value.where == "node node2"
    assert seconds < CUT_SECONDS
    # and the image that was there still is, and runs
    with nodes.open_nodes("node1,node2") as (near, far):
        assert built_image.find(far, STAMPS["second"]) is None
        far.engine.containers.run(first.tag, ["-c", ""], entrypoint="python3", remove=True, network_mode="none")
        # when the same command is given again
        progress = reporter()
        before = received(rig, "node2")
        transfer.spread(near, [far], second, progress=progress)
        # then it goes on where it stopped
        moved = received(rig, "node2") - before
        assert "kept from a copy that was cut" in progress.timings[-1].outcome
        assert moved < 55_000_000
        arrived = built_image.find(far, STAMPS["second"])
        assert arrived is not None and arrived.same_content(second)
        assert leftovers(rig, far) == []


@pytest.mark.full
def test_where_the_fabric_is_closed_the_image_goes_through_this_machine(
    rig: Rig, pair: tuple[nodes.Node, nodes.Node]
) -> None:
    # given a firewall between the nodes; of the second image the target has a part, and in it what the loader runs in
    source, target = pair
    first = made(source, "first", noise(5))
    second = made(source, "second", noise(6), base=first.tag)
    rig.exec("node1", "iptables", "-I", "INPUT", "-s", str(target.address), "-j", "DROP")
    progress = reporter()
    # when
    try:
        for image in (first, second):
            transfer.spread(source, [target], image, progress=progress)
    finally:
        rig.exec("node1", "iptables", "-D", "INPUT", "-s", str(target.address), "-j", "DROP")
    # then they arrive, and the way is told
    for image in (first, second):
        arrived = built_image.find(target, image.stamp)
        assert arrived is not None and arrived.same_content(image)
    assert ["through this machine" in timing.outcome for timing in progress.timings] == [True, True]


# ---- rates -----------------------------------------------------------------------------------------------------------

IN_MEMORY = "/dev/shm/image.tar"  # of a node
MANY = (
    "import os; [(os.makedirs(f'/many/{n // 200}', exist_ok=True), open(f'/many/{n // 200}/{n}', 'wb')"
    ".write(os.urandom(12000))) for n in range(20000)]"
)


def over_ssh(rig: Rig, tag: str) -> float:
    """Seconds of `docker save | docker load` as an operator does it without the kit."""
    ssh = ["ssh", "-F", rig.status["ssh_config"]]
    started = time.monotonic()
    with subprocess.Popen([*ssh, "node1", "docker", "save", tag], stdout=subprocess.PIPE) as save:
        subprocess.run([*ssh, "node2", "docker", "load"], stdin=save.stdout, check=True, capture_output=True)
    return time.monotonic() - started


def alone(rig: Rig) -> float:
    """Seconds in which node2's engine loads what it has in its own memory: no copy that uses it can be faster."""
    started = time.monotonic()
    rig.exec("node2", "sh", "-c", f"docker load --quiet < {IN_MEMORY}", timeout=300)
    return time.monotonic() - started


def medians(
    rig: Rig, pair: tuple[nodes.Node, nodes.Node], image: built_image.BuiltImage, capsys: pytest.CaptureFixture[str]
) -> dict[str, float]:
    """Seconds of each way to bring an image to node2, which has nothing of it: three each, in turn."""
    source, target = pair
    ways = {
        "kit": lambda: copied(source, target, image),
        "save | load": lambda: over_ssh(rig, image.tag),
        "load alone": lambda: alone(rig),
    }
    memory = Path(f"/proc/{rig.docker_host('node2').split('/')[4]}/root{IN_MEMORY}")
    with memory.open("wb") as file:
        subprocess.run([rig.status["docker"], "--host", rig.docker_host("node1"), "save", image.tag],
                       stdout=file, check=True)  # fmt: skip
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    try:
        for _ in range(3):
            for way, run in ways.items():
                seconds[way].append(run())
                target.engine.images.remove(image.tag, force=True)
    finally:
        memory.unlink()
    with capsys.disabled():
        print("", *(f"{way} {[round(one, 1) for one in taken]} s" for way, taken in seconds.items()), sep="\n")
    return {way: statistics.median(taken) for way, taken in seconds.items()}


def copied(source: nodes.Node, target: nodes.Node, image: built_image.BuiltImage) -> float:
    started = time.monotonic()
    transfer.spread(source, [target], image, progress=reporter())
    return time.monotonic() - started


@pytest.mark.full
def test_a_copy_of_a_large_file_is_twice_as_fast_as_save_and_load(
    rig: Rig, pair: tuple[nodes.Node, nodes.Node], capsys: pytest.CaptureFixture[str]
) -> None:
    took = medians(rig, pair, made(pair[0], "first", noise(1000)), capsys)
    assert took["save | load"] >= 2 * took["kit"]


@pytest.mark.full
def test_a_copy_of_20_000_files_is_faster_than_save_and_load_and_costs_little_beside_the_engines_load(
    rig: Rig, pair: tuple[nodes.Node, nodes.Node], capsys: pytest.CaptureFixture[str]
) -> None:
    """Of small files `docker load` alone takes more than half of the time of `docker save | docker load`."""
    took = medians(rig, pair, made(pair[0], "first", f'RUN ["python3", "-c", "{MANY}"]'), capsys)
    assert took["kit"] < took["save | load"]
    assert took["kit"] < 1.5 * took["load alone"]


@pytest.mark.full
def test_the_programs_that_copy_need_the_same_memory_for_any_size(
    rig: Rig, pair: tuple[nodes.Node, nodes.Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    # given what the loader says of its own memory at its end
    said: list[dict[str, int]] = []
    parsed = fabric_copy.parsed
    monkeypatch.setattr(fabric_copy, "parsed", lambda output: (said.append(line) or line for line in parsed(output)))
    source, target = pair
    for name, megabytes in (("first", 5), ("second", 400)):
        transfer.spread(source, [target], made(source, name, noise(megabytes)), progress=reporter())
    # then
    small, large = [line["memory_kb"] for line in said if "memory_kb" in line]
    assert large < small + 10_000 and large < 60_000
