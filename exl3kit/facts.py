"""Facts of a node, asked of it at every start: its probe, and what follows from it for a rank that is to run there."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from exl3kit import probe as probes
from exl3kit.deployment import NodeFacts
from exl3kit.errors import ExitCode

if TYPE_CHECKING:
    from exl3kit.nodes import Node
    from exl3kit.probe import Engine, Probe

LOOPBACK = "127.0.0.1"


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
    address = node.address or (own_address(peers[0]) if peers else LOOPBACK)
    return of(node.name, address, look(node))


def look(node: Node) -> Probe:
    """The probe of one node: one question to its engine, one ssh round trip.

    Raises `KitError` (unreachable) when the answer lacks what every Linux has.
    """
    engine = probes.engine_of(node.engine.info())
    begun = time.time()
    done = node.run(["sh", "-c", probes.SCRIPT, "sh", "", engine.folder])
    try:
        return probes.parse(done.stdout, engine, asked=begun, answered=time.time())
    except (KeyError, ValueError, IndexError) as error:
        raise node.error(
            "cannot read the facts of this node",
            why=f"{error!r} in its answer {done.stdout[-200:]!r} {done.stderr[-200:]!r}",
            next_step="the kit needs a Linux with /proc and a POSIX shell on every node",
            code=ExitCode.UNREACHABLE,
        ) from error


def parse(name: str, address: str, answer: str, engine: Engine) -> NodeFacts:
    """Facts from the answer to the probe's script; raises KeyError or ValueError when one is missing or no fact."""
    return of(name, address, probes.parse(answer, engine))


def of(name: str, address: str, found: Probe) -> NodeFacts:
    """What a rank needs to know of its node."""
    link = found.link_of(address)
    return NodeFacts(
        name=name,
        address=address,
        interface=link.name if link else None,
        own_name=found.own_name,
        cpus=found.cpus,
        engine=found.engine.id,
        machine=found.machine,
        cache=found.cache,
        uid=found.uid,
        gid=found.gid,
        probe=found,
    )


def own_address(peer: str) -> str:
    """The address of this machine that the way to `peer` begins at; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.connect((peer, 9))
        return str(sender.getsockname()[0])
