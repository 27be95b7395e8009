"""Facts of a node, asked of it at every start: addresses, cores, where the kit keeps its files there."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from exl3kit.deployment import NodeFacts
from exl3kit.errors import ExitCode

if TYPE_CHECKING:
    from exl3kit.nodes import Node

LOOPBACK = "127.0.0.1"

# One line per fact; a POSIX shell and /proc are all it needs, `ip` and `getent` may be missing.
_ASK = """
echo machine $(cat /proc/sys/kernel/random/boot_id)
echo cpus $(grep Cpus_allowed_list /proc/self/status | cut -f 2)
echo uid $(id -u)
echo gid $(id -g)
echo cache "${XDG_CACHE_HOME:-$HOME/.cache}/exl3kit"
echo own_name $(getent ahostsv4 "$(cat /proc/sys/kernel/hostname)" | cut -d ' ' -f 1 | uniq)
ip -o -4 addr show 2>/dev/null | sed 's/^[0-9]*: */interface /'
"""


def gather(nodes: Sequence[Node]) -> dict[str, NodeFacts]:
    """Facts of every node, asked side by side.

    Raises `KitError` (unreachable) naming a node that does not answer the question.
    """
    peers = [node.address for node in nodes if node.address is not None]
    with ThreadPoolExecutor(max_workers=len(nodes)) as pool:
        asked = [pool.submit(ask, node, peers) for node in nodes]
        return {node.name: answer.result() for node, answer in zip(nodes, asked, strict=True)}


def ask(node: Node, peers: Sequence[str]) -> NodeFacts:
    """Facts of one node; `peers` are addresses of the others, from which this machine's own on the fabric follows."""
    done = node.run(["sh", "-c", _ASK])
    address = node.address or (own_address(peers[0]) if peers else LOOPBACK)
    try:
        return parse(node.name, address, done.stdout, engine=str(node.engine.info()["ID"]))
    except (KeyError, ValueError) as error:
        raise node.error(
            "cannot read the facts of this node",
            why=f"{error!r} in its answer {done.stdout[-200:]!r} {done.stderr[-200:]!r}",
            next_step="the kit needs a Linux with /proc and a POSIX shell on every node",
            code=ExitCode.UNREACHABLE,
        ) from error


def parse(name: str, address: str, answer: str, *, engine: str) -> NodeFacts:
    """Facts from the answer to `_ASK`; raises KeyError or ValueError when one is missing or no fact."""
    facts: dict[str, str] = {}
    interfaces: dict[str, str] = {}
    for line in answer.splitlines():
        key, _, rest = line.partition(" ")
        if key == "interface":  # eth0 inet 10.77.0.1/24 brd ... (a veth is listed as eth0@if5 in `ip link` only)
            words = rest.split()
            interfaces[words[2].partition("/")[0]] = words[0]
        else:
            facts[key] = rest.strip()
    return NodeFacts(
        name=name,
        address=address,
        interface=interfaces.get(address),
        own_name=tuple(facts["own_name"].split()),
        cpus=cores(facts["cpus"]),
        engine=engine,
        machine=facts["machine"],
        cache=facts["cache"],
        uid=int(facts["uid"]),
        gid=int(facts["gid"]),
    )


def cores(text: str) -> tuple[int, ...]:
    """`0-2,5` as (0, 1, 2, 5); raises ValueError for anything else."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def own_address(peer: str) -> str:
    """The address of this machine that the way to `peer` begins at; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return str(probe.getsockname()[0])
