"""What a rank talks over, from lines as NCCL 2.28 writes them (composed here in its documented formats, not recorded on
the machines that they speak of), and from the kernel's table of connections.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from exl3kit import transport
from exl3kit.aboard import network_look
from exl3kit.errors import ExitCode, KitError

WHO = "spark1:371:402 [0] NCCL INFO "
SPARK = [
    WHO + "Bootstrap: Using enp1s0f0np0:10.0.0.1<0>",
    WHO + "NCCL_IB_HCA set to =rocep1s0f0:1,roceP2p1s0f0:1",
    WHO + "NET/IB : Using [0]rocep1s0f0:1/RoCE [1]roceP2p1s0f0:1/RoCE [RO]; OOB enp1s0f0np0:10.0.0.1<0>",
    WHO + "Initialized NET plugin IB",
    WHO + "Using network IB",
    WHO + "Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0 comm 0x2083dd50 nRanks 02",
    WHO + "Channel 01/0 : 1[0] -> 0[0] [receive] via NET/IB/1 comm 0x2083dd50 nRanks 02",
    WHO + "Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0 comm 0x2083dd50 nRanks 02",
    WHO + "Channel 01/0 : 0[0] -> 1[0] [send] via NET/IB/1 comm 0x2083dd50 nRanks 02",
    WHO + "NET/IB: NCCL Dev 0 IbDev 0 Port 1 qpn 583 mtu 3 query_ece={supported=1, vendor_id=0x15b3, options=0x0, "
    "comp_mask=0x0} GID 3 (0/6500000AFFFF0000) fifoRkey=0x1 fifoLkey=0x1",
    WHO + "Connected all rings, use ring PXN 0 GDR 0",
]
FALLEN_BACK = [
    WHO + "NET/IB : No device found.",
    WHO + "NET/Socket : Using [0]enp1s0f0np0:10.0.0.1<0>",
    WHO + "Using network Socket",
    WHO + "Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0",
    WHO + "Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0",
]
GPU_DIRECT = [
    WHO + "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB ; OOB eno1:10.0.0.9<0>",
    WHO + "Channel 02/0 : 0[0] -> 8[0] [send] via NET/IB/1(3)/GDRDMA",
    WHO + "Channel 03/0 : 0[0] -> 1[1] via P2P/CUMEM/read",
]
ONE_MACHINE = [
    WHO + "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM",
    WHO + "Channel 01/0 : 0[0] -> 1[1] via SHM/direct/direct",
]
PLUGIN = [
    WHO + "NET/FastSocket : Using [0]ibs108:10.0.19.12<0>",
    WHO + "Channel 00/0 : 0[0] -> 1[0] [send] via NET/FastSocket/0",
]


@pytest.mark.parametrize(
    ("lines", "kind", "says"),
    [
        (SPARK, "rdma", "RDMA over rocep1s0f0:1/RoCE, roceP2p1s0f0:1/RoCE, GID 3"),
        (FALLEN_BACK, "tcp", "TCP over enp1s0f0np0:10.0.0.1, NET/Socket"),
        (GPU_DIRECT, "rdma", "RDMA over mlx5_1:1/IB, GPUDirect"),
        (ONE_MACHINE, "local", "P2P/CUMEM, SHM/direct/direct"),
        (PLUGIN, "tcp", "TCP over ibs108:10.0.19.12, NET/FastSocket"),
        (SPARK + FALLEN_BACK, "tcp", "RoCE"),  # one channel over TCP is a rank over TCP, and both devices are named
    ],
)
def test_what_nccl_has_connected_decides(lines: list[str], kind: str, says: str) -> None:
    found = transport.of_nccl(lines)
    assert found is not None
    assert (found.kind, says in found.says) == (kind, True), found.says


def test_what_nccl_could_use_is_no_proof_that_it_does() -> None:
    assert transport.of_nccl(SPARK[:5]) is None
    assert transport.of_nccl([]) is None


def test_channels_and_devices_are_counted() -> None:
    found = transport.of_nccl(SPARK)
    assert found is not None
    assert found.channels == {"NET/IB": 4}
    assert (found.devices, found.gids) == (("rocep1s0f0:1/RoCE", "roceP2p1s0f0:1/RoCE"), (3,))


def told(**changes: Any) -> dict[str, Any]:
    return {"nccl": [], "connections": [], "counters": {}, "debug": "INFO", **changes}


def test_a_rank_without_gpu_is_told_by_its_connections_but_for_those_of_the_apis_clients() -> None:
    connections = [["eth0", 8000, "10.0.0.99"], ["eth0", 41234, "10.0.0.2"], ["eth0", 18000, "10.0.0.2"]]
    found = transport.read(told(connections=connections), gpu=False, alone=False, port=8000)
    assert (found.kind, found.says) == ("tcp", "Gloo, TCP over eth0 to 10.0.0.2")
    assert transport.read(told(), gpu=False, alone=True, port=8000).kind == "none"


def test_a_gpu_rank_is_not_judged_by_the_tcp_connections_of_its_arrangements() -> None:
    connections = [["enp1s0f0np0", 18000, "10.0.0.2"]]
    found = transport.read(told(connections=connections, nccl=SPARK), gpu=True, alone=False, port=8000)
    assert found.kind == "rdma"
    silent = transport.read(told(connections=connections, debug="WARN"), gpu=True, alone=False, port=8000)
    assert (silent.kind, "NCCL_DEBUG is WARN" in silent.says) == ("unknown", True)


def standing(*nodes: str) -> list[Any]:
    def error(node: str, what: str, **more: Any) -> KitError:
        return KitError(what, where=f"node {node}", **more)

    return [
        SimpleNamespace(
            rank=number, node=SimpleNamespace(name=name, error=lambda what, n=name, **m: error(n, what, **m))
        )
        for number, name in enumerate(nodes)
    ]


def test_rdma_that_the_recipe_requires_is_delivered_or_refused() -> None:
    over_rdma, over_tcp = transport.of_nccl(SPARK), transport.of_nccl(FALLEN_BACK)
    assert over_rdma is not None and over_tcp is not None
    transport.require_rdma(standing("spark1", "spark2"), [over_rdma, over_rdma])
    with pytest.raises(KitError, match="rank 1 uses TCP over enp1s0f0np0") as refused:
        transport.require_rdma(standing("spark1", "spark2"), [over_rdma, over_tcp])
    assert (refused.value.code, refused.value.where) == (ExitCode.VERIFICATION, "node spark2")
    unknown = transport.Transport(transport.UNKNOWN, "unknown: NCCL has told nothing")
    with pytest.raises(KitError, match="unknown"):
        transport.require_rdma(standing("spark1", "spark2"), [over_rdma, unknown])
    transport.require_rdma(standing("spark1", "spark1"), [over_tcp, over_tcp])  # nothing leaves the machine


# The program in the container -----------------------------------------------------------------------------------------


def test_the_program_prints_what_it_sees_here(tmp_path: Path) -> None:
    """Given NCCL's files in the run folder, when the program runs as in a container, then what matters comes."""
    (tmp_path / "nccl.spark1.371").write_text("\n".join([WHO + "comm 0x1 busId 1 - Init START", *SPARK]) + "\n")
    source = Path(network_look.__file__).read_text()
    done = subprocess.run(
        [sys.executable, "-I", "-c", source],
        env={**os.environ, "EXL3_RUN_DIR": str(tmp_path), "NCCL_DEBUG": "INFO"},
        capture_output=True,
        text=True,
        check=True,
    )
    seen = json.loads(done.stdout)
    assert seen["debug"] == "INFO"
    assert not any("Init START" in line for line in seen["nccl"])
    found = transport.of_nccl(seen["nccl"])
    assert found is not None and found.kind == "rdma"


def test_own_connections_are_told_from_those_of_others() -> None:
    """Given a connection of this process, when the kernel's table is read, then it is found by its inode alone."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        assert str(os.fstat(client.fileno()).st_ino) in network_look.own_sockets()
    table = (
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
        "   0: 0100000A:4650 0200000A:9C40 01 00000000:00000000 00:00000000 00000000 10001 0 777 1\n"
        "   1: 0100000A:4651 0300000A:9C41 01 00000000:00000000 00:00000000 00000000 10001 0 888 1\n"
        "   2: 0100007F:4652 0100007F:9C42 01 00000000:00000000 00:00000000 00000000 10001 0 777 1\n"
        "   3: 0100000A:4654 0100000A:9C43 01 00000000:00000000 00:00000000 00000000 10001 0 777 1\n"
        "   4: 0100000A:4653 00000000:0000 0A 00000000:00000000 00:00000000 00000000 10001 0 777 1\n"
    )
    found = list(network_look.connections(table, {"777"}, {"10.0.0.1": "enp1s0f0np0"}))
    assert found == [("enp1s0f0np0", 18000, "10.0.0.2")]


def test_counters_of_rdma_ports_are_bytes(tmp_path: Path) -> None:
    counters = tmp_path / "rocep1s0f0" / "ports" / "1" / "counters"
    counters.mkdir(parents=True)
    (counters / "port_xmit_data").write_text("250\n")
    (counters / "port_rcv_data").write_text("500\n")
    assert network_look.counters(tmp_path) == {"rocep1s0f0:1": {"sent": 1000, "received": 2000}}
