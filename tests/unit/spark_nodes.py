"""Two DGX Sparks as the probe's script sees them, without one: trees and tools from `rig_lib.gb10`, read for real.

The script runs in a real shell with a folder before /proc, /sys and /etc; `ip`, `ss` and `nvidia-smi` are small
programs that print what public reports show.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))  # for rig_lib

from rig_lib import gb10

from exl3kit import facts, probe
from exl3kit.checks import Place
from exl3kit.deployment import NodeFacts
from exl3kit.probe import Engine, Probe

TOTAL_KIB = 127_601_452  # MemTotal of a Spark
ENGINE = Engine("engine-id", "28.3.3", "/var/lib/docker", ("nvidia", "runc"), True)


@dataclass(frozen=True)
class Spark:
    """What is played; a test changes one thing with `replace`."""

    number: int = 1
    link: str = "enp1s0f0np0"
    twin: str = "enP2p1s0f0np0"
    twin_address: bool = True
    carrier: bool = True
    mtu: int = 9000
    speed: int = 200_000
    wireless: bool = False
    first_gid: int = 2
    active: bool = True
    adapters: bool = True
    kernel: str = "6.14.0-1015-nvidia"
    driver: str = gb10.DRIVER
    cdi_driver: str = gb10.DRIVER
    capability: str = "12.1"
    gpu: bool = True
    cuda: str = gb10.CUDA
    available_kib: int = 118_000_000
    swap_kib: int = 0
    earlyoom: bool = True
    name_resolves_to: str = "127.0.1.1"
    listeners: tuple[tuple[int, str], ...] = ()  # port, program
    free_bytes: int = 2_000_000_000_000
    disk_bytes: int = 4_000_000_000_000
    engine: Engine = ENGINE

    @property
    def address(self) -> str:
        return f"10.0.0.{self.number}"


@cache
def look(spark: Spark) -> Probe:
    """The probe of a played Spark."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _trees(folder / "root", spark)
        _tools(folder / "bin", spark)
        environment = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "HOME": "/home/op"}
        argv = ["sh", "-c", probe.SCRIPT, "sh", str(folder / "root"), "/var/lib/docker"]
        done = subprocess.run(argv, capture_output=True, text=True, check=True, env=environment)
    return probe.parse(done.stdout, replace(spark.engine, id=f"engine{spark.number}"))


def place(spark: Spark) -> Place:
    return Place(f"spark{spark.number}", spark.address, look(spark))


def node_facts(spark: Spark) -> NodeFacts:
    return facts.of(f"spark{spark.number}", spark.address, look(spark))


def _write(path: Path, text: str | int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def _trees(root: Path, spark: Spark) -> None:
    _write(root / "proc/sys/kernel/random/boot_id", f"boot-{spark.number}")
    _write(root / "proc/sys/kernel/osrelease", spark.kernel)
    _write(root / "proc/sys/kernel/hostname", f"spark{spark.number}")
    _write(root / "proc/self/status", "Cpus_allowed_list:\t0-19")
    _write(root / "proc/1/comm", "systemd")
    if spark.earlyoom:
        _write(root / "proc/77/comm", "earlyoom")
    memory = {"MemTotal": TOTAL_KIB, "MemFree": 9_000_000, "MemAvailable": spark.available_kib, "Cached": 90_000_000,
              "SwapTotal": spark.swap_kib, "SwapFree": spark.swap_kib}  # fmt: skip
    _write(root / "proc/meminfo", "\n".join(f"{name}: {kib} kB" for name, kib in memory.items()))
    rows = [f"   0: 00000000:{port:04X} 00000000:0000 0A 0 0 0" for port, _ in spark.listeners]
    _write(root / "proc/net/tcp", "\n".join(["  sl  local_address rem_address   st", *rows]))
    _write(root / "etc/cdi/nvidia.yaml", gb10.cdi(spark.cdi_driver))
    for name in (spark.link, spark.twin):
        link = root / "sys/class/net" / name
        _write(link / "mtu", spark.mtu)
        _write(link / "carrier", int(spark.carrier))
        _write(link / "speed", spark.speed)
        if spark.wireless:
            (link / "wireless").mkdir()
    if spark.adapters:
        twin_address = f"10.0.1.{spark.number}" if spark.twin_address else None
        shown = gb10.adapters(spark.link, spark.address, spark.twin, twin_address)
        shown = [replace(one, first=spark.first_gid, active=one.active and spark.active) for one in shown]
        gb10.infiniband(root / "sys/class/infiniband", shown)


def _tools(folder: Path, spark: Spark) -> None:
    addresses = {spark.link: f"{spark.address}/24"}
    if spark.twin_address:
        addresses[spark.twin] = f"10.0.1.{spark.number}/24"
    lines = [f"{n}: {name}    inet {net} scope global {name}" for n, (name, net) in enumerate(addresses.items(), 2)]
    sockets = [
        f'LISTEN 0 128 0.0.0.0:{port} 0.0.0.0:* users:(("{owner}",pid=4711,fd=6))' for port, owner in spark.listeners
    ]
    smi = gb10.NVIDIA_SMI.replace("12.1", spark.capability).replace(gb10.DRIVER, spark.driver)
    programs = {
        "ip": "cat <<'END'\n" + "\n".join(lines) + "\nEND",
        "ss": "cat <<'END'\n" + "\n".join(sockets) + "\nEND",
        "getent": f"echo '{spark.name_resolves_to} STREAM spark'",
        "df": f"echo header; echo '/dev/nvme0n1p2 {spark.disk_bytes} 1 {spark.free_bytes} 1% /'",
    }
    if spark.gpu:
        programs["nvidia-smi"] = smi.partition("\n")[2].replace(
            f"CUDA Version: {gb10.CUDA}", f"CUDA Version: {spark.cuda}"
        )
    for name, body in programs.items():
        path = folder / name
        _write(path, f"#!/bin/sh\n{body}")
        path.chmod(0o755)
