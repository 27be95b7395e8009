"""What tests do with the rig's hosts: commands inside them and over ssh, their engines, cables and power."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import tarfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from rig_lib import network
from rig_lib.plan import NUMBER

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "scripts" / "rig"
Completed = subprocess.CompletedProcess[str]


def call(*argv: str | Path, check: bool = True, timeout: float = 60, **options: Any) -> Completed:
    """Run a program; a failure shows what it printed."""
    done = subprocess.run(list(map(str, argv)), capture_output=True, text=True, timeout=timeout, **options)
    assert not check or done.returncode == 0, f"{argv} -> {done.returncode}\n{done.stdout}{done.stderr}"
    return done


def rig_script(*argv: str, check: bool = True, timeout: float = 300) -> Completed:
    return call(SCRIPT, *argv, check=check, timeout=timeout)


def rig_status() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(rig_script("status", "--json").stdout)
    return found


@cache
def room() -> tuple[str, ...]:
    """Options for engines on memory disks where 18 GiB are free: they use 10 at most; clearing a disk takes minutes."""
    available = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    return ("--data-mb", "9000") if available and int(available[1]) >> 20 >= 18 else ()


@dataclass
class Rig:
    """The hosts that are up; `status` is that of the beginning or of the last power cycle."""

    status: dict[str, Any] = field(default_factory=rig_status)

    @property
    def env(self) -> dict[str, str]:
        """The environment of an operator: the kit's ssh configuration, and docker with buildx and compose."""
        return os.environ | {
            "EXL3KIT_SSH_CONFIG": self.status["ssh_config"],
            "DOCKER_CONFIG": self.status["docker_config"],
            "PATH": f"{Path(self.status['docker']).parent}:{os.environ['PATH']}",
        }

    def node(self, name: str) -> dict[str, Any]:
        """The state of a host now."""
        found: dict[str, Any] = next(n for n in rig_status()["nodes"] if n["name"] == name)
        return found

    def docker_host(self, node: str) -> str:
        """A host's engine, as DOCKER_HOST wants it; it changes when the host's power is cut."""
        return next(f"unix://{n['engine_socket']}" for n in self.status["nodes"] if n["name"] == node)

    def exec(self, node: str, *argv: str, check: bool = True, timeout: float = 60) -> Completed:
        """Run a command inside a host, not through its network."""
        return rig_script("exec", node, "--", *argv, check=check, timeout=timeout)

    def ssh(self, node: str, command: str, check: bool = True, timeout: float = 60) -> Completed:
        """Run a shell command on a host as the operator does."""
        return call(
            "ssh", "-F", self.status["ssh_config"], "-oBatchMode=yes", node, command, check=check, timeout=timeout
        )

    def docker(self, node: str, *argv: str, check: bool = True, timeout: float = 60, **options: Any) -> Completed:
        """The operator's docker client on a host's engine, without ssh in between."""
        docker = [self.status["docker"], "--host", self.docker_host(node)]
        return call(*docker, *argv, check=check, timeout=timeout, env=self.env, **options)

    def link(self, node: str, *what: str) -> None:
        rig_script("link", node, *what)

    def power_off(self, node: str) -> None:
        rig_script("power-off", node)

    def power_on(self, node: str) -> None:
        rig_script("power-on", node)
        self.status = rig_status()

    def power_cycle(self, node: str) -> None:
        rig_script("power-cycle", node)
        self.status = rig_status()

    def engine(self, node: str, what: str) -> None:
        rig_script("engine", node, what)


OTHER_RIGS = re.compile(  # they may be up beside this one; the folders of rig 0 have no number
    rf"exl3rig(?!{NUMBER})\d|(?i:exl3kit-rig)-(?!{NUMBER})\d" + (r"|exl3kit-rig(?!-)" if NUMBER else "")
)


def traces() -> set[str]:
    """What this rig could leave behind on this machine, one line each."""
    found = {f"namespace {p.name}" for p in Path("/run/netns").glob("*")}
    found |= {f"interface {p.name}" for p in Path("/sys/class/net").glob("*")}
    found |= {f"mount {line.split()[4]}" for line in Path("/proc/self/mountinfo").read_text().splitlines()}
    found |= {f"control group {folder}" for folder, _, _ in os.walk("/sys/fs/cgroup")}
    rules = network.iptables("iptables-save").splitlines()
    found |= {
        f"firewall {line}" for line in rules if line.startswith("-A ") or (line.startswith(":") and " - " in line)
    }
    switches = Path("/proc/sys/net/ipv4/conf").glob("*/forwarding")
    found |= {f"{switch} = {switch.read_text().strip()}" for switch in switches}
    found |= {f"process {pid}" for pid in _processes_elsewhere()}
    return {line for line in found if not OTHER_RIGS.search(line)}


def _processes_elsewhere() -> set[str]:
    """Processes whose pid or network namespace is not ours, without those of other rigs."""
    others = {f"net:[{p.stat().st_ino}]" for p in Path("/run/netns").glob("*") if OTHER_RIGS.search(p.name)}
    ours = [str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("pid", "net")]
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended while we looked, or is a zombie
            pid, net = (str((process / "ns" / kind).readlink()) for kind in ("pid", "net"))
            of_another = net in others or OTHER_RIGS.search((process / "cgroup").read_text())
            if [pid, net] != ours and not of_another:
                found.add(f"{process.name} {(process / 'comm').read_text().strip()}")
    return found


TINY_IMAGE = "exl3kit-test-tiny:1"


def tiny_root(template: str) -> bytes:
    """A root file system of one static program, as a tar archive of 2 MB."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(Path(template) / "usr/bin/busybox", "bin/busybox")
        for applet in ("sh", "sleep", "cat", "id", "echo", "true", "false", "wget", "httpd"):
            link = tarfile.TarInfo(f"bin/{applet}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(link)
    return buffer.getvalue()


def import_tiny(rig: Rig, node: str) -> None:
    """Give a host the tiny image."""
    argv = [rig.status["docker"], "--host", rig.docker_host(node), "import", "-", TINY_IMAGE]
    subprocess.run(argv, input=tiny_root(rig.status["template"]), check=True, capture_output=True)
