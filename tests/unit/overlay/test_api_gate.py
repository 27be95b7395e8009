"""The gate tells who is inside and who waits for a token; a stopping server takes nothing new."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from exl3_vllm import api_gate
from exl3_vllm.api_gate import INSIDE, UNANSWERED, ApiGate

OVERLAY = Path(__file__).resolve().parents[3] / "overlay"
APP = {"type": "http.response.body", "body": b"4"}
HTTP = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}


class Client:
    """One request at a gate; the server behind it answers when `release` is set."""

    def __init__(self, gate_of: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("EXL3_RUN_DIR", str(gate_of))
        self.gate = ApiGate(self.server)
        self.release = asyncio.Event()
        self.read: list[int] = []  # how many messages had been sent when a part of a request's body was read

    async def server(self, scope: Any, receive: Any, send: Any) -> None:
        if scope.get("slow"):
            await self.release.wait()
        if scope.get("fails"):
            raise ValueError("a bug of the server")
        await send(APP)

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
    assert asyncio.run(client.ask()) == [APP]
    api_gate.close_gate(tmp_path)
    start, body = asyncio.run(client.ask())
    assert start["status"] == 503 and (b"connection", b"close") in start["headers"]
    assert int(dict(start["headers"])[b"retry-after"]) > 0
    assert client.read == [0, 0, 0]  # a client that still writes when the connection ends would see a broken pipe
    assert "stopping" in json.loads(body["body"])["error"]["message"]
    assert asyncio.run(client.ask(path="/health"))[0]["status"] == 503  # what balances load sends nothing more
    assert asyncio.run(client.ask(path="/metrics/")) == [APP]
    assert asyncio.run(client.ask(type="lifespan")) == [APP]
    assert asyncio.run(client.ask(type="websocket")) == [{"type": "websocket.close", "code": 1012}]
    api_gate.open_gate(tmp_path)
    assert asyncio.run(client.ask()) == [APP]


def test_who_is_inside_is_answered_and_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(tmp_path, monkeypatch)

    async def course() -> None:
        slow = [asyncio.create_task(client.ask(slow=True)) for _ in range(2)]
        await asyncio.sleep(0)  # they enter
        assert await client.ask() == [APP]  # one that comes and goes meanwhile does not count the others out
        api_gate.close_gate(tmp_path)
        assert (await client.ask())[0]["status"] == 503
        assert api_gate.holds(tmp_path, INSIDE)
        client.release.set()
        assert await asyncio.gather(*slow) == [[APP], [APP]]
        assert not api_gate.holds(tmp_path, INSIDE)

    assert not api_gate.holds(tmp_path, INSIDE)
    asyncio.run(course())


def test_an_error_of_the_server_leaves_nobody_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(tmp_path, monkeypatch)
    with pytest.raises(ValueError, match="a bug"):
        asyncio.run(client.ask(fails=True))
    assert not api_gate.holds(tmp_path, INSIDE)


def test_a_killed_server_process_is_not_inside(tmp_path: Path) -> None:
    program = "import sys, time; from exl3_vllm import api_gate; from pathlib import Path\n"
    program += "here = api_gate.Presence(api_gate.open_present(Path(sys.argv[1])), api_gate.INSIDE); here.enter()\n"
    argv = [sys.executable, "-c", program + "print('in', flush=True); time.sleep(60)", str(tmp_path)]
    two = [subprocess.Popen(argv, env={"PYTHONPATH": str(OVERLAY)}, stdout=subprocess.PIPE) for _ in range(2)]
    for process in two:
        assert process.stdout is not None and process.stdout.readline() == b"in\n"
    held = []
    for process in two:
        held.append(api_gate.holds(tmp_path, INSIDE))
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert [*held, api_gate.holds(tmp_path, INSIDE)] == [True, True, False]


@pytest.mark.parametrize(
    ("steps", "scope", "waits"),
    [
        (["asked"], {}, True),
        (["asked", "start"], {}, True),  # a stream has begun, and nothing is in it
        (["asked", "start", "token"], {}, False),
        (["asked a part"], {}, False),  # a client that sends slowly
        ([], {}, False),
        (["asked"], {"path": "/start_profile"}, False),
        (["asked"], {"method": "GET", "path": "/v1/models"}, False),
    ],
)
def test_who_has_asked_and_got_no_token_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: list[str], scope: dict[str, Any], waits: bool
) -> None:
    monkeypatch.setenv("EXL3_RUN_DIR", str(tmp_path))
    seen: list[bool] = []

    async def server(scope: Any, receive: Any, send: Any) -> None:
        for step in steps:
            if step.startswith("asked"):
                await receive()
            else:
                await send({"type": "http.response." + step, **({"body": b"4"} if step == "token" else {})})
        seen.append(api_gate.holds(tmp_path, UNANSWERED))

    async def receive() -> Any:
        whole = "asked a part" not in steps
        return {"type": "http.request", "more_body": not whole} if not seen else {"type": "http.disconnect"}

    async def send(message: Any) -> None: ...

    asyncio.run(ApiGate(server)({**HTTP, **scope}, receive, send))
    assert seen == [waits]
    assert not api_gate.holds(tmp_path, UNANSWERED)


def test_only_vllms_server_gets_the_gate() -> None:
    assert api_gate.gated(["vllm", "serve", "/m"])[-2:] == ["--middleware", "exl3_vllm.api_gate.ApiGate"]
    assert api_gate.gated(["vllm", "bench"]) == ["vllm", "bench"]
