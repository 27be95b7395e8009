"""The gate before the API: who is inside, who waits for a first token, and nobody new while the rank stops.

vLLM stops its engine first and its HTTP server last. What comes in between is answered with status 500, and a request
that had not reached the engine yet with status 200 and no text (seen with 0.32.0 under 16 clients). So the supervisor
closes this gate before it tells vLLM to stop, and waits until nobody is inside.

vLLM's counters come with the results of a step, so of a request whose first step hangs they say nothing: an engine that
had nothing to do seems idle for ever (seen with 0.32.0). So the gate tells who waits.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from exl3_vllm.api_guard import App, Receive, Send, behind

CLOSED = "closed"  # this file of the run folder closes the gate
PRESENT = "present"  # every server process holds read locks on bytes of this one, by what its requests are at
INSIDE, UNANSWERED = 0, 1  # the bytes: one is being served; one has been asked, and no token came yet
RETRY_AFTER_S = 30  # a restart of a small model; one that is asked too early asks again

UNCOUNTED = ("/metrics",)  # the supervisor reads the counters until the end
FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, length, pid


def gated(argv: Sequence[str]) -> list[str]:
    """The argv of a server behind the gate; of anything but `vllm serve` unchanged."""
    return behind(argv, f"{__name__}.ApiGate")


class ApiGate:
    """ASGI middleware: refuses with 503 once the gate is closed, and tells the supervisor what it lets in."""

    def __init__(self, app: App) -> None:
        folder = Path(os.environ["EXL3_RUN_DIR"])
        self.app, self.closed = app, folder / CLOSED
        file = open_present(folder)
        self.inside, self.unanswered = Presence(file, INSIDE), Presence(file, UNANSWERED)

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        path = str(scope.get("path", "")).removeprefix(scope.get("root_path", ""))
        if scope["type"] not in ("http", "websocket") or path.rstrip("/") in UNCOUNTED:
            await self.app(scope, receive, send)
            return
        # Entered before the file is looked for: the supervisor makes the file and then looks who is inside, so it
        # either waits for this request or this request sees the file.
        self.inside.enter()
        try:
            closed = self.closed.exists()
            if not closed:
                await self.serve(path, scope, receive, send)
        finally:
            self.inside.leave()
        if closed:
            await refuse(scope, receive, send)

    async def serve(self, path: str, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope.get("method") != "POST" or not path.startswith("/v1/"):
            await self.app(scope, receive, send)
            return
        question = Question(self.unanswered, receive, send)
        try:
            await self.app(scope, question.receive, question.send)
        finally:
            question.settle()


class Presence:
    """How many requests of this process are at something; others see whether there are any."""

    def __init__(self, file: int, byte: int) -> None:
        self.file, self.byte, self.count = file, byte, 0

    def enter(self) -> None:
        if self.count == 0:
            self._set(fcntl.F_RDLCK)
        self.count += 1

    def leave(self) -> None:
        self.count -= 1
        if self.count == 0:
            self._set(fcntl.F_UNLCK)

    def _set(self, kind: int) -> None:
        """Never blocks: nobody takes a write lock."""
        fcntl.fcntl(self.file, fcntl.F_OFD_SETLK, struct.pack(FLOCK, kind, os.SEEK_SET, self.byte, 1, 0))


class Question:
    """A request for tokens. It waits from its last byte to the first one of its answer: neither a client that sends
    slowly nor one that reads slowly makes the engine look stalled.
    """

    def __init__(self, unanswered: Presence, receive: Receive, send: Send) -> None:
        self.unanswered, self._receive, self._send = unanswered, receive, send
        self.waits = False

    async def receive(self) -> Any:
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body") and not self.waits:
            self.waits = True
            self.unanswered.enter()
        return message

    async def send(self, message: dict[str, Any]) -> None:
        if message.get("body"):
            self.settle()
        await self._send(message)

    def settle(self) -> None:
        if self.waits:
            self.waits = False
            self.unanswered.leave()


async def refuse(scope: dict[str, Any], receive: Receive, send: Send) -> None:
    """Say so once the client has sent all: one that still writes when the connection ends sees a broken pipe only."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1012})  # RFC 6455's registry: service restart
        return
    while (await receive()).get("more_body"):
        pass
    said = {"message": "this server is stopping; ask again later", "type": "ServiceUnavailable", "code": 503}
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    headers.append((b"retry-after", str(RETRY_AFTER_S).encode()))
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"error": said}).encode()})


# The supervisor's side ------------------------------------------------------------------------------------------------


def open_present(folder: Path) -> int:
    return os.open(folder / PRESENT, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def open_gate(folder: Path) -> None:
    (folder / CLOSED).unlink(missing_ok=True)


def close_gate(folder: Path) -> None:
    (folder / CLOSED).touch()


def holds(folder: Path, byte: int) -> bool:
    """Whether any server process has a request at that; one that has died has none.

    Asked by what a write lock would meet, which is not taken.
    """
    file = open_present(folder)
    try:
        met = fcntl.fcntl(file, fcntl.F_OFD_GETLK, struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    finally:
        os.close(file)
    return bool(struct.unpack_from("h", met)[0] != fcntl.F_UNLCK)
