"""What a DGX Spark (GB10) shows of its GPU and its RDMA adapters, to play one where there is none.

Constructed from public reports of such machines: sysfs listings, `show_gids`, `ibdev2netdev` and `nvidia-smi` output
that their owners posted. Not recorded on a machine of ours. Names, indices and versions are arguments where they differ
between reports.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DRIVER, CUDA = "580.95.05", "13.0"
NO_GID = ":".join(["0000"] * 8)
LINK_LOCAL = "fe80:0000:0000:0000:4ebb:47ff:fe2c:00{number:02x}"


@dataclass(frozen=True)
class Adapter:
    """One port of the ConnectX-7 as one PCIe function shows it; `address` is its interface's, None when it has none.

    `first` is the GID index at which the address stands: 2 (RoCE v1, and v2 after it) where a link-local pair comes
    before it, as most reports have it; others have 0 or 4.
    """

    name: str
    pci: str
    link: str
    address: str | None
    active: bool = True
    first: int = 2


def adapters(link: str, address: str, twin: str, twin_address: str | None) -> list[Adapter]:
    """The four adapters of a GB10 with one cable, in the port 0 that both `link` and `twin` lead to."""
    return [
        Adapter("rocep1s0f0", "0000:01:00.0", link, address),
        Adapter("rocep1s0f1", "0000:01:00.1", "enp1s0f1np1", None, active=False),
        Adapter("roceP2p1s0f0", "0002:01:00.0", twin, twin_address),
        Adapter("roceP2p1s0f1", "0002:01:00.1", "enP2p1s0f1np1", None, active=False),
    ]


def gids(adapter: Adapter) -> list[tuple[str, str]]:
    """The adapter's GID table, as (value, type) by index."""
    table = [(LINK_LOCAL.format(number=adapter.first), kind) for kind in ("IB/RoCE v1", "RoCE v2")]
    rows = (table * (adapter.first // 2))[: adapter.first]
    if adapter.address is not None:
        low = bytes(map(int, adapter.address.split("."))).hex()
        mapped = f"0000:0000:0000:0000:0000:ffff:{low[:4]}:{low[4:]}"
        rows += [(mapped, kind) for kind in ("IB/RoCE v1", "RoCE v2")]
    return rows


def infiniband(folder: Path, shown: list[Adapter]) -> None:
    """Write /sys/class/infiniband below `folder`."""
    for one in shown:
        port = folder / one.name / "ports" / "1"
        for below in ("gids", "gid_attrs/types", "gid_attrs/ndevs", "counters"):
            (port / below).mkdir(parents=True)
        (folder / one.name / "device").symlink_to(f"../../../{one.pci}")
        (port / "state").write_text("4: ACTIVE\n" if one.active else "1: DOWN\n")
        (port / "rate").write_text("200 Gb/sec (4X NDR)\n" if one.active else "40 Gb/sec (4X QDR)\n")
        (port / "link_layer").write_text("Ethernet\n")
        rows = gids(one)
        for index in range(max(8, len(rows))):  # a real table has 256 entries
            value, kind = rows[index] if index < len(rows) else (NO_GID, "")
            (port / "gids" / str(index)).write_text(f"{value}\n")
            if kind:
                (port / "gid_attrs/types" / str(index)).write_text(f"{kind}\n")
                (port / "gid_attrs/ndevs" / str(index)).write_text(f"{one.link}\n")
        for counter in ("port_xmit_data", "port_rcv_data"):
            (port / "counters" / counter).write_text("0\n")


# Of an idle one, in kB; the machine that plays it may have less.
MEMORY = {"MemTotal": 127_601_452, "MemFree": 110_000_000, "MemAvailable": 118_000_000, "Buffers": 400_000,
          "Cached": 8_000_000, "SwapTotal": 0, "SwapFree": 0}  # fmt: skip


def meminfo() -> str:
    """What /proc/meminfo shows."""
    return "".join(f"{name + ':':<16}{kib:>8} kB\n" for name, kib in MEMORY.items())


NVIDIA_SMI = f"""#!/bin/sh
# Plays the nvidia-smi of a GB10, whose memory is the machine's own.
for word; do case $word in --query-gpu=*) fields=${{word#*=}} ;; esac; done
if [ -z "${{fields:-}}" ]; then
    echo "| NVIDIA-SMI {DRIVER}    Driver Version: {DRIVER}    CUDA Version: {CUDA}     |"
    exit 0
fi
line=
for field in $(echo "$fields" | tr , ' '); do
    case $field in
        name) value='NVIDIA GB10' ;;
        compute_cap) value=12.1 ;;
        driver_version) value={DRIVER} ;;
        *) value='[N/A]' ;;
    esac
    line="${{line:+$line, }}$value"
done
echo "$line"
"""

HOOK = """#!/bin/sh
# The engine looks for a program of this name before it takes `--gpus`; a real one would put the driver's files in.
cat > /dev/null
"""

# Only so that a machine without CAP_SYS_RESOURCE can start what asks for unlimited locked memory.
RUNTIME = """#!/bin/sh
previous= file=
for word; do
    case $previous in --bundle|-b) file=$word/config.json ;; --process|-p) file=$word ;; esac
    previous=$word
done
case " $* " in *" create "*|*" exec "*)
    limit='"type":"RLIMIT_MEMLOCK","hard"'
    [ -z "$file" ] || sed -i 's/'"$limit"':[0-9]*,"soft":[0-9]*/'"$limit"':8388608,"soft":8388608/' "$file" ;;
esac
exec runc "$@"
"""

DAEMON = """{"features": {"cdi": true}, "default-runtime": "nvidia",
 "runtimes": {"nvidia": {"path": "/usr/local/bin/nvidia-container-runtime"}}}
"""


def cdi(driver: str = DRIVER) -> str:
    """A CDI specification as `nvidia-ctk cdi generate` writes it, with devices that lead nowhere."""
    return f"""cdiVersion: "0.5.0"
kind: nvidia.com/gpu
devices:
- name: all
  containerEdits:
    deviceNodes: [{{path: /dev/nvidia0, hostPath: /dev/null}}, {{path: /dev/nvidiactl, hostPath: /dev/null}}]
# mounts of a real one name the driver: /usr/lib/aarch64-linux-gnu/libcuda.so.{driver}
"""


def files() -> dict[str, tuple[str, int]]:
    """Files of a node that plays a GB10: path -> (text, mode)."""
    return {
        "usr/local/bin/nvidia-smi": (NVIDIA_SMI, 0o755),
        "usr/local/bin/nvidia-container-runtime-hook": (HOOK, 0o755),
        "usr/local/bin/nvidia-container-runtime": (RUNTIME, 0o755),
        "etc/docker/daemon.json": (DAEMON, 0o644),
        "etc/cdi/nvidia.yaml": (cdi(), 0o644),
    }
