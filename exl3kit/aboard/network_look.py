"""In a rank's container: what its processes are connected to, what NCCL wrote of its transports, and RDMA counters.

Prints one JSON object: `nccl` (lines), `connections` (`[interface, local port, remote address]`), `counters` (bytes per
RDMA port), `debug` (the value of NCCL_DEBUG).
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

SIOCGIFADDR = 0x8915
ESTABLISHED = "01"  # the state's code in /proc/net/tcp
MOST_LINES = 2000  # of NCCL; a rank of eight GPUs writes some hundred that matter
MATTERS = re.compile(r"NET/|\bvia \w+/|Using network|NCCL WARN|Bootstrap")


def interfaces() -> dict[str, str]:
    """IPv4 address -> name of the interface that has it."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(asked.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[socket.inet_ntoa(answer[20:24])] = name
    return found


def own_sockets(proc: Path = Path("/proc")) -> set[str]:
    """Inodes of the sockets of every process here; the others of a host's network are not ours."""
    found = set()
    for folder in proc.glob("[0-9]*/fd"):
        with suppress(OSError):  # it ended, or belongs to another user
            for entry in folder.iterdir():
                with suppress(OSError):
                    target = str(entry.readlink())
                    if target.startswith("socket:["):
                        found.add(target[8:-1])
    return found


def address(text: str) -> tuple[str, int]:
    """`0100007F:1F40`, or an IPv4 address written as IPv6, as address and port."""
    digits, _, port = text.partition(":")
    return socket.inet_ntoa(bytes.fromhex(digits[-8:])[::-1]), int(port, 16)


def connections(table: str, own: set[str], names: dict[str, str]) -> Iterator[tuple[str, int, str]]:
    """Interface, local port and remote address of our established connections that leave the machine."""
    for line in table.splitlines()[1:]:
        words = line.split()
        if len(words) > 9 and words[3] == ESTABLISHED and words[9] in own:
            (here, port), (there, _) = address(words[1]), address(words[2])
            if not here.startswith("127.") and there not in names:
                yield names.get(here, here), port, there


def nccl_lines(folder: Path) -> list[str]:
    """What matters of every file that NCCL writes in the run folder."""
    found: list[str] = []
    for path in sorted(folder.glob("nccl.*")):
        with suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
            found += [line.rstrip("\n") for line in file if MATTERS.search(line)][:MOST_LINES]
    return found[:MOST_LINES]


def counters(root: Path = Path("/sys/class/infiniband")) -> dict[str, dict[str, int]]:
    """Bytes sent and received of every RDMA port since its driver was loaded."""
    found = {}
    for port in sorted(root.glob("*/ports/*")):
        with suppress(OSError, ValueError):
            sent, received = (int((port / "counters" / f"port_{way}_data").read_text()) for way in ("xmit", "rcv"))
            found[f"{port.parent.parent.name}:{port.name}"] = {"sent": 4 * sent, "received": 4 * received}  # in words
    return found


def main() -> None:
    names, own = interfaces(), own_sockets()
    tables = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6") if Path(f"/proc/net/{name}").exists()]
    told = {
        "nccl": nccl_lines(Path(os.environ.get("EXL3_RUN_DIR", "/run/exl3"))),
        "connections": sorted(one for table in tables for one in connections(table, own, names)),
        "counters": counters(),
        "debug": os.environ.get("NCCL_DEBUG"),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
