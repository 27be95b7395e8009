"""A stopping server takes nothing new, and its supervisor learns when the last answer is out."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from exl3_vllm import drain_gate
from exl3_vllm.drain_gate import DrainGate

OVERLAY = Path(__file__).resolve().parents[3] / "overlay"
HTTP = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}


class Client:
    """One request at a gate; the server behind it answers when `release` is set."""

    def __init__(self, gate_of: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("EXL3_RUN_DIR", str(gate_of))
        self.gate = DrainGate(self.server)
        self.release = asyncio.Event()
        self.read: list[int] = []  # how many messages had been sent when a part of a request's body was read

    async def server(self, scope: Any, receive: Any, send: Any) -> None:
        if scope.get("slow"):
            await self.release.wait()
        if scope.get("fails"):
            raise ValueError("a bug of the server")
        await send("app")

    async def ask(self, **scope: Any) -> list[Any]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            self.read.append(len(sent))
            return {"type": "http.request", "body": b"x", "more_body": len(self.read) < 3}

        await self.gate({**HTTP, **scope}, receive, send)
        return sent


def test_a_closed_gate_refuses_all_but_the_counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(tmp_path, monkeypatch)
    assert asyncio.run(client.ask()) == ["app"]
    drain_gate.close_gate(tmp_path)
    start, body = asyncio.run(client.ask())
    assert start["status"] == 503 and (b"connection", b"close") in start["headers"]
    assert int(dict(start["headers"])[b"retry-after"]) > 0
    assert client.read == [0, 0, 0]  # a client that still writes when the connection ends would see a broken pipe
    assert "stopping" in json.loads(body["body"])["error"]["message"]
    assert asyncio.run(client.ask(path="/health"))[0]["status"] == 503  # what balances load sends nothing more
    assert asyncio.run(client.ask(path="/metrics/")) == ["app"]
    assert asyncio.run(client.ask(type="lifespan")) == ["app"]
    assert asyncio.run(client.ask(type="websocket")) == [{"type": "websocket.close", "code": 1012}]
    drain_gate.open_gate(tmp_path)
    assert asyncio.run(client.ask()) == ["app"]


def test_who_is_inside_is_answered_and_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(tmp_path, monkeypatch)

    async def course() -> None:
        slow = [asyncio.create_task(client.ask(slow=True)) for _ in range(2)]
        await asyncio.sleep(0)  # they enter
        assert await client.ask() == ["app"]  # one that comes and goes meanwhile does not count the others out
        drain_gate.close_gate(tmp_path)
        assert (await client.ask())[0]["status"] == 503
        assert not drain_gate.is_empty(tmp_path)
        client.release.set()
        assert await asyncio.gather(*slow) == [["app"], ["app"]]
        assert drain_gate.is_empty(tmp_path)

    assert drain_gate.is_empty(tmp_path)
    asyncio.run(course())


def test_an_error_of_the_server_leaves_nobody_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(tmp_path, monkeypatch)
    with pytest.raises(ValueError, match="a bug"):
        asyncio.run(client.ask(fails=True))
    assert drain_gate.is_empty(tmp_path)


def test_a_request_that_meets_the_supervisors_look_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(tmp_path, monkeypatch)
    looking = drain_gate.open_lock(tmp_path)
    drain_gate.fcntl.flock(looking, drain_gate.fcntl.LOCK_EX)
    assert asyncio.run(client.ask())[0]["status"] == 503
    os.close(looking)
    assert asyncio.run(client.ask()) == ["app"]


def test_a_killed_server_process_is_not_inside(tmp_path: Path) -> None:
    program = "import fcntl, sys, time; from exl3_vllm import drain_gate; from pathlib import Path\n"
    program += "fcntl.flock(drain_gate.open_lock(Path(sys.argv[1])), fcntl.LOCK_SH); print('in', flush=True)\n"
    argv = [sys.executable, "-c", program + "time.sleep(60)", str(tmp_path)]
    two = [subprocess.Popen(argv, env={"PYTHONPATH": str(OVERLAY)}, stdout=subprocess.PIPE) for _ in range(2)]
    for process in two:
        assert process.stdout is not None and process.stdout.readline() == b"in\n"
    empty = []
    for process in two:
        empty.append(drain_gate.is_empty(tmp_path))
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert [*empty, drain_gate.is_empty(tmp_path)] == [False, False, True]


def test_only_vllms_server_gets_the_gate() -> None:
    assert drain_gate.gated(["vllm", "serve", "/m"])[-2:] == ["--middleware", "exl3_vllm.drain_gate.DrainGate"]
    assert drain_gate.gated(["vllm", "bench"]) == ["vllm", "bench"]
