"""Gangs of real supervisors on the loopback: two processes with real sockets, and a program in the place of vLLM."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "overlay"))

from exl3_vllm import gang_wire
from exl3_vllm.gang import Beat, Phase

from exl3kit.post_mortem import is_whole

REPO = Path(__file__).resolve().parents[2]
PROGRAM = """if True:  # outside a container nobody ends it with a supervisor that was killed, so it looks for itself
    import os, time
    parent = os.getppid()
    print("it runs", flush=True)
    while os.getppid() == parent:
        time.sleep(0.2)
"""


@dataclass
class Bench:
    """Folders, a port and a secret for the ranks of one test."""

    folder: Path
    port: int
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    def environ(self, rank: int, **changes: str) -> dict[str, str]:
        for name in (f"run{rank}", f"state{rank}"):
            (self.folder / name).mkdir(exist_ok=True)
        return {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{REPO / 'overlay'}:{self.folder / 'site'}",
            "EXL3_RANK": str(rank),
            "EXL3_GENERATION": "g1",
            "EXL3_SPEC": "spec",
            "EXL3_MODEL_DIR": str(self.folder / "model"),
            "EXL3_RUN_DIR": str(self.folder / f"run{rank}"),
            "EXL3_STATE_DIR": str(self.folder / f"state{rank}"),
            "EXL3_API": "http://127.0.0.1:1",
            "EXL3_PEERS": f"127.0.0.1:{self.port},127.0.0.2:{self.port}",
            "EXL3_GANG_SECRET_FILE": str(self.folder / "secret"),
            **changes,
        }

    def begin(self, rank: int, program: str = PROGRAM, **changes: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "exl3_vllm.rank", "--", sys.executable, "-c", program]
        environ = self.environ(rank, **changes)
        log = (self.folder / f"log{rank}").open("a")
        self.running.append(subprocess.Popen(argv, env=environ, stdout=log, stderr=log, text=True))
        return self.running[-1]

    def log(self, rank: int) -> str:
        return (self.folder / f"log{rank}").read_text()

    def status(self, rank: int) -> dict[str, Any]:
        try:
            return dict(json.loads((self.folder / f"run{rank}" / "status.json").read_text()))
        except (OSError, ValueError):
            return {}

    def post_mortem(self, rank: int) -> dict[str, Any]:
        return dict(json.loads((self.folder / f"state{rank}" / "post-mortem.json").read_text()))

    def until(self, what: Callable[[], bool], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            logs = "\n".join(self.log(rank) for rank in (0, 1) if (self.folder / f"log{rank}").exists())
            assert time.monotonic() < deadline, logs
            time.sleep(0.05)

    def until_state(self, state: str, *ranks: int) -> None:
        self.until(lambda: all(self.status(rank).get("state") == state for rank in ranks))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    info = tmp_path / "site" / "exl3_vllm-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: exl3-vllm\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nexl3 = exl3_vllm:register\n")
    (tmp_path / "secret").write_text("of this gang")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    made = Bench(tmp_path, port)
    yield made
    for process in made.running:
        supervisors = children_of(process)  # one may be stopped, and outlives its guard outside a container
        process.kill()
        process.wait()
        for supervisor in supervisors:
            with contextlib.suppress(ProcessLookupError):
                os.kill(supervisor, signal.SIGKILL)


def children_of(process: subprocess.Popen[str]) -> list[int]:
    """Numbers of a guard's children; none when it has ended."""
    try:
        return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    except OSError:
        return []


def test_one_dies_and_both_end_with_the_same_report(bench: Bench) -> None:
    # given a rank that ends with an error after the gang has started
    both = [
        bench.begin(0),
        bench.begin(1, "import time; print('last words', flush=True); time.sleep(2); raise SystemExit(9)"),
    ]
    codes = [one.wait(60) for one in both]
    # then both end, with its exit code and the gang's, and each says who was first
    assert codes == [7, 9]
    for rank in (0, 1):
        report = bench.post_mortem(rank)
        assert (report["incarnation"], report["missing"], sorted(report["records"])) == (1, [], ["0", "1"])
        assert (report["first"]["rank"], report["first"]["kind"]) == (1, "exit")
        assert "status 9" in report["first"]["sentence"]
        assert "last words" in report["records"]["1"]["lines"]
        assert report["records"]["0"]["memory"]["available"] > 0
        assert sum(is_whole(line) for line in bench.log(rank).splitlines()) == 1


def test_a_supervisor_that_is_killed_is_noticed_by_its_closed_port(bench: Bench) -> None:
    head, other = bench.begin(0), bench.begin(1)
    bench.until_state("starting", 0, 1)
    os.kill(children_of(other)[0], signal.SIGKILL)
    begun = time.monotonic()
    assert head.wait(60) == 7
    assert time.monotonic() - begun < 7  # the silence that would end it otherwise
    assert bench.post_mortem(0)["first"]["kind"] == "gone"
    assert bench.post_mortem(0)["missing"] == [1]


def test_a_rank_that_falls_silent_is_given_up(bench: Bench) -> None:
    head, other = bench.begin(0, EXL3_LOST_S="2"), bench.begin(1)
    bench.until_state("starting", 0, 1)
    os.kill(children_of(other)[0], signal.SIGSTOP)
    assert head.wait(60) == 7
    first = bench.post_mortem(0)["first"]
    assert (first["rank"], first["kind"]) == (1, "silent")


def test_the_gang_forms_again_in_the_next_incarnation(bench: Bench) -> None:
    for incarnation in (1, 2):
        both = [bench.begin(0), bench.begin(1)]
        bench.until_state("starting", 0, 1)
        assert [bench.status(rank)["incarnation"] for rank in (0, 1)] == [incarnation] * 2
        os.kill(bench.status(1)["pid"], signal.SIGKILL)
        assert [one.wait(60) for one in both] == [7, 137]


def test_a_stop_of_one_rank_ends_both_and_is_told_by_the_other(bench: Bench) -> None:
    both = [bench.begin(0), bench.begin(1)]
    bench.until_state("starting", 0, 1)
    both[1].terminate()
    assert [one.wait(60) for one in both] == [7, 0]  # 7: its engine starts it again, and it waits for rank 1
    assert "rank 1 was told to stop" in bench.log(0)
    assert [path.parent.name for path in bench.folder.glob("state*/post-mortem.json")] == ["state0"]
    assert (bench.post_mortem(0)["first"]["rank"], bench.post_mortem(0)["first"]["kind"]) == (1, "stop")


def test_a_stop_of_all_ranks_is_no_death(bench: Bench) -> None:
    both = [bench.begin(0), bench.begin(1)]
    bench.until_state("starting", 0, 1)
    for one in both:
        one.terminate()
    assert [one.wait(60) for one in both] == [0, 0]
    assert not list(bench.folder.glob("state*/post-mortem.json"))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"EXL3_GANG_SECRET_FILE": "other"}, "has another secret"),
        ({"EXL3_GENERATION": "g0"}, "is of generation g0, this rank of g1"),
        ({"EXL3_SPEC": "older"}, "is of spec older, this rank of spec"),
    ],
)
def test_a_rank_of_another_gang_is_refused_and_named(bench: Bench, changes: dict[str, str], why: str) -> None:
    other = dict(changes)
    if "EXL3_GANG_SECRET_FILE" in other:
        (bench.folder / "other").write_text("of another gang")
        other["EXL3_GANG_SECRET_FILE"] = str(bench.folder / "other")
    bench.begin(0)
    bench.begin(1, **other)
    bench.until(lambda: why in str(bench.status(0).get("waiting_for")))
    bench.until(lambda: f"waits for rank 1 (it {why})" in bench.log(0))
    time.sleep(1)
    assert [bench.status(rank)["state"] for rank in (0, 1)] == ["waiting", "waiting"]
    health = subprocess.run(
        [sys.executable, "-m", "exl3_vllm.rank", "--health"], env=bench.environ(0), capture_output=True, text=True
    )
    assert (health.returncode, why in health.stdout) == (1, True)


def test_the_secret_is_in_no_argv_environment_log_or_datagram(bench: Bench) -> None:
    secret = "sesame-of-this-gang"
    (bench.folder / "secret").write_text(secret)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.2", bench.port))
        listener.settimeout(20)
        process = bench.begin(0)
        datagrams = [listener.recvfrom(65536)[0] for _ in range(3)]
    assert not any(secret.encode() in one for one in datagrams)
    for name in ("cmdline", "environ"):
        assert secret.encode() not in Path(f"/proc/{process.pid}/{name}").read_bytes()
    assert secret not in bench.log(0) + json.dumps(bench.status(0))


def test_a_missing_secret_or_a_taken_port_is_refused_in_a_sentence(bench: Bench) -> None:
    assert bench.begin(0, EXL3_GANG_SECRET_FILE="/nowhere").wait(60) == 3
    assert "cannot read the gang's secret in /nowhere" in bench.log(0)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", bench.port))
        assert bench.begin(0).wait(60) == 3
    assert f"cannot listen on 127.0.0.1, UDP port {bench.port}" in bench.log(0)


# The wire alone ------------------------------------------------------------------------------------------------------


def beat(**changes: Any) -> Beat:
    fields: dict[str, Any] = {
        "sender": 1,
        "generation": "g",
        "spec": "s",
        "session": "x",
        "echo": "y",
        "seq": 1,
        "sent": 1.5,
        "lag": None,
        "phase": Phase.WAITING,
        "incarnation": 0,
        "known": 3,
        "members": {0: "a", 1: "b"},
        "heard": (0,),
    }
    return Beat(**{**fields, **changes})


def test_a_beat_survives_the_wire() -> None:
    key = gang_wire.gang_key(b"secret")
    for one in (beat(), beat(death={"lines": ["é" * 200] * 15}, phase=Phase.ENDED)):
        datagram = gang_wire.encode(one, key)
        assert gang_wire.decode(datagram, key) == one
        assert len(datagram) < 1400


@pytest.mark.parametrize("where", [0, 5, 20, 50, -1])
def test_a_changed_datagram_is_none(where: int) -> None:
    key = gang_wire.gang_key(b"secret")
    datagram = bytearray(gang_wire.encode(beat(), key))
    datagram[where] ^= 1
    with pytest.raises(gang_wire.WireError):
        gang_wire.decode(bytes(datagram), key)
    with pytest.raises(gang_wire.WireError, match="another secret"):
        gang_wire.decode(gang_wire.encode(beat(), gang_wire.gang_key(b"other")), key)


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:0", "host:70000", "host:1,,"])
def test_peers_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no host:port"):
        gang_wire.parse_peers(text)
