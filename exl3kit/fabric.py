"""The fabric: which interface and RDMA ports a rank talks over, found from its address, and what NCCL is told of them.

Pure. A port is used because its GID table maps to an address of the fabric, never because of its name: names differ
between machines and between boots. A second port is used where it is a twin: the same connector seen through another
PCIe function, as on a GB10, whose one cable reaches its full rate only over both.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from exl3kit.probe import Hca, Link, Probe

ROCE = "RoCE v2"
NETWORK_NAMES = ("NCCL_", "GLOO_")  # variables of the ranks' network
LOG_FILE = "nccl.%h.%p"  # in the rank's run folder: NCCL's word for host and process


@dataclass(frozen=True)
class Port:
    """An RDMA port that a rank can use: its GID `gid` is RoCE v2 and maps to `address`, with prefix length."""

    hca: str
    port: int
    link: str
    address: str
    gid: int

    @property
    def network(self) -> ipaddress.IPv4Network:
        return ipaddress.IPv4Interface(self.address).network


@dataclass(frozen=True)
class Fabric:
    """One node's side of the fabric: the interface of its address, and its RDMA ports, the address's own first."""

    link: Link | None
    ports: tuple[Port, ...]


def find(probe: Probe, address: str) -> Fabric:
    """The fabric of one node, as far as its own facts tell."""
    link = probe.link_of(address)
    if link is None:
        return Fabric(None, ())
    own = [(hca, port) for hca in probe.hcas if (port := usable(probe, hca, link)) is not None]
    if not own:
        return Fabric(link, ())
    first = own[0][0]
    twins = [port for hca in probe.hcas if is_twin(hca, first) and (port := usable_anywhere(probe, hca)) is not None]
    return Fabric(link, (own[0][1], *twins))


def usable(probe: Probe, hca: Hca, link: Link) -> Port | None:
    """The port on an interface, when it is active and a RoCE v2 GID of it maps to an address of the interface."""
    if not hca.active or not link.carrier:
        return None
    by_address = {one.partition("/")[0]: one for one in link.addresses}
    for gid in hca.gids:
        if gid.kind == ROCE and gid.address in by_address and gid.link == link.name:
            return Port(hca.name, hca.port, link.name, by_address[gid.address], gid.index)
    return None


def usable_anywhere(probe: Probe, hca: Hca) -> Port | None:
    """The port on whichever interface it has."""
    names = {gid.link for gid in hca.gids}
    found = (usable(probe, hca, link) for link in probe.links if link.name in names)
    return next((port for port in found if port is not None), None)


def is_twin(one: Hca, other: Hca) -> bool:
    """Whether two adapters are the same bus, device and function of different PCIe domains: one connector, two ways."""
    return one.pci != other.pci and one.pci.partition(":")[2] == other.pci.partition(":")[2] != ""


def together(fabrics: Sequence[Fabric]) -> list[Fabric]:
    """What all nodes can use of each other: a twin only where every node has one in the same network."""
    common = None
    for one in fabrics:
        networks = {port.network for port in one.ports[1:]}
        common = networks if common is None else common & networks
    return [
        Fabric(one.link, tuple(port for number, port in enumerate(one.ports) if not number or port.network in common))
        for one in fabrics
        if common is not None
    ]


def environment(probes: Sequence[Probe | None], addresses: Sequence[str], rank: int, *, rdma: bool) -> dict[str, str]:
    """What NCCL and Gloo are told on the node of `rank`.

    Parameters
    ----------
    probes, addresses: of every rank's node; a node that was not probed gets nothing.
    rdma: the recipe requires RDMA, so NCCL must fail rather than go on over TCP when its adapters do not work.
    """
    if any(probe is None for probe in probes):
        return {}
    found = together(
        [find(probe, address) for probe, address in zip(probes, addresses, strict=True) if probe is not None]
    )
    mine = found[rank]
    env = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}  # for `kit status`: which transport was taken
    if mine.link is not None:
        # `=` makes NCCL match the whole name; without it, eth1 would also take eth10
        env |= {"NCCL_SOCKET_IFNAME": f"={mine.link.name}", "GLOO_SOCKET_IFNAME": mine.link.name}
    if all(one.ports for one in found):
        env["NCCL_IB_HCA"] = "=" + ",".join(f"{port.hca}:{port.port}" for port in mine.ports)
        env |= gid_index(mine.ports)
    elif not rdma:
        env["NCCL_IB_DISABLE"] = "1"  # said, instead of an adapter that fails and a fall back without a word
    if rdma:
        env["NCCL_NET"] = "IB"
    return env


def gid_index(ports: Sequence[Port]) -> dict[str, str]:
    """NCCL takes one GID index for all adapters; where they differ, it is told what to look for in each table."""
    indices = {port.gid for port in ports}
    if len(indices) == 1:
        return {"NCCL_IB_GID_INDEX": str(indices.pop())}
    return {"NCCL_IB_ROCE_VERSION_NUM": "2", "NCCL_IB_ADDR_FAMILY": "AF_INET"}


@dataclass(frozen=True)
class Setting:
    """One variable of a rank's network environment, and where its value comes from."""

    name: str
    value: str
    source: str  # facts, or recipe
    instead_of: str | None = None  # what the facts said, where the recipe says something else


def settings(found: Mapping[str, str], users: Mapping[str, str]) -> list[Setting]:
    """The network environment that a rank really gets: the recipe's own values win, and are shown to."""
    told = []
    for name in sorted({*found, *(name for name in users if name.startswith(NETWORK_NAMES))}):
        if name in users:
            other = found.get(name)
            told.append(Setting(name, users[name], "recipe", other if other != users[name] else None))
        else:
            told.append(Setting(name, found[name], "facts"))
    return told


def strangers(probe: Probe, users: Mapping[str, str]) -> list[str]:
    """A sentence for every adapter or interface that the recipe's environment names and the node does not have."""
    links, hcas = {one.name for one in probe.links}, {one.name for one in probe.hcas}
    found = []
    for name, there in (("NCCL_IB_HCA", hcas), ("NCCL_SOCKET_IFNAME", links), ("GLOO_SOCKET_IFNAME", links)):
        value = users.get(name, "")
        if value.startswith("^"):
            continue  # names that are not to be used
        exact = value.startswith("=") or name.startswith("GLOO")
        for word in filter(None, value.lstrip("=").split(",")):
            wanted = word.partition(":")[0] if name == "NCCL_IB_HCA" else word
            if not any(one == wanted or (not exact and one.startswith(wanted)) for one in there):
                found.append(
                    f"{name} of the recipe names {wanted}, and the node has {', '.join(sorted(there)) or 'none'}"
                )
    return found
