"""What `kit demo --install-engine` refuses before it touches the machine."""

from __future__ import annotations

import io
import os
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from exl3kit import engine, engine_setup, paths
from exl3kit.errors import ExitCode, KitError
from exl3kit.progress import Progress

DEBIAN = 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nID=debian\nVERSION_CODENAME=bookworm\n'
UBUNTU = 'PRETTY_NAME="Ubuntu 24.04.1 LTS"\nID=ubuntu\nVERSION_CODENAME=noble\n'


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without any engine."""
    for name in ("DOCKER_HOST", "DOCKER_CONTEXT", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "none"))
    monkeypatch.setattr(engine, "DEFAULT_SOCKET", tmp_path / "docker.sock")
    monkeypatch.setattr(engine, "shutil", SimpleNamespace(which=lambda program, path: None))


def enter(tmp_path: Path, *, install: bool, os_release: str = DEBIAN) -> KitError:
    file = tmp_path / "os-release"
    file.write_text(os_release)
    progress = Progress(Console(file=io.StringIO()))
    ensured = engine_setup.ensured(install=install, keep=False, progress=progress, os_release=file)
    with pytest.raises(KitError) as refused, ensured:
        pass
    return refused.value


def test_without_the_flag_a_missing_engine_is_only_named(tmp_path: Path) -> None:
    error = enter(tmp_path, install=False)
    assert error.code == ExitCode.UNREACHABLE and "--install-engine" in str(error.next_step)


@pytest.mark.parametrize(
    ("systemd", "fix"), [(True, "`systemctl start docker`"), (False, "no systemd runs here: start `dockerd` as root")]
)
def test_an_engine_that_is_not_started_is_named_with_what_starts_it_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, systemd: bool, fix: str
) -> None:
    """Given dockerd in a folder that is not on the user's PATH, then it is found, and the fix is one that works."""
    daemon = tmp_path / "sbin" / "dockerd"
    daemon.parent.mkdir()
    daemon.touch(mode=0o755)
    monkeypatch.setattr(engine, "shutil", shutil)
    monkeypatch.setattr(engine, "DAEMON_FOLDER", str(daemon.parent))
    monkeypatch.setattr(engine, "SYSTEMD", tmp_path if systemd else tmp_path / "none")
    with pytest.raises(KitError, match="installed but not started") as refused:
        engine.local()
    assert refused.value.next_step == fix


def test_other_systems_are_named_and_left_alone(tmp_path: Path) -> None:
    error = enter(tmp_path, install=True, os_release=UBUNTU)
    assert error.code == ExitCode.PREFLIGHT and "Ubuntu 24.04.1 LTS" in error.what


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not root, on a machine that has mmdebstrap and sudo and no dockerd."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(engine_setup, "shutil", SimpleNamespace(which=lambda program: f"/usr/bin/{program}"))
    monkeypatch.chdir(paths.REPO)


def test_installing_needs_root_and_the_command_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: None
) -> None:
    error = enter(tmp_path, install=True)
    assert error.code == ExitCode.PREFLIGHT
    assert error.what == "installing docker.io needs root"
    assert error.next_step == "`sudo ./kit.py demo --install-engine`"
    monkeypatch.chdir(tmp_path)  # from elsewhere, and on a Debian without sudo
    assert f"`sudo {paths.REPO}/kit.py demo" in str(enter(tmp_path, install=True).next_step)
    monkeypatch.setattr(engine_setup, "shutil", SimpleNamespace(which=lambda program: None))
    error = enter(tmp_path, install=True)
    assert error.what == "installing docker.io mmdebstrap needs root"
    assert error.next_step == f"`su - -c '{paths.REPO}/kit.py demo --install-engine'`"


def test_an_engine_that_is_there_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: None
) -> None:
    """Given a user who may not start or use the engine, then that is the cause, and on any system."""
    monkeypatch.setattr(engine, "is_installed", lambda: True)
    error = enter(tmp_path, install=True, os_release=UBUNTU)
    assert error.what == "starting the engine needs root" and "sudo ./kit.py demo" in str(error.next_step)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(engine.DEFAULT_SOCKET))
        error = enter(tmp_path, install=True)
    assert error.what == "this user may not use the container engine" and "usermod -aG docker" in str(error.next_step)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/gone.sock")
    assert enter(tmp_path, install=True).next_step == "repair DOCKER_HOST"


@pytest.mark.parametrize(
    ("release", "codename"), [(DEBIAN, "bookworm"), (DEBIAN.replace("bookworm", "trixie"), "trixie")]
)
def test_both_debian_releases_are_supported(release: str, codename: str) -> None:
    assert engine_setup.supported_release(release) == codename
    assert "docker.io" in engine_setup.ENGINE_PACKAGES[codename]


@pytest.mark.parametrize(
    ("update", "install", "why", "fix"),
    [
        # without a network, and without lists: `update` warns and succeeds, and no package exists
        (
            "W: Failed to fetch http://deb/InRelease  Temporary failure resolving",
            "E: Unable to locate package docker.io",
            "Failed to fetch http://deb/InRelease  Temporary failure resolving",
            "needs a network",
        ),
        ("", "E: Failed to fetch http://deb/x  No route", "Failed to fetch http://deb/x  No route", "a proxy"),
        ("", "E: dpkg was interrupted", "dpkg was interrupted", "`apt-get update && apt-get install docker.io`"),
    ],
)  # fmt: skip
def test_a_failed_installation_names_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, update: str, install: str, why: str, fix: str
) -> None:
    program = tmp_path / "apt-get"
    program.write_text(f"#!/bin/sh\n[ $1 = update ] && exec echo '{update}' >&2\necho '{install}' >&2\nexit 100\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    stage: Any = SimpleNamespace(say=lambda note: None)
    with pytest.raises(KitError, match="apt-get could not install docker") as refused:
        engine_setup._install(["docker.io"], stage)
    assert refused.value.why == why and fix in str(refused.value.next_step)
