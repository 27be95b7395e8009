"""An engine for `kit demo` on a machine that has none: the distribution's packages, started and stopped by the kit."""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from exl3kit import engine, paths, ssh
from exl3kit.errors import ExitCode, KitError

if TYPE_CHECKING:
    from exl3kit.progress import Progress, Stage

log = logging.getLogger(__name__)

RELEASES = ("bookworm", "trixie")
# Debian 13 split the client and BuildKit's plugin off; Debian 12 has both builders' client in docker.io and no buildx.
ENGINE_PACKAGES = {"bookworm": ("docker.io",), "trixie": ("docker.io", "docker-cli", "docker-buildx")}
PROGRAM_PACKAGES = {"mmdebstrap": "mmdebstrap"}
START_SECONDS = 30.0
STOP_SECONDS = 20.0
INSTALL_SECONDS = 900.0
SYSTEMD = Path("/run/systemd/system")


@contextmanager
def ensured(
    *, install: bool, keep: bool, progress: Progress, os_release: Path = Path("/etc/os-release")
) -> Iterator[None]:
    """A local engine for the length of the block.

    Parameters
    ----------
    install: install the distribution's packages that are missing, and start the engine when it does not run.
    keep: leave an engine that was started here running.

    An engine that already answers is used as it is and never stopped. Raises `KitError`: exit 6 when there is no engine
    and `install` is not given, or it is there and out of this user's reach; preflight where the kit cannot install.
    """
    packages, refusal = _missing_programs(), _refusal()
    answered = refusal is None
    out_of_reach = refusal is not None and refusal.what == engine.NOT_ALLOWED and not packages
    if refusal is not None and (not install or out_of_reach or os.environ.get("DOCKER_HOST")):
        raise refusal
    if answered and not (install and packages):
        yield
        return
    lacks_engine = not answered and not engine.is_installed()
    if lacks_engine or packages:
        release = supported_release(os_release.read_text())
        packages = [*(ENGINE_PACKAGES[release] if lacks_engine else ()), *packages]
    _need_root(packages)
    if packages:
        with progress.stage("install packages") as stage:
            _install(packages, stage)
            stage.conclude(" ".join(packages))
    if answered:
        yield
        return
    with _started(progress, keep=keep):
        yield


def supported_release(os_release: str) -> str:
    """`bookworm` or `trixie`; `KitError` (preflight) on any other system."""
    fields: dict[str, str] = dict(re.findall(r'^([A-Z_]+)="?([^"\n]*)"?$', os_release, re.MULTILINE))
    codename = fields.get("VERSION_CODENAME", "")
    if fields.get("ID") == "debian" and codename in RELEASES:
        return codename
    raise KitError(
        f"the kit installs an engine on Debian 12 and 13 only, this is {fields.get('PRETTY_NAME', 'another system')}",
        where="node local",
        next_step="install Docker (engine 20.10 or newer) and mmdebstrap as your system does, then `kit demo`",
        code=ExitCode.PREFLIGHT,
    )


def _answers() -> bool:
    return _refusal() is None


def _refusal() -> KitError | None:
    """Why the local engine cannot be used, or None."""
    try:
        client, _ = engine.open_local()
    except KitError as error:
        return error
    client.close()
    return None


def _missing_programs() -> list[str]:
    return [package for program, package in PROGRAM_PACKAGES.items() if shutil.which(program) is None]


def _need_root(packages: Sequence[str]) -> None:
    """Refuse to install the packages, or to start the engine that is there, as a user who may not."""
    if os.geteuid() == 0:
        return
    launcher = paths.REPO / "kit.py"
    command = f"sudo {shlex.quote('./kit.py' if Path.cwd() == paths.REPO else str(launcher))} demo --install-engine"
    if shutil.which("sudo") is None:  # `su -`: without the dash its PATH lacks what dpkg needs
        command = f"su - -c {shlex.quote(f'{shlex.quote(str(launcher))} demo --install-engine')}"
    raise KitError(
        f"installing {' '.join(packages)} needs root" if packages else "starting the engine needs root",
        where="node local",
        next_step=f"`{command}`",
        code=ExitCode.PREFLIGHT,
    )


def _install(packages: Sequence[str], stage: Stage) -> None:
    """apt-get update and install, without asking anything."""
    unread: list[str] = []  # what `update` only warns of
    for argv in (["update", "--quiet"], ["install", "--quiet", "--yes", "--no-install-recommends", *packages]):
        stage.say(f"apt-get {argv[0]}")
        try:
            done = subprocess.run(
                ["apt-get", *argv],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=INSTALL_SECONDS,
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"},
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise _not_installed(packages, f"apt-get {argv[0]} has not ended after {INSTALL_SECONDS:.0f} s") from error
        log.debug("apt-get %s: exit code %d\n%s%s", argv[0], done.returncode, done.stdout, done.stderr)
        if done.returncode:
            own_words = [line for line in done.stderr.splitlines() if line.startswith("E: ")]
            said = (unread or own_words or ["it said nothing"])[0].removeprefix("E: ").removeprefix("W: ")
            raise _not_installed(packages, said)
        unread += [line for line in done.stderr.splitlines() if line.startswith("W: Failed to fetch")]


def _not_installed(packages: Sequence[str], why: str) -> KitError:
    next_step = f"`apt-get update && apt-get install {' '.join(packages)}` shows all of it"
    if why.startswith("Failed to fetch"):
        next_step = "start again when `apt-get update` reaches the mirrors: it needs a network or a proxy"
    return KitError(
        f"apt-get could not install {' '.join(packages)}",
        where="node local",
        why=why,
        next_step=next_step,
        code=ExitCode.PREFLIGHT,
    )


@contextmanager
def _started(progress: Progress, *, keep: bool) -> Iterator[None]:
    """Start the installed engine, through systemd where that runs; stop it at the end unless it is to be kept."""
    with progress.stage("start the engine") as stage:
        if _answers():  # the package's own script has started it
            stop, how = _stop_service, "by its package"
        else:
            stop, how = _start_unit() if SYSTEMD.exists() else _start_daemon()
        stage.conclude(how)
    try:
        _refuse_vfs()
        yield
    finally:
        if keep:
            progress.tell("the engine keeps running")
        else:
            with progress.stage("stop the engine"):
                stop()


def _start_unit() -> tuple[Callable[[], None], str]:
    """Start docker.service; gives what stops it, and how it was started in words."""
    done = ssh.finish("local", ["systemctl", "start", "docker"], "systemctl", input=None, timeout=START_SECONDS * 2)
    if done.returncode or not _wait(None):
        raise _not_started(done.stderr.strip() or "it does not answer", "`journalctl -u docker`")
    return _stop_service, "by systemd"


def _stop_service() -> None:
    argv = ["systemctl", "stop", "docker.socket", "docker.service"]
    if not SYSTEMD.exists():
        argv = ["service", "docker", "stop"]
    ssh.finish("local", argv, argv[0], input=None, timeout=STOP_SECONDS * 2)


def _start_daemon() -> tuple[Callable[[], None], str]:
    """Start dockerd itself; where the kernel offers no packet filter, without one. Gives what stops it, and the words.

    Containers of one bridge then still reach each other, and published ports go through docker's own proxy.
    """
    file = paths.cache_dir("logs") / "dockerd.log"
    for options in ([], ["--iptables=false", "--ip6tables=false"]):
        with file.open("wb") as out:
            daemon = subprocess.Popen(
                ["dockerd", *options],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the kit, which then takes containers down in order
            )
        try:
            if _wait(daemon):
                return partial(ssh.stop, daemon, STOP_SECONDS), " ".join(["dockerd", *options])
        except BaseException:
            ssh.stop(daemon, STOP_SECONDS)
            raise
        ssh.stop(daemon, STOP_SECONDS)
        said = file.read_text(errors="replace").strip().splitlines()
        log.debug("dockerd %s did not start:\n%s", " ".join(options), "\n".join(said))
        if not any("iptables" in line for line in said):
            break
    raise _not_started(said[-1] if said else "it said nothing", f"read {file}")


def _not_started(why: str, next_step: str) -> KitError:
    what = "the container engine does not start"
    return KitError(what, where="node local", why=why, next_step=next_step, code=ExitCode.UNREACHABLE)


def _wait(daemon: subprocess.Popen[bytes] | None) -> bool:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if _answers():
            return True
        if daemon is not None and daemon.poll() is not None:
            return False
        time.sleep(0.1)
    return False


def _refuse_vfs() -> None:
    """Refuse the storage driver that copies every layer whole: 2 GB images would take minutes and 14 GB."""
    client, _ = engine.open_local()
    info = client.info()
    client.close()
    if info["Driver"] == "vfs":
        raise KitError(
            "the engine cannot stack layers here (storage driver vfs)",
            where="node local",
            why=f"{info['DockerRootDir']} lies on a file system that overlayfs cannot use",
            next_step="mount an ext4 or xfs file system there",
            code=ExitCode.PREFLIGHT,
        )
