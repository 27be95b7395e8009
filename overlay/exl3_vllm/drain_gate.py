"""While a rank stops, its API takes nothing new, and the supervisor knows when the last answer is out.

vLLM stops its engine first and its HTTP server last. What comes in between is answered with status 500, and a request
that had not reached the engine yet with status 200 and no text (seen with 0.32.0 under 16 clients). So the supervisor
closes this gate before it tells vLLM to stop, and waits until nobody is inside.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from exl3_vllm.api_guard import App, Receive, Send, behind

CLOSED = "closed"  # this file of the run folder closes the gate
INSIDE = "inside"  # every server process shares the lock of this one while it answers
RETRY_AFTER_S = 30  # a restart of a small model; one that is asked too early asks again

UNCOUNTED = ("/metrics",)  # the supervisor reads the counters until the end


def gated(argv: Sequence[str]) -> list[str]:
    """The argv of a server behind the gate; of anything but `vllm serve` unchanged."""
    return behind(argv, f"{__name__}.DrainGate")


class DrainGate:
    """ASGI middleware: refuses with 503 once the gate is closed, and holds the shared lock while it answers any."""

    def __init__(self, app: App) -> None:
        folder = Path(os.environ["EXL3_RUN_DIR"])
        self.app, self.closed, self.inside = app, folder / CLOSED, 0
        self.lock = open_lock(folder)

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        path = str(scope.get("path", "")).removeprefix(scope.get("root_path", "")).rstrip("/")
        if scope["type"] not in ("http", "websocket") or path in UNCOUNTED:
            await self.app(scope, receive, send)
        elif not self.enter():
            await refuse(scope, receive, send)
        else:
            try:
                await self.app(scope, receive, send)
            finally:
                self.leave()

    def enter(self) -> bool:
        """Count a request in; False when the gate is closed.

        The lock is taken before the file is looked for: the supervisor makes the file and then tries the lock, so it
        either waits for this request or this request sees the file.
        """
        if self.inside == 0:
            try:
                fcntl.flock(self.lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:  # the supervisor is trying it, which it does only behind a closed gate
                return False
        self.inside += 1
        if self.closed.exists():
            self.leave()
            return False
        return True

    def leave(self) -> None:
        self.inside -= 1
        if self.inside == 0:
            fcntl.flock(self.lock, fcntl.LOCK_UN)


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


def open_lock(folder: Path) -> int:
    return os.open(folder / INSIDE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def open_gate(folder: Path) -> None:
    (folder / CLOSED).unlink(missing_ok=True)


def close_gate(folder: Path) -> None:
    (folder / CLOSED).touch()


def is_empty(folder: Path) -> bool:
    """Whether no server process answers anything; a process that has died holds no lock."""
    lock = open_lock(folder)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        return True
    finally:
        os.close(lock)
