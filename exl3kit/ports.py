"""Ports of a node: which are taken, and by whom, before anything is started or stopped."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from exl3kit.deployment import LABEL
from exl3kit.errors import ExitCode
from exl3kit.probe import owner_in

if TYPE_CHECKING:
    from exl3kit.nodes import Node

LISTENING = "0A"  # the state's code in /proc/net/tcp
BOUND = "07"  # and in /proc/net/udp


def require_free(node: Node, wanted: Iterable[int], *, spare: str) -> None:
    """Refuse when a wanted port of the node is listened on by anything but the deployment `spare`, which makes way.

    Raises `KitError` (preflight) that names the port and its owner.
    """
    taken = listening(node)
    for port in wanted:
        if port not in taken:
            continue
        deployment = deployment_on(node, port)
        if deployment == spare:
            continue
        owner = f"deployment {deployment}" if deployment else owner_of(node, port)
        stop = f"`kit down {deployment}` with the same --nodes" if deployment else "stop that"
        raise node.error(
            f"port {port} is in use",
            why=f"by {owner}" if owner else None,
            next_step=f"{stop}, or choose another with `--set serve.port=...`",
            code=ExitCode.PREFLIGHT,
        )


def require_free_udp(node: Node, port: int, *, spare: str) -> None:
    """Refuse when the supervisors' port is taken on a node where the deployment `spare`, which makes way, does not run.

    Raises `KitError` (preflight).
    """
    if port not in parse(node.run(["cat", "/proc/net/udp", "/proc/net/udp6"]).stdout, state=BOUND):
        return
    running = node.engine.containers.list(filters={"label": f"{LABEL}deployment={spare}"}, ignore_removed=True)
    if not running:
        raise node.error(
            f"port {port} (UDP) is in use",
            why="the ranks' supervisors talk over it: serve.port + 20000",
            next_step=f"`ss -lunp sport = :{port}` there shows by what; or choose another with `--set serve.port=...`",
            code=ExitCode.PREFLIGHT,
        )


def listening(node: Node) -> set[int]:
    """TCP ports that something on the node listens on."""
    return parse(node.run(["cat", "/proc/net/tcp", "/proc/net/tcp6"]).stdout)


def parse(table: str, *, state: str = LISTENING) -> set[int]:
    """Listening ports of /proc/net/tcp and tcp6, or bound ones of udp and udp6."""
    ports = set()
    for line in table.splitlines():
        words = line.split()
        if len(words) > 3 and words[3] == state:
            ports.add(int(words[1].rpartition(":")[2], 16))
    return ports


def deployment_on(node: Node, port: int) -> str | None:
    """The kit's own deployment that runs on the node's engine and has this port."""
    for container in node.engine.containers.list(filters={"label": LABEL + "ports"}, ignore_removed=True):
        if str(port) in container.labels[LABEL + "ports"].split(","):
            return str(container.labels[LABEL + "deployment"])
    return None


def owner_of(node: Node, port: int) -> str | None:
    """The process that listens, as far as the node's user may see."""
    if node.run(["sh", "-c", "command -v ss"]).returncode != 0:
        return None
    return owner_in(node.run(["ss", "-Hltnp", f"sport = :{port}"]).stdout)
