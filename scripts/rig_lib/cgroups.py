"""A control group per node: its containers are accounted to it, and `down` finds every process through it."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .plan import PREFIX, Node
from .shell import RigError

ROOT = "/sys/fs/cgroup"
# Mount options of a version 1 hierarchy that are no controller.
NOT_A_CONTROLLER = re.compile(r"rw|ro|xattr|clone_children|cpuset_v2_mode|release_agent=.*")


@dataclass(frozen=True)
class Hierarchy:
    """A mounted control group hierarchy; version 1 has one per controller, version 2 has one for all."""

    mount: Path
    fstype: str
    options: str

    @property
    def is_unified(self) -> bool:
        """Version 2 with all controllers, as systemd mounts it on Debian 12 and 13."""
        return self.fstype == "cgroup2" and str(self.mount) == ROOT

    @property
    def mount_line(self) -> str:
        """What node-init.sh needs to mount it again inside a node: folder, type, options."""
        return f"{self.mount} {self.fstype} {self.options}"

    def group(self, node: Node | None = None) -> Path:
        return self.mount / PREFIX / (node.name if node else "")

    def leaf(self, node: Node) -> Path:
        """Where a node's processes live. Version 2 lets only leaves have processes, so there they get their own."""
        return self.group(node) / "init" if self.is_unified else self.group(node)


def hierarchies() -> list[Hierarchy]:
    """The hierarchies mounted under /sys/fs/cgroup.

    Raises:
        RigError: when there is none, as an engine cannot run then.
    """
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, right = line.split(" - ")
        mount, (fstype, _, super_options) = left.split()[4], right.split(maxsplit=2)
        if fstype not in ("cgroup", "cgroup2") or not f"{mount}/".startswith(f"{ROOT}/"):
            continue
        controllers = [o for o in super_options.split(",") if not NOT_A_CONTROLLER.fullmatch(o)]
        if fstype == "cgroup" and all(o.startswith("name=") for o in controllers):
            controllers.insert(0, "none")
        found.append(Hierarchy(Path(mount), fstype, "rw" if fstype == "cgroup2" else ",".join(controllers)))
    if not found:
        raise RigError(f"no control groups are mounted under {ROOT}, and an engine needs them.")
    return found


def create(node: Node) -> None:
    """Make the node's group in every hierarchy, with all that its parent may give."""
    for hierarchy in hierarchies():
        for group in (hierarchy.group(), hierarchy.group(node), hierarchy.leaf(node)):
            if group.exists():
                continue
            if hierarchy.is_unified:
                _enable_controllers(group.parent)
            group.mkdir()
            for name in ("cpuset.cpus", "cpuset.mems"):  # version 1 starts empty, and then no process may enter
                file = group / name
                if hierarchy.fstype == "cgroup" and file.exists():
                    file.write_text((group.parent / name).read_text())


def _enable_controllers(group: Path) -> None:
    available = (group / "cgroup.controllers").read_text().split()
    for controller in available:
        with suppress(OSError):  # one that the kernel will not delegate here is one the node does without
            (group / "cgroup.subtree_control").write_text(f"+{controller}")


def enter(node: Node) -> None:
    """Move this process into the node's groups, at the level that becomes the root of the node's own view."""
    for hierarchy in hierarchies():
        (hierarchy.group(node) / "cgroup.procs").write_text(str(os.getpid()))


def enter_leaf(node: Node) -> None:
    """Move this process to where the node's processes are."""
    for hierarchy in hierarchies():
        (hierarchy.leaf(node) / "cgroup.procs").write_text(str(os.getpid()))


def processes(node_name: str | None = None) -> set[int]:
    """Every process of a node, or of all nodes, containers included."""
    found: set[int] = set()
    for hierarchy in hierarchies():
        for file in (hierarchy.group() / (node_name or "")).rglob("cgroup.procs"):
            with suppress(OSError):  # the group vanished while we looked
                found.update(map(int, file.read_text().split()))
    return found - {0}


def remove() -> None:
    """Remove the groups of all nodes, innermost first. Their processes must be gone.

    Raises:
        OSError: when a group still has processes.
    """
    for hierarchy in hierarchies():
        root = hierarchy.group()
        if root.exists():
            for folder, _, _ in os.walk(root, topdown=False):
                Path(folder).rmdir()
