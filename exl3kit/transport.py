"""The transport proof: what each rank really talks over, from NCCL's own log and from its open connections.

NCCL falls back from RDMA to TCP without a word above INFO, five times slower; Gloo takes whatever interface the host's
name leads to. So nothing here is read from settings. Pure, but for `look`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from exl3kit import asking
from exl3kit.errors import ExitCode, KitError

if TYPE_CHECKING:
    from exl3kit.containers import Standing

RDMA, TCP, LOCAL, UNKNOWN, NONE = "rdma", "tcp", "local", "unknown", "none"
LOOK_SECONDS = 30.0

# NET/IB : Using [0]rocep1s0f0:1/RoCE [1]roceP2p1s0f0:1/RoCE [RO]; OOB enp1s0f0np0:10.0.0.1<0>
_USING = re.compile(r"NCCL INFO NET/([^:]+?) ?: Using (.*?)(?:; OOB .*)?$")
_DEVICE = re.compile(r"\[(\d+)\](\S+)")
# Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0(1)/GDRDMA/Shared comm 0x2083dd50 nRanks 02
_CHANNEL = re.compile(
    r"NCCL INFO (?:Channel|Ring) [\d/]+ : (\d+)\S* -> (\d+)\S* (?:\[(send|receive)\] )?via (.+?)(?: comm .*)?$"
)
# NET/IB: NCCL Dev 0 IbDev 0 Port 1 qpn 583 mtu 3 query_ece={...} GID 3 (0/6500000AFFFF0000) fifoRkey=... fifoLkey=...
_GID = re.compile(r"NET/IB: .*\bIbDev (\d+) Port (\d+) .*\bGID (\d+) \(")


@dataclass(frozen=True)
class Transport:
    """What one rank talks over.

    `kind`: rdma, tcp (NCCL over sockets, or Gloo), local (between GPUs of one machine), none (a gang of one), unknown.
    `says` is for people. `channels` counts NCCL's connections by their way.
    """

    kind: str
    says: str
    devices: tuple[str, ...] = ()
    gids: tuple[int, ...] = ()
    channels: Mapping[str, int] = field(default_factory=dict)
    counters: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def of_nccl(lines: Iterable[str]) -> Transport | None:
    """The transport that NCCL's lines tell; None when it has connected nothing."""
    devices: dict[str, dict[int, str]] = {}
    gids: dict[int, int] = {}
    ways: Counter[str] = Counter()
    used: dict[str, set[int]] = {}
    for line in lines:
        if using := _USING.search(line):
            devices[using[1]] = {int(number): name for number, name in _DEVICE.findall(using[2])}
        elif gid := _GID.search(line):
            gids[int(gid[1])] = int(gid[3])
        elif channel := _CHANNEL.search(line):
            net = re.match(r"NET/([^/]+)/(\d+)", channel[4])
            way = f"NET/{net[1]}" if net else channel[4].partition(" ")[0]
            ways[way + ("/GDRDMA" if "/GDRDMA" in channel[4] else "")] += 1
            if net:
                used.setdefault(net[1], set()).add(int(net[2]))
    if not ways:
        return None
    names = tuple(
        devices.get(net, {}).get(number, f"{net} {number}") for net in sorted(used) for number in sorted(used[net])
    )
    told_gids = tuple(sorted(set(gids.values())))
    kind = LOCAL if not used else RDMA if set(used) == {"IB"} else TCP
    return Transport(kind, in_words(kind, names, told_gids, ways), names, told_gids, dict(ways))


def in_words(kind: str, names: Sequence[str], gids: Sequence[int], ways: Mapping[str, int]) -> str:
    """`RDMA over rocep1s0f0:1/RoCE, GID 3` and its like."""
    if kind == LOCAL:
        return ", ".join(sorted(ways))
    short = [name.partition("<")[0] for name in names]
    over = ", ".join(short)
    if kind == RDMA:
        gid = f", GID {'/'.join(map(str, gids))}" if gids else ""
        return f"RDMA over {over}{gid}" + (", GPUDirect" if any("GDRDMA" in way for way in ways) else "")
    return f"TCP over {over}, {' and '.join(sorted(way for way in ways if way.startswith('NET/')))}"


def of_connections(found: Sequence[Sequence[Any]]) -> Transport:
    """The transport of a rank without NCCL: its open connections to others."""
    if not found:
        return Transport(NONE, "-")
    names = sorted({str(name) for name, _, _ in found})
    peers = sorted({str(there) for _, _, there in found})
    return Transport(TCP, f"Gloo, TCP over {', '.join(names)} to {', '.join(peers)}", tuple(names))


def read(told: Mapping[str, Any], *, gpu: bool, alone: bool, port: int) -> Transport:
    """One rank's transport, from what `exl3kit.aboard.network_look` printed in its container.

    Parameters
    ----------
    gpu: the rank computes on GPUs, so its tensors go through NCCL and its TCP connections are for arrangements only.
    alone: the gang has no other rank in another container.
    port: of the API, whose clients' connections are no transport.
    """
    if alone:
        return of_nccl(told["nccl"]) or Transport(NONE, "-")
    if not gpu:
        return of_connections([one for one in told["connections"] if one[1] != port])
    found = of_nccl(told["nccl"])
    if found is None:
        debug = told.get("debug")
        why = "NCCL has told nothing" if debug == "INFO" else f"NCCL_DEBUG is {debug}, and it tells at INFO only"
        return Transport(UNKNOWN, f"unknown: {why}", counters=told["counters"])
    return Transport(found.kind, found.says, found.devices, found.gids, found.channels, told["counters"])


def look(standing: Sequence[Standing]) -> list[Transport]:
    """The transport of every running rank, asked side by side; unknown where a rank cannot be asked."""
    with ThreadPoolExecutor(max_workers=max(1, len(standing))) as pool:
        return list(pool.map(look_at, standing))


def look_at(one: Standing) -> Transport:
    """The transport of one rank, by a program run in its container."""
    from exl3kit.aboard import network_look

    try:
        told = asking.program(one, network_look, patience=LOOK_SECONDS)
    except KitError as error:
        return Transport(UNKNOWN, f"unknown: {error.what}")
    port = int(one.label("ports").partition(",")[0] or 0)
    return read(told, gpu=one.has_gpu, alone=one.label("ranks") == "1", port=port)


def require_rdma(standing: Sequence[Standing], found: Sequence[Transport]) -> None:
    """Refuse a gang of several nodes of which a rank does not talk over RDMA, whatever was asked of NCCL.

    Raises `KitError` (verification) that names rank, node and what it uses instead.
    """
    if len({one.node.name for one in standing}) < 2:
        return
    for one, transport in zip(standing, found, strict=True):
        if transport.kind != RDMA:
            raise one.node.error(
                f"rank {one.rank} uses {transport.says}, and the recipe requires RDMA",
                why="told by NCCL's own log after the first answer",
                next_step="`kit doctor` looks at adapters, GIDs and links of every node; `fabric: {require: any}` "
                "accepts TCP, about five times slower",
                code=ExitCode.VERIFICATION,
            )
