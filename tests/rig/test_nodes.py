"""Opening nodes over real ssh: what works, what is refused in which words, and that no ssh process is ever left."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from rig_hosts import REPOSITORY, Rig, call
from rig_lib.plan import SUBNET

from exl3kit import nodes
from exl3kit.errors import ExitCode, KitError

NAMED_SECONDS = 8.0  # within this a dead node is named
MARK = f"EXL3KIT_TEST_OF={os.getpid()}"


@pytest.fixture(autouse=True)
def operator(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """This process sees the rig as an operator does."""
    for name in ("EXL3KIT_SSH_CONFIG", "DOCKER_CONFIG", "PATH"):
        monkeypatch.setenv(name, rig.env[name])
    monkeypatch.setenv(*MARK.split("="))
    return rig


@pytest.fixture
def ssh_config(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts lines before the rig's ssh configuration (the first value of an option counts)."""

    def use(lines: str) -> None:
        file = tmp_path / "ssh_config"
        file.write_text(f"{lines}\nHost *\n{Path(rig.status['ssh_config']).read_text()}")
        monkeypatch.setenv("EXL3KIT_SSH_CONFIG", str(file))

    return use


def ssh_processes() -> set[int]:
    """ssh clients that this test or its children started, told by the environment that they inherit."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended while we looked
            ours = MARK.encode() in (process / "environ").read_bytes().split(b"\0")
            if ours and (process / "comm").read_text() == "ssh\n":
                found.add(int(process.name))
    return found


def refusal(named: str) -> KitError:
    """The refusal that opening these nodes ends in; it comes in time and leaves no ssh behind."""
    began = time.monotonic()
    with pytest.raises(KitError) as refused, nodes.open_nodes(named):
        pass
    assert time.monotonic() - began < NAMED_SECONDS
    assert ssh_processes() == set()
    assert refused.value.code == ExitCode.UNREACHABLE
    return refused.value


def test_two_nodes_with_engine_address_and_commands(rig: Rig) -> None:
    # given
    began = time.monotonic()
    # when
    with nodes.open_nodes("node1,node2") as opened:
        seconds = time.monotonic() - began
        said = [node.run(["printf", "%s|", "a b", "$HOME", "it's"]).stdout for node in opened]
        failed = opened[0].run(["sh", "-c", "echo no >&2; exit 3"])
        echoed = opened[0].run(["cat"], input="through").stdout
        names = [node.engine.info()["Name"] for node in opened]
        free = [node.free_bytes() for node in opened]
        # one ssh per node, however many calls
        assert len(ssh_processes()) == 2
    # then
    assert [node.address for node in opened] == [f"{SUBNET}.1", f"{SUBNET}.2"]
    assert names == ["node1", "node2"] and said == ["a b|$HOME|it's|"] * 2
    assert (failed.returncode, failed.stderr) == (3, "no\n") and echoed == "through"
    assert all(count > 0 for count in free)
    assert seconds < NAMED_SECONDS
    assert ssh_processes() == set()


def test_many_calls_at_once_over_one_connection(rig: Rig) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with nodes.open_nodes("node1") as (node,), ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: node.engine.version()["ApiVersion"], range(60)))
    assert len(answers) == 60 and len(set(answers)) == 1


def test_a_command_has_a_deadline(rig: Rig) -> None:
    with nodes.open_nodes("node1") as (node,), pytest.raises(KitError, match="has not ended after 1 s"):
        node.run(["sleep", "30"], timeout=1)


def test_a_port_in_the_ssh_configuration_is_used(rig: Rig, ssh_config: Callable[[str], None]) -> None:
    ssh_config(f"Host elsewhere\n  HostName {SUBNET}.1\n  Port 2299")
    error = refusal("elsewhere")
    assert "nothing answers ssh there" in error.what and "port 2299: Connection refused" in str(error.why)


def test_forwards_and_commands_of_the_users_configuration_do_no_harm(
    rig: Rig, ssh_config: Callable[[str], None]
) -> None:
    # given a configuration for people: a forward whose port is taken by sshd itself, and a command
    ssh_config(
        "Host node1\n  RemoteForward 22 localhost:1\n  ExitOnForwardFailure yes\n  RemoteCommand tmux\n  RequestTTY yes"
    )
    with nodes.open_nodes("node1") as (node,):
        assert node.engine.ping() is True
        assert node.run(["echo", "fine"]).stdout == "fine\n"


def test_an_unknown_host_key(rig: Rig, ssh_config: Callable[[str], None]) -> None:
    ssh_config("Host *\n  UserKnownHostsFile /dev/null\n  GlobalKnownHostsFile /dev/null\n  StrictHostKeyChecking ask")
    error = refusal("node1")
    assert "does not know the node's host key" in error.what and error.where == "node node1"


def test_a_changed_host_key(rig: Rig, ssh_config: Callable[[str], None], tmp_path: Path) -> None:
    # given a known_hosts with another key for the node
    call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "other")
    key = " ".join((tmp_path / "other.pub").read_text().split()[:2])
    (tmp_path / "known").write_text(f"node1,{SUBNET}.1 {key}\n")
    ssh_config(f"Host *\n  UserKnownHostsFile {tmp_path}/known\n  StrictHostKeyChecking yes\n  HostKeyAlias node1")
    error = refusal("node1")
    assert "not the one ssh remembers" in error.what and "ssh-keygen -R node1" in str(error.next_step)


def test_a_key_that_the_node_does_not_take(rig: Rig, ssh_config: Callable[[str], None], tmp_path: Path) -> None:
    call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "other")
    ssh_config(f"Host *\n  IdentityFile {tmp_path}/other\n  IdentitiesOnly yes\n  IdentityAgent none\nIgnoreUnknown x")
    # the rig's own IdentityFile comes after ours and would be tried as well
    config = Path(os.environ["EXL3KIT_SSH_CONFIG"])
    ours, _, theirs = config.read_text().partition("IgnoreUnknown x")
    config.write_text(ours + re.sub(r"(?m)^\s*IdentityFile .*$", "", theirs))
    error = refusal("node1")
    assert "types no password" in error.what and "Permission denied" in str(error.why)


def test_a_pulled_cable_is_named_in_time_beside_a_node_that_works(rig: Rig) -> None:
    rig.link("node2", "down")
    try:
        error = refusal("node1,node2")
    finally:
        rig.link("node2", "up")
    assert error.where == "node node2" and "node1" not in str(error)


def test_a_link_lost_later_ends_calls(rig: Rig) -> None:
    from docker.errors import DockerException
    from requests.exceptions import RequestException

    with nodes.open_nodes("node2") as (node,):
        rig.link("node2", "down")
        began = time.monotonic()
        try:
            with pytest.raises((DockerException, RequestException)):
                while time.monotonic() - began < 15:
                    node.engine.ping()
            with pytest.raises(KitError) as refused:
                node.run(["true"], timeout=5)
        finally:
            rig.link("node2", "up")
    assert time.monotonic() - began < 15
    assert refused.value.code == ExitCode.UNREACHABLE and refused.value.where == "node node2"


def test_an_engine_that_does_not_run(rig: Rig) -> None:
    rig.engine("node1", "stop")
    try:
        error = refusal("node1")
    finally:
        rig.engine("node1", "start")
        wait_for_engine(rig, "node1")
    assert "engine" in error.what and "node1" in str(error.where)
    assert re.search(r"systemctl (re)?start docker", str(error.next_step))


@pytest.fixture
def user(rig: Rig) -> Iterator[str]:
    """A user of node1 who is not in the docker group, with the rig's key."""
    script = (
        "useradd --create-home --shell /bin/sh --password '*' op && mkdir -m 700 /home/op/.ssh"
        " && cp /root/.ssh/authorized_keys /home/op/.ssh/ && chown -R op: /home/op/.ssh && groupadd -f docker"
        " && chgrp docker /run/docker.sock && chmod 660 /run/docker.sock"
    )
    rig.exec("node1", "sh", "-c", script)
    yield "op"
    rig.exec("node1", "sh", "-c", "pkill -u op; sleep 0.2; userdel --remove op", check=False)


def test_a_user_outside_the_docker_group_and_then_in_it(rig: Rig, user: str) -> None:
    # given a user who may not use the engine
    error = refusal("op@node1")
    assert "user op may not use the engine" in error.what and "usermod -aG docker op" in str(error.next_step)
    # when the advice is followed
    rig.exec("node1", "usermod", "-aG", "docker", "op")
    # then
    with nodes.open_nodes("op@node1") as (node,):
        assert node.engine.ping() is True


def test_a_node_whose_sshd_forwards_no_sockets_is_reached_through_its_docker(
    rig: Rig, ssh_config: Callable[[str], None]
) -> None:
    # given a second sshd that refuses to forward
    options = "-p 2222 -o AllowStreamLocalForwarding=no -o UsePAM=no -o PidFile=/run/sshd-strict.pid"
    rig.exec("node1", "sh", "-c", f"/usr/sbin/sshd {options}")
    ssh_config("Host node1\n  Port 2222\n  HostKeyAlias node1")
    try:
        # when
        with nodes.open_nodes("node1") as (node,):
            name = node.engine.info()["Name"]
            images = node.engine.images.list()
    finally:
        rig.exec("node1", "sh", "-c", "kill $(cat /run/sshd-strict.pid)")
    # then
    assert name == "node1" and isinstance(images, list)
    assert ssh_processes() == set()


HOLD = """
import sys, time
from exl3kit import nodes
with nodes.open_nodes("node1,node2"):
    print("open", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("with_signal", [signal.SIGINT, signal.SIGKILL])
def test_no_ssh_outlives_the_kit(rig: Rig, with_signal: signal.Signals) -> None:
    # given a kit that holds two nodes
    kit = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                           cwd=REPOSITORY)  # fmt: skip
    assert kit.stdout is not None and kit.stdout.readline() == "open\n"
    assert len(ssh_processes()) == 2
    # when
    kit.send_signal(with_signal)
    kit.wait(timeout=10)
    kit.stdout.close()
    # then
    deadline = time.monotonic() + 5
    while ssh_processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ssh_processes() == set()


def test_local_without_an_engine(rig: Rig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if Path("/var/run/docker.sock").exists() or shutil.which("dockerd"):
        pytest.skip("this machine has an engine")
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    error = refusal("local")
    assert "no container engine on this machine" in error.what and "install" in str(error.next_step)


def wait_for_engine(rig: Rig, node: str) -> None:
    deadline = time.monotonic() + 20
    while rig.docker(node, "version", check=False).returncode and time.monotonic() < deadline:
        time.sleep(0.1)
