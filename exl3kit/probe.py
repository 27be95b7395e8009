"""What one node is, read from it in one go: nothing here is a default or guessed, and what cannot be read is None.

One ssh round trip runs `SCRIPT`, which needs a POSIX shell, /proc and /sys; programs that are missing leave gaps. Its
first argument is a folder before /proc, /sys and /etc (empty on a machine), so that a recorded tree reads the same way.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from exl3kit import gpus
from exl3kit.gpus import Gpu

# One line per fact: a key, a blank, the fact. $1: folder before the trees; $2: the engine's data folder.
SCRIPT = r"""
root=$1
echo machine $(cat $root/proc/sys/kernel/random/boot_id)
echo kernel $(cat $root/proc/sys/kernel/osrelease)
echo cpus $(grep Cpus_allowed_list $root/proc/self/status | cut -f 2)
echo uid $(id -u)
echo gid $(id -g)
echo cache "${XDG_CACHE_HOME:-$HOME/.cache}/exl3kit"
echo hub "${HF_HUB_CACHE:-${HF_HOME:-$HOME/.cache/huggingface}/hub}"
echo own_name $(getent ahostsv4 "$(cat $root/proc/sys/kernel/hostname)" 2>/dev/null | cut -d ' ' -f 1 | uniq)
grep -E '^(Mem|Swap)(Total|Free|Available):|^Cached:' $root/proc/meminfo | sed 's/^/meminfo /'
grep -qsx earlyoom $root/proc/[0-9]*/comm && echo earlyoom yes
for program in perl rsync ip ss nvidia-smi nvidia-container-runtime-hook; do
    command -v $program >/dev/null && echo program $program
done
ip -o -4 addr show 2>/dev/null | sed 's/^[0-9]*: */interface /'
for link in $root/sys/class/net/*; do
    [ -e "$link/mtu" ] || continue
    radio=wired; [ -e "$link/wireless" ] || [ -e "$link/phy80211" ] && radio=wireless
    echo link "${link##*/}" "$(cat "$link/mtu")" "carrier:$(cat "$link/carrier" 2>/dev/null)" \
        "speed:$(cat "$link/speed" 2>/dev/null)" $radio
done
nothing=0000:0000:0000:0000:0000:0000:0000:0000
for port in $root/sys/class/infiniband/*/ports/*; do
    [ -e "$port/state" ] || continue
    hca=${port%/ports/*}; name=${hca##*/}; number=${port##*/}
    pci=$(readlink "$hca/device" 2>/dev/null)
    echo hca "$name" "$number" "${pci##*/}" "$(cat "$port/link_layer")" "$(cut -d : -f 1 "$port/state")" \
        "$(cat "$port/rate")"
    (cd "$port/gids" && grep -Hv "^$nothing\$" * 2>/dev/null | sed "s/^/gid_value $name $number /")
    (cd "$port/gid_attrs/types" && grep -H . * 2>/dev/null | sed "s/^/gid_type $name $number /")
    (cd "$port/gid_attrs/ndevs" && grep -H . * 2>/dev/null | sed "s/^/gid_link $name $number /")
done
grep -hs ' 0A ' $root/proc/net/tcp $root/proc/net/tcp6 | sed 's/^/tcp /'
ss -Hltnp 2>/dev/null | sed 's/^/listener /'
if command -v nvidia-smi >/dev/null; then
    said=$(nvidia-smi --query-gpu=name,compute_cap,driver_version,memory.total,memory.free \
        --format=csv,noheader,nounits 2>&1)
    if [ $? = 0 ]; then echo "$said" | sed 's/^/gpu /'; else echo gpu_fault $said; fi
    nvidia-smi 2>/dev/null | grep -o 'CUDA Version: *[0-9.]*' | sed 's/.*: */cuda /'
fi
for spec in $root/etc/cdi/* $root/var/run/cdi/*; do
    grep -qs 'nvidia.com/gpu' "$spec" && echo cdi "${spec#$root}" $(grep -o 'libcuda\.so\.[0-9.]*' "$spec" | head -n 1)
done
home="${XDG_CACHE_HOME:-$HOME/.cache}"; [ -d "$home" ] || home=$HOME
df -P -B1 "$2" 2>/dev/null | sed -n '2s/^/disk engine /p'
df -P -B1 "$home" | sed -n '2s/^/disk cache /p'
echo clock $(date +%s.%N)
"""


@dataclass(frozen=True)
class Link:
    """A network interface. `speed` is in Mb/s, `addresses` are IPv4 with their prefix length."""

    name: str
    addresses: tuple[str, ...]
    mtu: int
    carrier: bool
    speed: int | None
    wireless: bool = False


@dataclass(frozen=True)
class Gid:
    """An entry of an HCA port's table; `address` is its IPv4 address when it is mapped from one."""

    index: int
    address: str | None
    kind: str
    link: str


@dataclass(frozen=True)
class Hca:
    """A port of an RDMA adapter. `state` 4 is active; `pci` is its function, such as 0000:01:00.0."""

    name: str
    port: int
    pci: str
    layer: str
    state: int
    rate: str
    gids: tuple[Gid, ...] = ()

    @property
    def active(self) -> bool:
        return self.state == 4


@dataclass(frozen=True)
class Memory:
    """Of the machine, in bytes. `available` counts what the kernel would give back of its page cache."""

    total: int
    free: int
    available: int
    cached: int
    swap_total: int
    swap_free: int
    earlyoom: bool


@dataclass(frozen=True)
class Engine:
    """The node's container engine, as it describes itself."""

    id: str
    version: str
    folder: str
    runtimes: tuple[str, ...]
    cdi: bool  # it reads CDI specifications


@dataclass(frozen=True)
class Cdi:
    """A CDI specification of NVIDIA GPUs, and the driver that it was written for."""

    file: str
    driver: str | None


@dataclass(frozen=True)
class Probe:
    """All of one node."""

    machine: str  # boot id
    kernel: str
    cpus: tuple[int, ...]
    uid: int
    gid: int
    cache: str
    hub: str  # the folder of Hugging Face's cache
    own_name: tuple[str, ...]
    memory: Memory
    programs: frozenset[str]
    links: tuple[Link, ...]
    hcas: tuple[Hca, ...]
    listening: frozenset[int]
    listeners: Mapping[int, str]  # port -> the process, as far as the node's user may see
    gpus: tuple[Gpu, ...]
    gpu_fault: str | None
    cuda: str | None  # the newest CUDA that the driver runs
    cdi: tuple[Cdi, ...]
    disks: Mapping[str, tuple[int, int]]  # engine, cache -> free and total bytes
    engine: Engine
    skew: float | None = None  # seconds that the node's clock is ahead of this machine's
    skew_error: float = 0.0  # and how far that may be off

    @property
    def unified(self) -> bool:
        """Whether CPU and GPU share one memory: the driver then names no memory of the GPU's own."""
        return bool(self.gpus) and all(gpu.memory_total is None for gpu in self.gpus)

    @property
    def has_runtime(self) -> bool:
        """Whether the engine can hand out a GPU through NVIDIA's runtime or its hook."""
        return "nvidia" in self.engine.runtimes or "nvidia-container-runtime-hook" in self.programs

    def link_of(self, address: str) -> Link | None:
        """The interface that carries an address."""
        return next((one for one in self.links if address in [a.partition("/")[0] for a in one.addresses]), None)


def engine_of(info: Mapping[str, Any]) -> Engine:
    """The engine's facts from `docker info`."""
    return Engine(
        id=str(info["ID"]),
        version=str(info.get("ServerVersion", "")),
        folder=str(info.get("DockerRootDir", "")),
        runtimes=tuple(sorted(info.get("Runtimes") or ())),
        cdi=bool(info.get("CDISpecDirs")),
    )


def parse(answer: str, engine: Engine, *, asked: float | None = None, answered: float = 0.0) -> Probe:
    """A node's facts from the answer to `SCRIPT`.

    Parameters
    ----------
    asked, answered: this machine's clock around the question; without them the node's clock is not judged.

    Raises KeyError or ValueError when a fact that every Linux has is missing, or is none.
    """
    lines = [line.partition(" ")[::2] for line in answer.splitlines()]
    one = {key: rest.strip() for key, rest in lines}

    def each(key: str) -> list[str]:
        return [rest for name, rest in lines if name == key]

    skew = float(one["clock"]) - (asked + answered) / 2 if asked is not None else None
    return Probe(
        machine=one["machine"],
        kernel=one["kernel"],
        cpus=cores(one["cpus"]),
        uid=int(one["uid"]),
        gid=int(one["gid"]),
        cache=one["cache"],
        hub=one["hub"],
        own_name=tuple(one["own_name"].split()),
        memory=_memory(each("meminfo"), earlyoom="earlyoom" in one),
        programs=frozenset(each("program")),
        links=tuple(_links(each("link"), each("interface"))),
        hcas=tuple(_hcas(each("hca"), each("gid_value"), each("gid_type"), each("gid_link"))),
        listening=frozenset(int(line.split()[1].rpartition(":")[2], 16) for line in each("tcp")),
        listeners=dict(_listeners(each("listener"))),
        gpus=tuple(gpus.parse_memory("\n".join(each("gpu")))),
        gpu_fault=one.get("gpu_fault"),
        cuda=one.get("cuda"),
        cdi=tuple(Cdi(file, driver.removeprefix("libcuda.so.") or None) for file, _, driver in
                  (line.partition(" ") for line in each("cdi"))),
        disks={words[0]: (int(words[4]), int(words[2])) for words in map(str.split, each("disk"))},
        engine=engine,
        skew=skew,
        skew_error=(answered - asked) / 2 if asked is not None else 0.0,
    )  # fmt: skip


def cores(text: str) -> tuple[int, ...]:
    """`0-2,5` as (0, 1, 2, 5); raises ValueError for anything else."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def _memory(lines: Iterable[str], *, earlyoom: bool) -> Memory:
    kib = {line.split()[0].rstrip(":"): int(line.split()[1]) for line in lines}
    total, free, available, cached, swap, swap_free = (
        kib[name] * 1024 for name in ("MemTotal", "MemFree", "MemAvailable", "Cached", "SwapTotal", "SwapFree")
    )
    return Memory(total, free, available, cached, swap, swap_free, earlyoom)


def _links(lines: Iterable[str], addressed: Iterable[str]) -> Iterator[Link]:
    addresses: dict[str, list[str]] = {}
    for line in addressed:  # eth0 inet 10.77.0.1/24 brd ... (a veth is listed as eth0@if5 in `ip link` only)
        words = line.split()
        addresses.setdefault(words[0], []).append(words[2])
    for line in lines:
        name, mtu, carrier, speed, radio = line.split()
        mbit = int(speed.partition(":")[2] or -1)
        yield Link(
            name,
            tuple(addresses.get(name, ())),
            int(mtu),
            carrier == "carrier:1",
            mbit if mbit > 0 else None,
            radio == "wireless",
        )


def _hcas(
    ports: Iterable[str], gids: Iterable[str], types: Iterable[str], links: Iterable[str]
) -> Iterator[Hca]:  # fmt: skip
    kind, link = dict(map(_entry, types)), dict(map(_entry, links))
    values = dict(map(_entry, gids))
    for line in ports:
        name, port, pci, layer, state, rate = line.split(" ", 5)
        here = sorted(key for key in values if key[:2] == (name, port))
        table = [Gid(key[2], _mapped(values[key]), kind.get(key, ""), link.get(key, "")) for key in here]
        yield Hca(name, int(port), pci, layer, int(state), rate, tuple(table))


def _entry(line: str) -> tuple[tuple[str, str, int], str]:
    """`rocep1s0f0 1 3:RoCE v2` as ((name, port, index), text)."""
    name, port, rest = line.split(" ", 2)
    index, _, text = rest.partition(":")
    return (name, port, int(index)), text


def _mapped(gid: str) -> str | None:
    """The IPv4 address in `0000:0000:0000:0000:0000:ffff:c0a8:0101`; None for a link-local or other GID."""
    match = re.fullmatch(r"(?:0000:){5}ffff:([0-9a-f]{4}):([0-9a-f]{4})", gid.strip())
    return ".".join(str(byte) for half in match.groups() for byte in bytes.fromhex(half)) if match else None


def _listeners(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    for line in lines:
        words, owner = line.split(), owner_in(line)
        if owner and len(words) > 3:
            yield int(words[3].rpartition(":")[2]), owner


def owner_in(line: str) -> str | None:
    """The process in a line of `ss -Hltnp`, as far as it shows one, such as `sshd (process 30)`."""
    # LISTEN 0 128 0.0.0.0:22 0.0.0.0:* users:(("sshd",pid=30,fd=6))
    match = re.search(r'\(\("([^"]+)",pid=(\d+)', line)
    return f"{match[1]} (process {match[2]})" if match else None
