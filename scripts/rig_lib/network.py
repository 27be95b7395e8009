"""The rig's network: one bridge, a cable per node, and the firewall rules that let packets through."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from .plan import BRIDGE, GATEWAY, NETWORK, NUMBER, PREFIX, Node
from .shell import run
from .template import any_operator_template

CHAIN = f"EXL3KIT-RIG-{NUMBER}"
NAMESPACES = Path("/run/netns")
PARENTS = {"filter": "FORWARD", "nat": "POSTROUTING"}


def uplink() -> tuple[str, int]:
    """Device and MTU of this machine's default route; the loopback device and 1500 where there is none."""
    routes = json.loads(run("ip", "-json", "route", "show", "default").stdout or "[]")
    if not routes:
        return "lo", 1500
    device = routes[0]["dev"]
    return device, int(Path(f"/sys/class/net/{device}/mtu").read_text())


def exists() -> bool:
    return Path(f"/sys/class/net/{BRIDGE}").exists()


def create_bridge() -> None:
    run("ip", "link", "add", BRIDGE, "mtu", str(uplink()[1]), "type", "bridge")
    run("ip", "address", "add", f"{GATEWAY}/24", "dev", BRIDGE)
    run("ip", "link", "set", BRIDGE, "up")


def connect(node: Node, *, twin: bool = False) -> None:
    """Make the node's network namespace and plug it into the bridge, with a second cable for `twin`."""
    mtu = str(uplink()[1])  # larger packets would be lost behind the bridge: some clouds give less than 1500
    run("ip", "netns", "add", node.namespace)
    inside = ("ip", "-netns", node.namespace)
    run("ip", "link", "add", node.veth, "mtu", mtu, "type", "veth", "peer", "eth0", "mtu", mtu, "netns", node.namespace)
    run("ip", "link", "set", node.veth, "master", BRIDGE, "up")
    run(*inside, "link", "set", "lo", "up")
    run(*inside, "address", "add", f"{node.address}/24", "dev", "eth0")
    run(*inside, "link", "set", "eth0", "up")
    run(*inside, "route", "add", "default", "via", GATEWAY)
    if twin:
        ends = ("mtu", mtu, "type", "veth", "peer", "eth1", "mtu", mtu, "netns", node.namespace)
        run("ip", "link", "add", node.twin_veth, *ends)
        run("ip", "link", "set", node.twin_veth, "master", BRIDGE, "up")
        run(*inside, "address", "add", f"{node.twin_address}/24", "dev", "eth1")
        run(*inside, "link", "set", "eth1", "up")


def link_up(node: Node) -> None:
    """Plug the cable in, at full speed."""
    run("tc", "qdisc", "delete", "dev", node.veth, "root", check=False)
    run("tc", "-netns", node.namespace, "qdisc", "delete", "dev", "eth0", "root", check=False)
    run("ip", "link", "set", node.veth, "up")


def link_down(node: Node) -> None:
    """Pull the cable at the bridge's end: the node sees its carrier go."""
    run("ip", "link", "set", node.veth, "down")


def link_slow(node: Node, mbit: float) -> None:
    """Limit both directions of the cable (a token bucket: netem is missing from many kernels)."""
    limit = ("root", "tbf", "rate", f"{int(mbit * 1000)}kbit", "burst", "128kb", "latency", "100ms")
    run("tc", "qdisc", "replace", "dev", node.veth, *limit)
    run("tc", "-netns", node.namespace, "qdisc", "replace", "dev", "eth0", *limit)


def link_state(node: Node) -> str:
    """`up`, `down` or `slow`; `missing` after an `up` that did not get so far."""
    flags = Path(f"/sys/class/net/{node.veth}/flags")
    if not flags.exists():
        return "missing"
    if not int(flags.read_text(), 16) & 1:
        return "down"
    return "slow" if "tbf" in run("tc", "qdisc", "show", "dev", node.veth).stdout else "up"


def namespaces() -> list[str]:
    return sorted(p.name for p in NAMESPACES.glob(f"{PREFIX}-*")) if NAMESPACES.exists() else []


def namespace_processes() -> set[int]:
    return {int(pid) for name in namespaces() for pid in run("ip", "netns", "pids", name, check=False).stdout.split()}


def remove() -> None:
    """Remove the namespaces, cables and bridge of every node."""
    for name in namespaces():
        run("ip", "netns", "delete", name)
    if NAMESPACES.exists() and not any(NAMESPACES.iterdir()):
        run("umount", str(NAMESPACES), check=False)  # the first `ip netns add` mounts it, and nothing unmounts it
        NAMESPACES.rmdir()
    for device in Path("/sys/class/net").glob(f"{PREFIX}*"):
        run("ip", "link", "delete", device.name, check=False)  # the far end of a cable may have gone with its namespace


# -- firewall ---------------------------------------------------------------------------------------------------------


def iptables(program: str, *argv: str, stdin: str | None = None) -> str:
    """Run iptables of the operator's template in this machine's network, so that the machine needs none of its own."""
    template = any_operator_template()
    if template is None:
        return run(program, *argv, stdin=stdin).stdout if shutil.which(program) else ""
    script = 'mount -t tmpfs tmpfs "$0/run" && exec chroot "$0" "$@"'  # its lock file goes on the tmpfs
    return run("unshare", "--mount", "sh", "-c", script, str(template), program, *argv, stdin=stdin).stdout


def open_firewall(nat: bool) -> None:
    """Let nodes reach each other, and with `nat` the world.

    A host that ever ran an engine drops forwarded packets, those within our bridge too. Without NAT, packets for
    elsewhere are rejected, so that a node without a network fails at once and not after a timeout.
    """
    inner = [f"-A {CHAIN} -i {BRIDGE} -o {BRIDGE} -j ACCEPT"]
    if nat:
        inner += [f"-A {CHAIN} -i {BRIDGE} -j ACCEPT"]
        inner += [f"-A {CHAIN} -o {BRIDGE} -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"]
    else:
        inner += [f"-A {CHAIN} -i {BRIDGE} -j REJECT --reject-with icmp-net-unreachable"]
    rules = ["*filter", f":{CHAIN} - [0:0]", *inner, f"-I {PARENTS['filter']} 1 -j {CHAIN}", "COMMIT"]
    if nat:
        masquerade = f"-A {CHAIN} -s {NETWORK} ! -d {NETWORK} -j MASQUERADE"
        rules += ["*nat", f":{CHAIN} - [0:0]", masquerade, f"-I {PARENTS['nat']} 1 -j {CHAIN}", "COMMIT"]
    iptables("iptables-restore", "--noflush", stdin="\n".join(rules) + "\n")


def close_firewall() -> None:
    """Take our rules out again, wherever they are."""
    saved = iptables("iptables-save")
    table = ""
    undo: dict[str, list[str]] = {}
    for line in saved.splitlines():
        table = line[1:] if line.startswith("*") else table
        if line == f"-A {PARENTS.get(table, '')} -j {CHAIN}":
            undo.setdefault(table, []).insert(0, line.replace("-A", "-D", 1))
        elif line.startswith(f":{CHAIN} "):
            undo.setdefault(table, []).extend([f"-F {CHAIN}", f"-X {CHAIN}"])
    rules = [line for table, lines in undo.items() for line in (f"*{table}", *lines, "COMMIT")]
    if rules:
        iptables("iptables-restore", "--noflush", stdin="\n".join(rules) + "\n")


def _forwarding(device: str) -> Path:
    return Path(f"/proc/sys/net/ipv4/conf/{device}/forwarding")


def forward(memory: Path, nat: bool) -> None:
    """Forward packets that come from the nodes, and with `nat` those that come back; `memory` keeps what was before."""
    _forwarding(BRIDGE).write_text("1")
    device = uplink()[0]
    if nat and _forwarding(device).read_text().strip() == "0":
        memory.write_text(device)
        _forwarding(device).write_text("1")


def stop_forwarding(memory: Path) -> None:
    """Undo `forward`, unless the whole machine has become a router in the meantime."""
    if memory.exists() and Path("/proc/sys/net/ipv4/ip_forward").read_text().strip() == "0":
        _forwarding(memory.read_text()).write_text("0")
