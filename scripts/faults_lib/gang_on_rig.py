"""A gang of two on the rig's hosts, seen from outside: its processes as this machine's kernel has them, its files.

Nothing is asked over ssh or through an engine while a fault runs its course, so that the watching changes no time.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rig_lib import cgroups, network, node, rig
from rig_lib.plan import Node, State, default_state_dir

from exl3kit import containers, recipes, serve
from exl3kit.deployment import Rank
from exl3kit.nodes import open_nodes
from exl3kit.progress import Progress

REPO = Path(__file__).resolve().parents[2]
RECIPE, NODES = "demo-tp2", "node1,node2"
SMALL = Path(__file__).with_name("small_engine.py")
LAID_DIR = "/root/exl3-faults"
STALL_S = 8
PORT = 8000
OWN = "python3 -m exl3_vllm.rank -- "  # of guard and supervisor
SERVING_S = 900.0  # vLLM on a busy machine
SETTINGS = (f"serve.stall_s={STALL_S}",)


@dataclass(frozen=True)
class Seen:
    """A process of a container: its number here, when it started, its number and its namespace in the container."""

    pid: int
    started: str
    inside: int
    command: str
    space: str

    def lives(self) -> bool:
        found = stat(self.pid)
        return found is not None and found[0] not in "ZX" and found[1] == self.started


def stat(pid: int) -> tuple[str, str] | None:
    """State and start time."""
    with contextlib.suppress(OSError, IndexError):
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return words[0], words[19]
    return None


def laid_over(rank: Rank, engine: str) -> Rank:
    """The rank under this checkout's supervisor, in whatever image; `small`: with the small engine in vLLM's place.

    The folder that stands for the model holds all that this needs.
    """
    argv = ("python3", "/model/small_engine.py", *rank.argv[1:]) if engine == "small" else rank.argv
    env = {**rank.env, "PYTHONPATH": "/model/overlay"}
    return replace(rank, argv=argv, env=env, model_dir=LAID_DIR)


class GangOnRig:
    """The deployment `demo-tp2` on node1 and node2: vLLM itself, or the small engine in its place."""

    def __init__(self, engine: str, *, over: bool = False) -> None:
        self.engine = engine
        self.over = over or engine == "small"  # an image that is there, with this checkout's overlay laid over its own
        self.state = State(default_state_dir())
        found = rig.load(self.state)
        if found is None:
            raise RuntimeError("no rig is up: `scripts/rig up`")
        self.options = found
        os.environ["EXL3KIT_SSH_CONFIG"] = str(self.state.ssh_config)
        self.hung: subprocess.Popen[str] | None = None  # a request that a fault keeps from its end
        self.nodes: dict[str, Node] = {one.name: one for one in self.options.node_list()}

    # Start and end ---------------------------------------------------------------------------------------------------

    def up(self) -> None:
        """Start the gang, without pauses after short starts: faults follow fast. Returns when it serves."""
        with open_nodes(NODES) as nodes:
            ground = serve.survey(recipes.load(RECIPE, SETTINGS), nodes)
            planned = ground.plan(serve.new_generation())
            image = self.common_image() if self.over else None
            if image is None:
                serve.prepare(ground, Progress(Console(file=io.StringIO())))
            containers.take_down(nodes, RECIPE)
            ranks = planned.ranks
            ranks = tuple(replace(rank, env={**rank.env, "EXL3_STEADY_S": "0"}) for rank in ranks)
            if self.over:
                self.lay()
                ranks = tuple(laid_over(rank, self.engine) for rank in ranks)
            serve.start(ground, replace(planned, image=image or planned.image, ranks=ranks), None)
        self.wait_serving(0)

    def common_image(self) -> str | None:
        """An image of the kit that every host has."""
        shown = ("docker", "images", "--format", "{{.Repository}}:{{.Tag}}", "exl3kit")
        had = [self.inside(name, *shown).split() for name in self.nodes]
        return next((tag for tag in had[0] if all(tag in tags for tags in had)), None)

    def down(self) -> subprocess.CompletedProcess[str]:
        return self.kit("down", RECIPE, "--nodes", NODES, "--volumes")

    def lay(self) -> None:
        """Put the demo's model, the small engine and this checkout's overlay on every host."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            archive.add(SMALL, "small_engine.py")
            for path in sorted((REPO / "models" / "demo-dense").iterdir()):
                archive.add(path, path.name)
            for path in sorted((REPO / "overlay" / "exl3_vllm").glob("*.py")):
                archive.add(path, f"overlay/exl3_vllm/{path.name}")
        unpack = f"rm -rf {LAID_DIR} && mkdir -p {LAID_DIR} && cd {LAID_DIR} && "
        unpack += "tar --extract --no-same-owner && chmod 755 /root && chmod -R a+rX ."
        for name in self.nodes:
            line = node.command(self.nodes[name], self.options, ["sh", "-c", unpack])
            subprocess.run(line, input=buffer.getvalue(), check=True, timeout=120)

    def kit(self, *argv: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "exl3kit.cli", *argv]
        return subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=timeout)

    def kit_process(self, *argv: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "exl3kit.cli", *argv]
        return subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def inside(self, name: str, *argv: str, check: bool = True) -> str:
        """Run a command in a host, as root."""
        line = node.command(self.nodes[name], self.options, argv)
        done = subprocess.run(line, capture_output=True, text=True, timeout=120)
        if check and done.returncode != 0:
            raise RuntimeError(f"{name}: {' '.join(argv)}: {done.stderr or done.stdout}")
        return done.stdout

    # Processes -------------------------------------------------------------------------------------------------------

    def container(self, rank: int) -> str:
        return f"exl3kit-{RECIPE}-rank{rank}"

    def host_of(self, rank: int) -> str:
        return f"node{rank + 1}"

    def seen(self, rank: int) -> list[Seen]:
        """Every process in the rank's container, its first one first."""
        found = []
        for pid in self.pids(self.host_of(rank)):
            with contextlib.suppress(OSError, IndexError):
                numbers = Path(f"/proc/{pid}/status").read_text().partition("NSpid:")[2].partition("\n")[0].split()
                if len(numbers) == 3:
                    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                    space = str(Path(f"/proc/{pid}/ns/pid").readlink())
                    was = stat(pid)
                    if was is not None:
                        found.append(Seen(pid, was[1], int(numbers[2]), command, space))
        ranks = {one.space for one in found if one.inside == 1 and OWN in one.command}  # not a build's
        return sorted((one for one in found if one.space in ranks), key=lambda one: one.inside)

    def pids(self, name: str) -> set[int]:
        """Every process of a host; a group that ends while it is read is read again."""
        while True:
            try:
                return cgroups.processes(name)
            except FileNotFoundError:
                continue

    def first(self, rank: int) -> Seen | None:
        """The guard."""
        return next((one for one in self.seen(rank) if one.command.startswith(OWN)), None)

    def inside_pid(self, rank: int) -> int:
        """The guard's number in its host."""
        first = self.first(rank)
        if first is None:
            raise RuntimeError(f"rank {rank} does not run")
        return int(Path(f"/proc/{first.pid}/status").read_text().partition("NSpid:")[2].split()[1])

    def status(self, rank: int) -> dict[str, Any]:
        return self.read(rank, "run/exl3/status.json")

    def post_mortem(self, rank: int) -> dict[str, Any]:
        return self.read(rank, "var/lib/exl3/post-mortem.json")

    def read(self, rank: int, path: str) -> dict[str, Any]:
        first = self.first(rank)
        with contextlib.suppress(OSError, ValueError):
            if first is not None:
                return dict(json.loads(Path(f"/proc/{first.pid}/root/{path}").read_text()))
        return {}

    def process(self, rank: int, name: str) -> Seen:
        """A process by the supervisor's name for it; `supervisor` and `guard` are those."""
        if name in ("guard", "supervisor"):
            own = [one for one in self.seen(rank) if one.command.startswith(OWN)]
            return own[0 if name == "guard" else 1]
        inside = {one["pid"] for one in self.status(rank)["processes"] if one["process"].startswith(name)}
        return next(one for one in self.seen(rank) if one.inside in inside)

    def vllm(self) -> list[Seen]:
        """Every process of both ranks but guards and supervisors."""
        return [one for rank in (0, 1) for one in self.seen(rank) if "exl3_vllm.rank --" not in one.command]

    def kill(self, rank: int, name: str, number: signal.Signals) -> None:
        os.kill(self.process(rank, name).pid, number)

    # Waiting ---------------------------------------------------------------------------------------------------------

    def incarnation(self) -> int:
        return int(self.status(0).get("incarnation") or 0)

    def is_serving(self, above: int) -> bool:
        told = [self.status(rank) for rank in (0, 1)]
        return all(one.get("state") == "serving" and one["incarnation"] > above for one in told)

    def wait_serving(self, above: int, seconds: float = SERVING_S) -> float:
        """Until both ranks serve in a higher incarnation; the seconds that took. Raises `TimeoutError`."""
        begun = time.monotonic()
        while not self.is_serving(above):
            if time.monotonic() - begun > seconds:
                told = [self.status(rank) for rank in (0, 1)]
                words = [(one.get("state"), one.get("waiting_for"), one.get("why")) for one in told]
                raise TimeoutError(f"not serving after {seconds:.0f} s: {words}")
            time.sleep(0.05)
        return time.monotonic() - begun

    def wait_gone(self, before: list[Seen], seconds: float) -> float | None:
        """Until none of the processes lives; the seconds that took, None when one still does."""
        begun = time.monotonic()
        while any(one.lives() for one in before):
            if time.monotonic() - begun > seconds:
                return None
            time.sleep(0.02)
        return time.monotonic() - begun

    # The API ---------------------------------------------------------------------------------------------------------

    def client(self, prompt: str, tokens: int, timeout: float) -> subprocess.Popen[str]:
        """A request from inside the head's network; it prints the status, or what went wrong."""
        program = (
            "import json,sys,urllib.request\n"
            f"body = json.dumps({{'model': sys.argv[1], 'prompt': sys.argv[2], 'max_tokens': {tokens}}}).encode()\n"
            f"ask = urllib.request.Request('http://127.0.0.1:{PORT}/v1/completions', body, "
            "{'Content-Type': 'application/json'})\n"
            f"try: print(urllib.request.urlopen(ask, timeout={timeout}).status)\n"
            "except Exception as error: print(getattr(error, 'code', error))\n"
        )
        model = "small" if self.engine == "small" else "demo"
        inside = ["nsenter", f"--net={network.NAMESPACES / self.nodes['node1'].namespace}"]
        command = [*inside, "python3", "-c", program, model, prompt]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def ask(self, prompt: str = "2+2=", tokens: int = 8, timeout: float = 60) -> str:
        return (self.client(prompt, tokens, timeout).communicate()[0] or "").strip()

    @contextlib.contextmanager
    def load(self, clients: int = 2) -> Iterator[None]:
        """Requests in flight while the body runs."""
        going = [self.client("2+2=", 400, 60) for _ in range(clients)]
        time.sleep(0.3)
        try:
            yield
        finally:
            for one in going:
                one.kill()
                one.communicate()
