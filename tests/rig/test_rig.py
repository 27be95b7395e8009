"""The rig itself: what scripts/rig promises, on this machine's kernel."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rig_hosts import OTHER_RIGS, SCRIPT, Rig, call, import_tiny, rig_script, rig_status, room, traces
from rig_lib import host
from rig_lib.plan import BRIDGE, NUMBER, OWN_FOLDER, PREFIX
from rig_lib.template import cache_lock


def containers(rig: Rig, node: str) -> list[str]:
    """Names of the containers that run."""
    return rig.docker(node, "ps", "--format", "{{.Names}}").stdout.split()


def wait_for_container(rig: Rig, node: str, name: str, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while name not in containers(rig, node):
        assert time.monotonic() < deadline, f"{name} was not running on {node} within {seconds} s"
        time.sleep(0.1)


# -- without hosts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("read", "text", "entries"),
    [
        (host.one_line_entries, "deb http://a/debian bookworm main\n", [("http://a/debian", "bookworm")]),
        (host.one_line_entries, "deb [arch=amd64 signed-by=/k] http://a x contrib main", [("http://a", "x")]),
        (host.one_line_entries, "# deb http://a x main\ndeb-src http://a x main\ndeb http://a x contrib", []),
        (
            host.stanza_entries,
            "Types: deb\n# a remark\nURIs: http://a\nSuites: x x-updates\nComponents: main\n\n"
            "Types: deb\nURIs: http://b\nSuites: x-security\nComponents: main\n",
            [("http://a", "x"), ("http://a", "x-updates"), ("http://b", "x-security")],
        ),
        (host.stanza_entries, "Enabled: no\nTypes: deb\nURIs: http://a\nSuites: x\nComponents: main\n", []),
        (host.stanza_entries, "Types: deb-src\nURIs: http://a\nSuites: x\nComponents: main\n", []),
    ],
)
def test_both_forms_of_apt_sources(
    read: Callable[[str], Iterator[tuple[str, str]]], text: str, entries: list[tuple[str, str]]
) -> None:
    assert list(read(text)) == entries


def test_a_rig_command_that_waits_for_another_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with cache_lock():
        assert capfd.readouterr().err == ""
        script = "from rig_lib.template import cache_lock\nwith cache_lock(): print('got it', flush=True)"
        other = subprocess.Popen(
            [sys.executable, "-c", script], cwd=SCRIPT.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert other.stderr is not None
        assert other.stderr.readline() == "rig: waits for another rig command to end\n"
    assert other.communicate(timeout=30) == ("got it\n", "")


def test_folders_that_pip_takes_packages_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # given wheels by the environment, and an index beside its files by the user's configuration
    (tmp_path / "wheels").mkdir()
    (tmp_path / "index" / "simple").mkdir(parents=True)
    config = tmp_path / "config" / "pip" / "pip.conf"
    config.parent.mkdir(parents=True)
    config.write_text(
        f"[global]\nextra-index-url =\n  file://{tmp_path}/index/simple\n  https://mirror.example/simple\n"
    )
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("PIP_FIND_LINKS", f"{tmp_path}/wheels {tmp_path}/absent")

    # then both folders count, the index with the files that it links to
    assert {f"{tmp_path}/wheels", f"{tmp_path}/index"} == {
        folder for folder in host.local_package_folders() if folder.startswith(str(tmp_path))
    }


# -- with hosts of their own ------------------------------------------------------------------------------------------


def test_down_leaves_nothing(no_rig: None) -> None:
    # given a rig with everything that `down` has to undo: NAT, a disk in memory, a container, a throttled cable
    before = traces()
    rig_script("up", "--nat", "--data-mb", "200")
    rig = Rig()
    import_tiny(rig, "node1")
    rig.docker("node1", "run", "--detach", "--publish", "8000:8000", "exl3kit-test-tiny:1", "sleep", "1000")
    rig.link("node2", "slow", "--mbit", "50")
    made = traces() - before
    state, disk = Path(rig.status["state_dir"]), Path(rig.node("node1")["disk"])
    assert {line.split()[0] for line in made} >= {"namespace", "interface", "mount", "control", "firewall", "process"}

    # when
    rig_script("down")

    # then
    assert sorted(traces() - before) == []
    assert sorted(before - traces()) == []
    assert not state.exists()
    assert not disk.exists()
    assert rig_status()["up"] is False


@pytest.mark.parametrize(
    "milestone", [f"/sys/class/net/{BRIDGE}", f"/run/netns/{PREFIX}-node1", f"/run/netns/{PREFIX}-node2"]
)
def test_down_after_up_was_killed_half_way(no_rig: None, milestone: str) -> None:
    # given an `up` that was killed as soon as it had made this
    before = traces()
    up = subprocess.Popen([SCRIPT, "up"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not Path(milestone).exists():
        assert up.poll() is None
        time.sleep(0.001)
    up.send_signal(signal.SIGKILL)
    up.wait()

    # when: twice, as the second time there is nothing to do
    rig_script("down")
    rig_script("down")

    # then
    assert sorted(traces() - before) == []
    assert rig_status()["up"] is False


@pytest.mark.full
def test_engine_with_a_full_disk_says_so_and_recovers(no_rig: None) -> None:
    # given engines with disks of 60 MB
    rig_script("up", "--nodes", "small", "--data-mb", "60")
    rig = Rig()
    import_tiny(rig, "small")

    # when a container writes more than that
    fill = rig.docker(
        "small", "run", "--name", "fill", "exl3kit-test-tiny:1", "sh", "-c", "cat /dev/zero > /f", check=False
    )

    # then it is told, and the space comes back with the container
    assert "No space left on device" in fill.stderr
    rig.docker("small", "rm", "fill")
    rig.docker("small", "run", "--rm", "exl3kit-test-tiny:1", "true")


def test_too_little_disk_is_refused_before_anything_is_made(no_rig: None) -> None:
    before = traces()
    refused = rig_script("up", "--need-gb", "1e6", check=False)
    assert refused.returncode == 3
    assert "GiB free" in refused.stderr
    assert sorted(traces() - before) == []


@pytest.mark.full
@pytest.mark.parametrize("release", ["bookworm", "trixie"])
def test_bare_host_reaches_the_mirrors_of_this_machine(no_rig: None, release: str) -> None:
    # given a host as a new user has it
    rig_script(
        "up", "--no-engine", "--release", release, "--nodes", "bare", "--nat", "--bind", str(SCRIPT.parent), timeout=600
    )
    rig = Rig()
    assert release in rig.exec("bare", "cat", "/etc/os-release").stdout
    for program in ("docker", "sshd", "gcc"):
        assert rig.exec("bare", "sh", "-c", f"command -v {program}", check=False).returncode

    # when it asks the mirrors, then they answer
    rig.exec("bare", "apt-get", "update", "--error-on=any", timeout=120)
    rig.exec("bare", "apt-get", "install", "-qy", "python3-venv", timeout=180)
    rig.exec("bare", "python3", "-m", "venv", "/tmp/venv", timeout=120)
    rig.exec("bare", "/tmp/venv/bin/pip", "install", "--quiet", "typing-extensions", timeout=120)
    # and a folder of this machine is there, read-only
    assert rig.exec("bare", "ls", str(SCRIPT)).stdout.strip() == str(SCRIPT)
    assert "Read-only" in rig.exec("bare", "touch", f"{SCRIPT}.new", check=False).stderr


@pytest.mark.full
def test_engine_of_bookworm(no_rig: None) -> None:
    rig_script("up", "--release", "bookworm", timeout=600)
    rig = Rig()
    assert [n["engine"].split("+")[0] for n in rig.status["nodes"]] == ["20.10.24", "20.10.24"]
    assert rig.ssh("node2", "hostname").stdout == "node2\n"


# -- with the session's hosts -----------------------------------------------------------------------------------------


def test_both_engines_answer_over_ssh(rig: Rig) -> None:
    for name in ("node1", "node2"):
        answer = rig.ssh(name, "hostname && docker version --format '{{.Server.Version}}'").stdout.split()
        assert answer[0] == name
        assert answer[1].startswith("26.")


def test_operator_has_docker_with_buildx_and_compose(rig: Rig) -> None:
    for words in (["version"], ["buildx", "version"], ["compose", "version"]):
        rig.docker("node1", *words)


def test_hosts_reach_each_other_by_name_and_nothing_else_at_once(rig: Rig) -> None:
    assert rig.exec("node1", "ping", "-c1", "-W2", "node2").returncode == 0
    assert rig.exec("node2", "ping", "-c1", "-W2", "node1").returncode == 0
    begin = time.monotonic()
    assert rig.exec("node1", "getent", "hosts", "registry.example", check=False).returncode == 2
    assert rig.exec("node1", "ping", "-c1", "-W5", "192.0.2.77", check=False).returncode == 1
    assert time.monotonic() - begin < 2.0


def test_cable_pulled_and_plugged_in_again(rig: Rig) -> None:
    rig.link("node2", "down")
    try:
        assert rig.node("node2")["link"] == "down"
        assert rig.exec("node1", "ping", "-c1", "-W1", "node2", check=False).returncode == 1
    finally:
        rig.link("node2", "up")
    assert rig.exec("node1", "ping", "-c1", "-W3", "node2").returncode == 0


def test_throttled_cable(rig: Rig) -> None:
    rig.link("node1", "slow", "--mbit", "8")
    try:
        begin = time.monotonic()
        rig.ssh("node1", "head -c 2000000 /dev/zero")
        slow = time.monotonic() - begin
    finally:
        rig.link("node1", "up")
    begin = time.monotonic()
    rig.ssh("node1", "head -c 2000000 /dev/zero")
    fast = time.monotonic() - begin
    assert slow - fast > 1.0  # 2 MB at 1 MB/s, less what the bucket and the socket buffers swallow


def test_power_cycle_keeps_the_disk_and_restarts_containers(rig: Rig, tiny_image: str) -> None:
    rig.docker("node2", "run", "--detach", "--name", "always", "--restart", "always", tiny_image, "sleep", "1000")
    rig.exec("node2", "sh", "-c", "echo kept > /root/note")
    try:
        rig.power_cycle("node2")
        wait_for_container(rig, "node2", "always")
        assert rig.ssh("node2", "cat note").stdout == "kept\n"
    finally:
        rig.docker("node2", "rm", "--force", "always")


def test_killed_engine_starts_again(rig: Rig) -> None:
    rig.engine("node1", "kill")
    assert rig.node("node1")["engine"] is None
    assert rig.node("node2")["engine"] is not None
    rig.engine("node1", "start")
    assert rig.node("node1")["engine"] is not None


def test_containers_are_accounted_to_their_host(rig: Rig, tiny_image: str) -> None:
    rig.docker("node1", "run", "--detach", "--name", "counted", tiny_image, "sleep", "1000")
    try:
        container = rig.docker("node1", "inspect", "--format", "{{.State.Pid}}", "counted").stdout.strip()
        group = rig.exec("node1", "cat", f"/proc/{container}/cgroup").stdout
        assert "/docker/" in group
        assert "node1" not in group, "the host sees above its own group"
    finally:
        rig.docker("node1", "rm", "--force", "counted")


def test_up_again_does_nothing_but_says_what_differs(rig: Rig) -> None:
    assert rig_script("up", *room()).stdout.startswith("already up")
    refused = rig_script("up", *room(), "--nat", check=False)
    assert refused.returncode == 2
    assert "nat: False, asked for True" in refused.stderr


def test_unknown_host_is_named(rig: Rig) -> None:
    refused = rig_script("exec", "node9", "true", check=False)
    assert refused.returncode == 2
    assert "node9" in refused.stderr
    assert "node1, node2" in refused.stderr


def test_exec_gives_the_exit_code_of_the_command(rig: Rig) -> None:
    assert rig.exec("node1", "sh", "-c", "exit 7", check=False).returncode == 7


def test_printed_environment_is_what_the_kit_needs(rig: Rig) -> None:
    script = f'eval "$({SCRIPT} env)"; ssh -F "$EXL3KIT_SSH_CONFIG" node1 true && docker buildx version'
    assert "buildx" in call("sh", "-c", script).stdout


def test_another_rigs_disks_and_names_are_not_taken_for_this_ones() -> None:
    """Given a rig of each number but ours, then none of its names is ours, and ours is not another's."""
    for number in set(range(10)) - {NUMBER}:
        folder = f"exl3kit-rig-{number}" if number else "exl3kit-rig"
        for name in (f"exl3rig{number}br", f"EXL3KIT-RIG-{number}", f"/disks/{folder}/node2/data", f"/run/{folder}"):
            assert OTHER_RIGS.search(name), name
    for name in (BRIDGE, f"EXL3KIT-RIG-{NUMBER}", f"/disks/{OWN_FOLDER}/node2/data", f"/run/{OWN_FOLDER}"):
        assert not OTHER_RIGS.search(name), name
