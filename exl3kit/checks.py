"""Checks of nodes before anything runs on them. Pure: probes in, findings out; what a machine says is never assumed.

What a finding calls known trouble was reported by people who run these machines; the sentence says what of it is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from exl3kit import fabric
from exl3kit.probe import Probe

Level = Literal["ok", "warn", "refuse"]

SKEW_SECONDS = 2.0  # logs of two nodes can no longer be read side by side beyond this
JUMBO = 9000
FREE_SHARE, FREE_BYTES = 0.05, 5_000_000_000  # of a disk; an image needs twice its size while it is unpacked
SLOW_SHARE = 0.1  # one TCP stream reaches far more than a tenth of a healthy link


@dataclass(frozen=True)
class Finding:
    """What one check says of one node (or of two, `a-b`), and what to do about it."""

    node: str
    check: str
    level: Level
    says: str
    fix: str | None = None


@dataclass(frozen=True)
class Standing:
    """A container of the kit that stands on a node."""

    name: str
    deployment: str
    rank: int
    ranks: int
    generation: str
    running: bool
    ports: tuple[int, ...] = ()
    health: str | None = None  # the engine's word for the rank's own check: starting, healthy, unhealthy


@dataclass(frozen=True)
class Need:
    """What a recipe asks of its nodes; the defaults are those of no recipe."""

    deployment: str | None = None  # its own ranks make way
    gpu: bool = False
    capabilities: tuple[str, ...] = ()
    cuda: str | None = None  # the image's
    several: bool = False  # ranks on several machines
    rdma: bool = False
    ports: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # by node
    env: Mapping[str, str] = field(default_factory=dict)  # the recipe's own


@dataclass(frozen=True)
class Place:
    """One node as the checks see it."""

    name: str
    address: str  # on the fabric
    probe: Probe
    standing: tuple[Standing, ...] = ()

    @property
    def fabric(self) -> fabric.Fabric:
        return fabric.find(self.probe, self.address)

    def find(self, check: str, level: Level, says: str, fix: str | None = None) -> Finding:
        return Finding(self.name, check, level, says, fix)


def engine(place: Place, need: Need) -> Iterator[Finding]:
    yield place.find("engine", "ok", f"Docker {place.probe.engine.version}")


def gpu(place: Place, need: Need) -> Iterator[Finding]:
    """The GPUs, the way into a container, and machine code for them."""
    probe = place.probe
    bad: Level = "refuse" if need.gpu else "warn"
    if not probe.gpus:
        if probe.gpu_fault or need.gpu:
            why = f"nvidia-smi says: {probe.gpu_fault}" if probe.gpu_fault else "there is no nvidia-smi"
            fix = "install or repair the NVIDIA driver; after its upgrade, reboot"
            yield place.find("GPU", bad, f"no NVIDIA GPU that its driver knows of ({why})", fix)
        else:
            yield place.find("GPU", "ok", "none")
        return
    names = ", ".join(f"{one.name} ({one.capability})" for one in probe.gpus)
    yield place.find("GPU", "ok", f"{names}, driver {probe.gpus[0].driver}, CUDA up to {probe.cuda or 'unknown'}")
    for one in probe.gpus:
        yield from _machine_code(place, one.name, one.capability, need.capabilities)
    yield _gpu_access(place, bad)


def _machine_code(place: Place, name: str, capability: str, compiled: Sequence[str]) -> Iterator[Finding]:
    if not compiled or capability in compiled:
        return
    major, _, minor = capability.partition(".")
    below = [one for one in compiled if one.partition(".")[0] == major and int(one.partition(".")[2]) < int(minor)]
    fix = f'add "{capability}" to image.arch of the recipe and build again'
    listed = ", ".join(compiled)
    if below:
        says = f"{name} is {capability}; code for {below[-1]} should run on it, and was not compiled or measured for it"
        yield place.find("GPU code", "warn", says, fix)
    else:
        says = f"{name} is {capability}, and the image has code for {listed}: no kernel would start"
        yield place.find("GPU code", "refuse", says, fix)


def _gpu_access(place: Place, bad: Level) -> Finding:
    """Whether the engine can hand the GPU to a container, and by which way."""
    probe = place.probe
    stale = [one for one in probe.cdi if one.driver and one.driver != probe.gpus[0].driver]
    if probe.has_runtime:
        if stale:
            says = f"NVIDIA runtime; {stale[0].file} is of driver {stale[0].driver}, so CDI would not find its files"
            return place.find("GPU access", "warn", says, f"`sudo nvidia-ctk cdi generate --output={stale[0].file}`")
        return place.find("GPU access", "ok", "NVIDIA runtime")
    fix = "install nvidia-container-toolkit, `sudo nvidia-ctk runtime configure`, then restart the engine"
    if not probe.cdi:
        return place.find(
            "GPU access", bad, "the engine cannot give a container the GPU: no NVIDIA runtime, no CDI", fix
        )
    if not probe.engine.cdi:
        fix = '`{"features": {"cdi": true}}` in /etc/docker/daemon.json, then restart the engine'
        return place.find("GPU access", bad, f"{probe.cdi[0].file} is there, and the engine reads no CDI", fix)
    if stale:
        says = f"{stale[0].file} is of driver {stale[0].driver}, and {probe.gpus[0].driver} runs: its files are gone"
        return place.find("GPU access", bad, says, f"`sudo nvidia-ctk cdi generate --output={stale[0].file}`")
    return place.find("GPU access", "ok", "CDI")


def driver(place: Place, need: Need) -> Iterator[Finding]:
    """Driver and kernel: new enough for the image's CUDA, and without known trouble."""
    probe = place.probe
    if need.gpu and need.cuda and probe.cuda:
        there, wanted = _version(probe.cuda), _version(need.cuda)
        says = f"the driver runs CUDA up to {probe.cuda}, the image is of {need.cuda}"
        fix = "install a newer NVIDIA driver"
        if there[0] < wanted[0]:
            yield place.find("driver", "refuse", f"{says}: nothing in it would start", fix)
        elif there < wanted:
            yield place.find("driver", "warn", f"{says}: kernels that are compiled at start may fail", fix)
        else:
            yield place.find("driver", "ok", says)
    for one in sorted({one.driver for one in probe.gpus}):
        if one.startswith("590."):
            fix = "driver 580, or `--set serve.enforce_eager=true`"
            says = f"driver {one}: CUDA graph capture that never ends was reported with 590"
            yield place.find("driver", "warn", says, fix)
    if probe.kernel.startswith("6.17.0-1008"):
        fix = "boot another kernel"
        yield place.find("kernel", "warn", f"kernel {probe.kernel}: panics were reported with 6.17.0-1008", fix)
    else:
        yield place.find("kernel", "ok", probe.kernel)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def link(place: Place, need: Need) -> Iterator[Finding]:
    """The interface that carries the node's address."""
    bad: Level = "refuse" if need.several else "warn"
    if place.address.startswith("127."):
        if need.several:
            yield place.find(
                "fabric", "refuse", "loopback: other nodes cannot reach it", "name it by its fabric address"
            )
        return
    found = place.fabric.link
    if found is None:
        fix = "name the node by its address on the fabric (ssh HostName, or `address:` in a cluster file)"
        there = ", ".join(f"{one.name} {' '.join(one.addresses)}" for one in place.probe.links if one.addresses)
        yield place.find("fabric", bad, f"{place.address} is on none of its interfaces ({there})", fix)
        return
    if not found.carrier:
        yield place.find("fabric", bad, f"{found.name} has no carrier", "plug the cable in, at both ends")
        return
    rate = f"{found.speed / 1000:g} Gb/s" if found.speed else "speed not told"
    says = f"{found.name} {place.address}, {rate}, MTU {found.mtu}"
    if found.wireless:
        yield place.find("fabric", "warn", f"{says}: that is Wi-Fi", "use the address of a cable")
    elif need.rdma and found.mtu < JUMBO:
        yield place.find("fabric", "warn", says, f"`sudo ip link set {found.name} mtu {JUMBO}`, on every node")
    else:
        yield place.find("fabric", "ok", says)


def rdma(place: Place, need: Need) -> Iterator[Finding]:
    """The RDMA ports behind the address, their twins and their GIDs."""
    found = place.fabric
    if found.link is None or (not need.rdma and not place.probe.hcas):
        return
    bad: Level = "refuse" if need.rdma else "warn"
    if not found.ports:
        says, fix = _no_port(place, found.link.name)
        yield place.find("RDMA", bad, says, fix)
        return
    told = ", ".join(f"{one.hca}:{one.port} on {one.link} {one.address} GID {one.gid}" for one in found.ports)
    first = next(one for one in place.probe.hcas if one.name == found.ports[0].hca)
    twins = [one for one in place.probe.hcas if fabric.is_twin(one, first)]
    if twins and len(found.ports) == 1:
        fix = f"give the interface of {twins[0].name} an address of a network of its own, on every node"
        says = f"{told}; its twin {twins[0].name} has no usable address, so half of the cable's rate is lost"
        yield place.find("RDMA", "warn", says, fix)
    else:
        yield place.find("RDMA", "ok", told)
    if len({one.gid for one in found.ports}) > 1:
        says = "the twins' GID indices differ: NCCL 2.21 or newer is told to look them up by version and family"
        yield place.find("RDMA", "ok", says)


def _no_port(place: Place, name: str) -> tuple[str, str]:
    """Why no RDMA port serves an interface, and the way out."""
    if not place.probe.hcas:
        return "there is no RDMA adapter", "install its driver (rdma-core), or `--set fabric.require=any` for TCP"
    here = [one for one in place.probe.hcas if name in {gid.link for gid in one.gids}]
    if not here:
        there = ", ".join(f"{one.name} on {'/'.join(sorted({gid.link for gid in one.gids})) or '-'}"
                          for one in place.probe.hcas)  # fmt: skip
        return f"no RDMA adapter is behind {name} ({there})", "name the node by the address of one of these interfaces"
    if not here[0].active:
        return f"{here[0].name} behind {name} is not active", "plug the cable in, at both ends"
    kinds = ", ".join(f"{gid.index}: {gid.address or 'link-local'} {gid.kind}" for gid in here[0].gids)
    return (
        f"no RoCE v2 GID of {here[0].name} maps to {place.address} ({kinds or 'its table is empty'})",
        f"`sudo ip link set {name} down && sudo ip link set {name} up` writes the table anew",
    )


def names(place: Place, need: Need) -> Iterator[Finding]:
    """Adapters and interfaces that the recipe's environment names."""
    for says in fabric.strangers(place.probe, need.env):
        yield place.find(
            "environment", "refuse", says, "remove it from serve.env: the kit reads the names from the node"
        )


def clock(place: Place, need: Need) -> Iterator[Finding]:
    skew, error = place.probe.skew, place.probe.skew_error
    if skew is None:
        return
    if abs(skew) - error > SKEW_SECONDS:
        way = "ahead of" if skew > 0 else "behind"
        says = f"{abs(skew):.0f} s {way} this machine's"
        yield place.find("clock", "warn", says, "`sudo timedatectl set-ntp true` there, or here")
    else:
        yield place.find("clock", "ok", f"within {max(abs(skew), error):.2f} s of this machine's")


def ports(place: Place, need: Need) -> Iterator[Finding]:
    """Ports that the deployment takes on this node, and who has them."""
    wanted = need.ports.get(place.name, ())
    free = []
    for port in wanted:
        if port not in place.probe.listening:
            free.append(str(port))
            continue
        owners = [one.deployment for one in place.standing if one.running and port in one.ports]
        if need.deployment in owners:
            free.append(f"{port} (of {need.deployment} itself)")
            continue
        owner = (
            f"deployment {owners[0]}" if owners else place.probe.listeners.get(port, "a process that ss does not show")
        )
        fix = f"`kit down {owners[0]}`" if owners else "stop it, or choose another with `--set serve.port=...`"
        yield place.find("ports", "refuse", f"port {port} is in use by {owner}", fix)
    if free:
        yield place.find("ports", "ok", f"free: {', '.join(free)}")


def disk(place: Place, need: Need) -> Iterator[Finding]:
    for kind, (free, total) in place.probe.disks.items():
        what = {"engine": f"engine ({place.probe.engine.folder})", "cache": f"weights ({place.probe.cache})"}[kind]
        says = f"{what}: {free / 1e9:.1f} of {total / 1e9:.1f} GB free"
        if free < max(FREE_SHARE * total, FREE_BYTES):
            if total < FREE_BYTES:
                fix = "put it on a larger disk: this one would be too small when empty"
            elif kind == "engine":
                fix = "`docker system prune` there"
            else:
                fix = f"remove old folders of {place.probe.cache}/weights"
            yield place.find("disk", "warn", says, fix)
        else:
            yield place.find("disk", "ok", says)


def memory(place: Place, need: Need) -> Iterator[Finding]:
    """What is free, and what protects a machine whose GPU shares its memory from locking up."""
    found = place.probe.memory
    gib = 1 << 30
    says = (
        f"{found.available / gib:.1f} of {found.total / gib:.1f} GiB available, page cache {found.cached / gib:.1f} GiB"
    )
    yield place.find("memory", "ok", says)
    if not place.probe.unified:
        return
    if found.swap_total:
        says = f"swap is on ({found.swap_total / gib:.1f} GiB): a GPU that shares the memory makes the machine crawl"
        yield place.find("memory", "warn", says, "`sudo swapoff -a` while models run")
    if not found.earlyoom:
        says = (
            "nothing ends a process before the machine locks up: GPU memory is not counted by the kernel's own killer"
        )
        yield place.find("memory", "warn", says, "`sudo apt install earlyoom`")


def leftovers(place: Place, need: Need) -> Iterator[Finding]:
    """Other deployments' containers: those that serve or start, and what is left of gangs that do neither."""
    others = [one for one in place.standing if one.deployment != need.deployment]
    left = 0
    for name in sorted({one.deployment for one in others}):
        here = [one for one in others if one.deployment == name]
        running = [one for one in here if one.running]
        states = sorted({one.health or "without a health check" for one in running})
        if len({one.generation for one in running}) > 1:
            states.append("of several generations")
        ranks = max(one.ranks for one in here)
        says = f"deployment {name}: {len(running)} of its {ranks} ranks run here, {', '.join(states)}"
        # A rank is healthy only in a gang that serves. One that is left alone waits, which looks like starting.
        if running == here and (states == ["healthy"] or (len(here) == ranks and {*states} <= {"healthy", "starting"})):
            yield place.find("deployments", "ok", says)
            continue
        left += 1
        says = says if running else f"deployment {name}: stopped"
        yield place.find("leftovers", "warn" if running else "ok", says, f"`kit down {name}`")
    if not left:
        yield place.find("leftovers", "ok", "none")


PER_NODE: tuple[Callable[[Place, Need], Iterator[Finding]], ...] = (
    engine, gpu, driver, link, rdma, names, clock, ports, disk, memory, leftovers,
)  # fmt: skip


def examine(places: Sequence[Place], need: Need) -> list[Finding]:
    """Every check on every node, and those that compare nodes."""
    found = [finding for place in places for check in PER_NODE for finding in check(place, need)]
    return found + list(_across(places, need))


def _across(places: Sequence[Place], need: Need) -> Iterator[Finding]:
    """What nodes must have alike."""
    pairs = [(place, place.fabric.link) for place in places]
    links = [(place, one) for place, one in pairs if one is not None]
    for what, values in (
        ("MTU", {place.name: one.mtu for place, one in links}),
        ("speed", {place.name: one.speed for place, one in links}),
    ):
        if len(set(values.values())) > 1:
            told = ", ".join(f"{name} {value}" for name, value in values.items())
            fix = "set the same MTU everywhere" if what == "MTU" else "look at cable and switch port of the slower one"
            yield Finding("-".join(values), "fabric", "warn", f"the {what} differs: {told}", fix)
    both = [place.fabric for place in places]
    if len(both) > 1 and all(one.ports for one in both):
        before, after = [len(one.ports) for one in both], [len(one.ports) for one in fabric.together(both)]
        if before != after:
            told = "; ".join(f"{place.name} {', '.join(p.address for p in place.fabric.ports[1:]) or 'none'}"
                             for place in places)  # fmt: skip
            says = f"the twins are in no common network ({told}), so only one port of each node is used"
            yield Finding("-".join(place.name for place in places), "RDMA", "warn", says, "put them into one network")


@dataclass(frozen=True)
class Reached:
    """What one node sent another over TCP: bytes a second, or what failed."""

    source: str
    target: str
    rate: float | None
    fault: str | None = None


def reach(found: Sequence[Reached], places: Mapping[str, Place], need: Need) -> Iterator[Finding]:
    """Whether nodes reach each other on the fabric, and how fast."""
    bad: Level = "refuse" if need.several else "warn"
    for one in found:
        pair = f"{one.source}-{one.target}"
        if one.rate is None:
            address = places[one.target].address
            fix = f"`ping {address}` on {one.source}; then firewalls of both"
            level: Level = "warn" if one.fault and one.fault.startswith("not measured") else bad
            yield Finding(pair, "reach", level, one.fault or "no connection", fix)
            continue
        speeds = [places[name].fabric.link for name in (one.source, one.target)]
        promised = min((link.speed for link in speeds if link is not None and link.speed), default=None)
        says = f"one TCP stream: {one.rate * 8 / 1e9:.1f} Gb/s"
        if promised and one.rate * 8 < SLOW_SHARE * promised * 1e6:
            says += f", of a link of {promised / 1000:g} Gb/s"
            yield Finding(pair, "reach", "warn", says, "look for a way around the fabric: `ip route get` both ways")
        else:
            yield Finding(pair, "reach", "ok", says)
