"""Every fault: how it is put to the gang, what its right end is, and whom the post-mortem must name."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rig_lib import network, node

from faults_lib.gang_on_rig import NODES, RECIPE, SETTINGS, STALL_S, GangOnRig
from faults_lib.soak import clients

ENDED, RIDDEN_OUT, REFUSED, REPORTED = "gang ended", "ridden out", "refused", "reported"
END_S = 10.0


@dataclass(frozen=True)
class Blame:
    """Whom the post-mortem may name: the rank, how its process's name begins, and the kinds of end."""

    rank: int
    process: str
    kinds: tuple[str, ...]

    def fits(self, first: dict[str, Any]) -> bool:
        named = first.get("rank") == self.rank and str(first.get("process", "")).startswith(self.process)
        return named and first.get("kind") in self.kinds


@dataclass(frozen=True)
class Fault:
    """`inject` puts it; `mend` (after the end) repairs what does not repair itself; the end has `within` seconds."""

    name: str
    right: str
    inject: Callable[[GangOnRig], None]
    blame: tuple[Blame, ...] = ()
    within: float = END_S
    mend: Callable[[GangOnRig], None] | None = None
    hold_s: float = 0.0  # ridden out: for how long it is watched
    under_load: bool = True
    engines: tuple[str, ...] = ("small", "vllm")
    runs: int | None = None  # at most so many: what takes minutes


def strike(rank: int, process: str, number: signal.Signals) -> Callable[[GangOnRig], None]:
    return lambda gang: gang.kill(rank, process, number)


def kill9(rank: int, process: str, named: str | None = None) -> Fault:
    blame = Blame(rank, named or process, ("exit",))
    return Fault(f"kill -9 of rank {rank}'s {process}", ENDED, strike(rank, process, signal.SIGKILL), (blame,))


def freeze(rank: int, process: str) -> Fault:
    blame = Blame(rank, process, ("stopped",))
    return Fault(f"SIGSTOP of rank {rank}'s {process}", ENDED, strike(rank, process, signal.SIGSTOP), (blame,))


# Links, engines, power --------------------------------------------------------------------------------------------


def unplug(gang: GangOnRig, seconds: float) -> None:
    network.link_down(gang.nodes["node2"])
    time.sleep(seconds)
    network.link_up(gang.nodes["node2"])


def slow(gang: GangOnRig) -> None:
    network.link_slow(gang.nodes["node2"], 2)


def plug(gang: GangOnRig) -> None:
    network.link_up(gang.nodes["node2"])


def plug_late(gang: GangOnRig) -> None:
    """After 60 s in all: the ranks gave each other up after 7, and wait."""
    time.sleep(50)
    plug(gang)


def kill_engine(gang: GangOnRig) -> None:
    node.engine(gang.nodes["node2"], gang.options, "kill")
    time.sleep(1)
    node.engine(gang.nodes["node2"], gang.options, "start")


def power_off(gang: GangOnRig, *names: str) -> None:
    for name in names:
        node.kill(name)


def power_on(gang: GangOnRig, *names: str) -> None:
    for name in names:
        if node.init_pid(gang.nodes[name]) is None:
            node.start(gang.nodes[name], gang.options)
    for name in names:
        node.wait(gang.nodes[name], gang.options)


def come_back_late(gang: GangOnRig) -> None:
    """After two minutes: the head waits for rank 1 meanwhile, and says so."""
    time.sleep(110)
    told = gang.status(0)
    if told.get("state") != "waiting" or [one["rank"] for one in told["waiting_for"]] != [1]:
        raise AssertionError(f"rank 0 does not wait for rank 1: {told.get('state')}, {told.get('waiting_for')}")
    power_on(gang, "node2")


# Disk, memory, requests ---------------------------------------------------------------------------------------------


def fill_disk(gang: GangOnRig) -> None:
    """A disk of 1 MB over the state folder of rank 1, full; then a fault that wants to write there."""
    script = f"nsenter --target {gang.inside_pid(1)} --mount sh -c '"
    script += "mount -t tmpfs -o size=1m,uid=10001,gid=10001 tmpfs /var/lib/exl3 && "
    script += "dd if=/dev/zero of=/var/lib/exl3/fill bs=1k 2>/dev/null; true'"
    gang.inside("node2", "sh", "-c", script)
    time.sleep(2)
    if not gang.is_serving(0):
        raise AssertionError("a full disk alone ended the gang")
    gang.kill(1, "worker", signal.SIGKILL)


def starve(gang: GangOnRig) -> None:
    """A memory limit close above what rank 1 uses, and a program in its container that then wants more."""
    used = int(gang.status(1)["memory"]["used"] or 0)
    limit = str(used + (64 << 20))
    gang.inside("node2", "docker", "update", "--memory", limit, "--memory-swap", limit, gang.container(1))
    hog = "kept = [bytes([1]) * (4 << 20) for _ in range(60)]"
    subprocess.Popen(
        node.command(gang.nodes["node2"], gang.options, ["docker", "exec", gang.container(1), "python3", "-c", hog]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def feed(gang: GangOnRig) -> None:
    """Lift the limit; an engine that is about to start the container again refuses that for a moment."""
    for _ in range(50):
        time.sleep(0.5)
        with contextlib.suppress(RuntimeError):
            gang.inside("node2", "docker", "update", "--memory", "32g", "--memory-swap", "32g", gang.container(1))
            return
    raise RuntimeError("the memory limit cannot be lifted")


def hang(gang: GangOnRig) -> None:
    """A request that never gets its next token: by its prompt, or by packets of the ranks' group that get lost."""
    if gang.engine == "small":
        gang.hung = gang.client("hang", 1, 60)
        return
    gang.inside("node2", "iptables", "-I", "OUTPUT", "-p", "tcp", "-d", gang.nodes["node1"].address, "-j", "DROP")
    gang.hung = gang.client("2+2=", 100, 60)


def unhang(gang: GangOnRig) -> None:
    if gang.engine == "vllm":
        gang.inside("node2", "iptables", "-F", "OUTPUT")
    if gang.hung is not None:
        gang.hung.kill()
        gang.hung.communicate()


# Operators ----------------------------------------------------------------------------------------------------------


def two_operators(gang: GangOnRig) -> None:
    """Two `kit up` at the same time: one is refused (3), the other serves."""
    verb = gang.kit_process("up", RECIPE, "--nodes", NODES), gang.kit_process("up", RECIPE, "--nodes", NODES)
    said = [one.communicate(timeout=300)[1] for one in verb]
    codes = sorted(one.returncode for one in verb)
    if codes != [0, 3]:
        raise AssertionError(f"exit codes {codes}: {said}")


def down_with_a_node_gone(gang: GangOnRig) -> None:
    """`kit down` names the node that it could not clear (6), clears the other, and that one once it is back."""
    power_off(gang, "node2")
    done = gang.kit("down", RECIPE, "--nodes", NODES)
    if done.returncode != 6 or "node2" not in done.stderr:
        raise AssertionError(f"exit code {done.returncode}: {done.stderr}")
    if gang.seen(0):
        raise AssertionError("the other node was not cleared")
    power_on(gang, "node2")
    if gang.down().returncode != 0 or gang.seen(1):
        raise AssertionError("the node that came back was not cleared")


CLEAN = {"ConnectionRefusedError", "ConnectionResetError", "RemoteDisconnected", "status 503"}


def restart_under_load(gang: GangOnRig) -> None:
    """A restart while 16 clients ask: each request is answered or refused cleanly, and none hangs."""
    going = clients(gang, 16, 30)
    time.sleep(3)
    done = gang.kit("restart", RECIPE, "--nodes", NODES, *(word for one in SETTINGS for word in ("--set", one)))
    if done.returncode != 0:
        raise AssertionError(f"kit restart ends with {done.returncode}: {done.stderr}")
    told = json.loads(going.communicate(timeout=400)[0])
    unclean = set(told["errors"]) - CLEAN
    if unclean or told["longest_s"] > 60 or not told["p50_s"]:
        raise AssertionError(f"{told}")


SILENT = ("silent", "gone", "replaced", "left", "killed", "hung", "supervisor")
FAULTS = [
    kill9(0, "API server"),
    kill9(0, "engine core"),
    kill9(0, "worker"),
    kill9(1, "worker"),
    kill9(1, "launcher"),
    Fault("kill -9 of rank 1's supervisor", ENDED, strike(1, "supervisor", signal.SIGKILL), (Blame(1, "", SILENT),)),
    freeze(0, "API server"),
    freeze(0, "engine core"),
    freeze(0, "worker"),
    freeze(1, "worker"),
    Fault(
        "SIGSTOP of rank 1's supervisor",
        ENDED,
        strike(1, "supervisor", signal.SIGSTOP),
        (Blame(1, "", SILENT),),
        within=STALL_S + 7.0,  # the other rank ends after 7 s; the guard of the stopped one after 10 s
    ),
    Fault("link of node2 down for 5 s", RIDDEN_OUT, lambda gang: unplug(gang, 5), hold_s=10),
    Fault(
        "link of node2 down for 60 s",
        ENDED,
        lambda gang: network.link_down(gang.nodes["node2"]),
        (Blame(0, "rank", ("silent",)), Blame(1, "rank", ("silent",))),
        mend=plug_late,
    ),
    Fault("slow link (2 Mbit/s)", RIDDEN_OUT, slow, mend=plug, hold_s=12),
    Fault("dockerd killed and started on node2", ENDED, kill_engine, (Blame(1, "", (*SILENT, "stop")),), within=25),
    Fault(
        "node2 loses its power",
        ENDED,
        lambda gang: power_off(gang, "node2"),
        (Blame(1, "", SILENT),),
        mend=lambda gang: power_on(gang, "node2"),
    ),
    Fault(
        "both nodes lose their power",
        ENDED,
        lambda gang: power_off(gang, "node1", "node2"),
        (Blame(0, "", SILENT), Blame(1, "", SILENT)),
        mend=lambda gang: power_on(gang, "node1", "node2"),
    ),
    Fault(
        "node2 is without power for two minutes",
        ENDED,
        lambda gang: power_off(gang, "node2"),
        (Blame(1, "", SILENT),),
        mend=come_back_late,
        runs=3,
    ),
    Fault("state disk full, then kill -9 of rank 1's worker", ENDED, fill_disk, (Blame(1, "worker", ("exit",)),)),
    Fault("memory limit of rank 1 hit", ENDED, starve, (Blame(1, "", ("oom",)),), mend=feed),
    Fault(
        "vLLM ends with 0 (SIGTERM of the API server)",
        ENDED,
        strike(0, "API server", signal.SIGTERM),
        (Blame(0, "API server", ("exit",)),),
        under_load=False,
    ),
    Fault(
        "a hung request",
        ENDED,
        hang,
        (Blame(0, "engine", ("stall",)),),
        within=STALL_S + 5.0,
        mend=unhang,
        under_load=False,
    ),
    Fault("two operators start at once", REFUSED, two_operators, under_load=False, engines=("vllm",)),
    Fault("restart under load", REFUSED, restart_under_load, under_load=False, engines=("vllm",), runs=3),
    Fault("down with node2 gone", REPORTED, down_with_a_node_gone, under_load=False),
]
