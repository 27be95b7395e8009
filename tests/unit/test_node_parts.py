"""Naming nodes, the ssh command lines, and the sentence for each way in which a node can fail."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from exl3kit import cluster, engine, nodes, ssh
from exl3kit.errors import ExitCode, KitError

CONTROL = Path("/run/x/ctl")


def test_named_nodes_are_ssh_names_and_local() -> None:
    # given / when
    found = cluster.hosts("spark1, admin@spark2,local")
    # then
    assert [(h.name, h.ssh, h.is_local) for h in found] == [
        ("spark1", "spark1", False),
        ("admin@spark2", "admin@spark2", False),
        ("local", None, True),
    ]


def test_local_may_stand_several_times_and_others_may_not() -> None:
    assert [host.name for host in cluster.hosts("local,local")] == ["local", "local-2"]
    with pytest.raises(KitError, match="spark1 is named twice"):
        cluster.hosts("spark1,spark1")


@pytest.mark.parametrize("named", ["", "a,,b", "-oProxyCommand=touch /tmp/x", "a b", "a;b"])
def test_what_cannot_be_an_ssh_name_is_refused(named: str) -> None:
    with pytest.raises(KitError) as refused:
        cluster.hosts(named)
    assert refused.value.code == ExitCode.USAGE


def test_cluster_file(tmp_path: Path) -> None:
    # given
    file = tmp_path / "sparks.yaml"
    file.write_text(
        "cluster: 1\nnodes:\n  - {name: a, ssh: admin@a.lan, address: 10.0.0.1}\n"
        "  - {name: b, ssh: b, engine: /run/user/1000/docker.sock}\n"
    )
    # when
    first, second = cluster.hosts(str(file))
    # then
    assert (first.name, first.ssh, first.address, first.engine) == (
        "a",
        "admin@a.lan",
        "10.0.0.1",
        cluster.ENGINE_SOCKET,
    )
    assert (second.address, second.engine) == (None, "/run/user/1000/docker.sock")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cluster: 2\nnodes: [{name: a}]", "cluster"),
        ("cluster: 1\nnodes: []", "nodes"),
        ("cluster: 1\nnodes: [{name: a, sssh: b}]", "nodes.0.sssh"),
        ("cluster: 1\nnodes: [{name: a, ssh: -v}]", "nodes.0.ssh"),
        ("cluster: [", "not YAML"),
    ],
)
def test_a_wrong_cluster_file_names_the_key(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(KitError, match=said) as refused:
        cluster.hosts(str(file))
    assert refused.value.where == str(file)


def test_no_connection_can_ask_or_wait_for_ever() -> None:
    # given / when
    argv = ssh.connect_argv("spark1", control=CONTROL, remote="cat", config="/etc/other")
    # then
    assert argv[:3] == ["ssh", "-F", "/etc/other"] and argv[-2:] == ["spark1", "cat"]
    options = dict(option.split("=", 1) for option in argv if "=" in option)
    assert options["BatchMode"] == "yes" and float(options["ConnectTimeout"]) + 1 < 8
    assert int(options["ServerAliveInterval"]) * int(options["ServerAliveCountMax"]) <= 8


def test_a_shared_connection_never_connects_anew_nor_reads_the_users_configuration() -> None:
    argv = ssh.command_argv("spark1", ["true"], control=CONTROL)
    assert argv[:3] == ["ssh", "-F", "/dev/null"]
    assert "ProxyCommand=false" in argv


@pytest.mark.parametrize("words", [["echo", "a b"], ["echo", "$HOME", "`id`", "it's", "*"], ["printf", "%s", ""]])
def test_words_reach_the_remote_program_unchanged(words: list[str]) -> None:
    # given the last argument, which the node's shell will read
    remote = ssh.command_argv("h", words, control=CONTROL)[-1]
    # when a shell reads it
    probe = f"set -- {remote}; for word do printf '%s\\0' \"$word\"; done"
    seen = subprocess.run(["sh", "-c", probe], capture_output=True, text=True, check=True).stdout
    # then
    assert seen.split("\0")[:-1] == words == shlex.split(remote)


@pytest.mark.parametrize(
    ("said", "sentence", "way_out"),
    [
        ("ssh: Could not resolve hostname x: Name or service not known", "no host of this name", "ssh -G"),
        (
            "@@@@@@@@@@@@\n@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\n@@@@@@@@@@@@\n"
            "Host key verification failed.",
            "not the one ssh remembers",
            "ssh-keygen -R x",
        ),
        ("No ED25519 host key is known for x.\nHost key verification failed.", "does not know", "ssh admin@x"),
        ("admin@x: Permission denied (publickey,password).", "types no password", "ssh-copy-id admin@x"),
        ("ssh: connect to host x port 2222: Connection refused", "nothing answers ssh", "Port"),
        ("ssh: connect to host x port 22: Connection timed out", "does not answer", "ping x"),
        ("ssh: connect to host x port 22: No route to host", "does not lead there", "ping x"),
        ("kex_exchange_identification: read: Connection reset by peer", "drops the connection", "journalctl"),
        ("Timeout, server x not responding.", "link to the node is gone", "ping x"),
        ("/home/me/.ssh/config: line 3: Bad configuration option: prot", "does not know", "repair"),
        ("something new", "ssh failed", "ssh -v admin@x"),
    ],
)
def test_every_failure_of_ssh_has_a_sentence_and_a_way_out(said: str, sentence: str, way_out: str) -> None:
    error = ssh.explain("x", "admin@x", said)
    assert error.code == ExitCode.UNREACHABLE and error.where == "node x"
    assert sentence in error.what and way_out in str(error.next_step)
    assert "ssh says: " in str(error.why)


FINE = {"user": "op", "groups": ("op", "docker"), "in_group_file": True, "has_docker": True, "has_socket": True,
        "may_write": True, "answers": False, "said": "Cannot connect"}  # fmt: skip


@pytest.mark.parametrize(
    ("differs", "sentence", "way_out"),
    [
        ({"has_docker": False, "has_socket": False}, "no container engine", "install Docker"),
        ({"has_socket": False}, "not running", "systemctl start docker"),
        ({"may_write": False, "in_group_file": False, "groups": ("op",)}, "may not use the engine", "usermod -aG"),
        ({"may_write": False, "groups": ("op",)}, "yet", "terminate-user op"),
        ({}, "does not answer", "systemctl restart"),
    ],
)
def test_every_failure_of_a_nodes_engine_has_a_sentence(
    differs: dict[str, object], sentence: str, way_out: str
) -> None:
    facts = nodes.EngineFacts(**{**FINE, **differs})  # type: ignore[arg-type]
    error = nodes.engine_refusal(cluster.Host(name="x", ssh="x"), facts, "eof")
    assert sentence in error.what and way_out in str(error.next_step)
    assert error.code == ExitCode.UNREACHABLE


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without any engine: the usual socket lies in an empty folder."""
    for name in ("DOCKER_HOST", "DOCKER_CONTEXT", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "none"))
    monkeypatch.setattr(engine, "DEFAULT_SOCKET", tmp_path / "docker.sock")
    return tmp_path


def test_no_local_engine_is_one_sentence_with_exit_6(no_engine: Path) -> None:
    with pytest.raises(KitError, match="no container engine on this machine") as refused:
        engine.open_local()
    assert refused.value.code == ExitCode.UNREACHABLE
    assert "docker" in str(refused.value.next_step)


def test_a_socket_behind_which_nobody_listens(no_engine: Path) -> None:
    # given a socket that a killed engine left
    subprocess.run(
        [
            sys.executable,
            "-c",
            "import socket,sys; socket.socket(socket.AF_UNIX).bind(sys.argv[1])",
            engine.DEFAULT_SOCKET,
        ],
        check=True,
    )
    with pytest.raises(KitError, match="does not answer") as refused:
        engine.open_local()
    assert "connection refused" in str(refused.value.why)


def test_docker_host_that_leads_elsewhere_is_named(no_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "ssh://spark1")
    with pytest.raises(KitError, match="leads to another machine") as refused:
        engine.open_local()
    assert "--nodes spark1" in str(refused.value.next_step)


def test_two_dead_nodes_are_both_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # given names that no resolver knows
    config = tmp_path / "config"
    config.write_text("Host *\n  HostName %h.invalid\n")
    monkeypatch.setenv("EXL3KIT_SSH_CONFIG", str(config))
    # when
    with pytest.raises(KitError) as refused, nodes.open_nodes("aaa,bbb"):
        pass
    # then
    assert "node aaa" in str(refused.value) and "node bbb" in str(refused.value)
    assert refused.value.code == ExitCode.UNREACHABLE
