"""The API key guards every path of the server.

vLLM asks for its key under `/v1`, `/v2`, `/inference` and `/cohere` alone; `/invocations` answers questions as `/v1`
does, and asks for none. This middleware stands before all of them. What needs no key tells nothing that was asked:
whether the server is well, and its counters.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import PurePath
from typing import Any

VARIABLE = "VLLM_API_KEY"
WITHOUT_KEY = ("/health", "/metrics")

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Callable[[dict[str, Any], Receive, Send], Awaitable[None]]


def guarded(argv: Sequence[str]) -> list[str]:
    """The argv of a server whose every path asks for the key; of anything but `vllm serve` unchanged."""
    return behind(argv, f"{__name__}.KeyGuard")


def behind(argv: Sequence[str], middleware: str) -> list[str]:
    """The argv of `vllm serve` with one more ASGI middleware, before the others; of anything else unchanged."""
    serves = [PurePath(argv[0]).name, *argv[1:2]] == ["vllm", "serve"] if argv else False
    return [*argv, "--middleware", middleware] if serves else list(argv)


class KeyGuard:
    """ASGI middleware: refuses requests without the key of `VLLM_API_KEY`, but for `WITHOUT_KEY` and preflights."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.digest = _digest(os.environ[VARIABLE])

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or self.may_pass(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            body = json.dumps({"error": "Unauthorized"}).encode()
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    def may_pass(self, scope: dict[str, Any]) -> bool:
        """Whether a request needs no key, or has it."""
        path = str(scope["path"]).removeprefix(scope.get("root_path", ""))
        if scope.get("method") == "OPTIONS" or path.rstrip("/") in WITHOUT_KEY:
            return True
        said = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        kind, _, token = said[0].partition(b" ") if len(said) == 1 else (b"", b"", b"")
        return kind.lower() == b"bearer" and hmac.compare_digest(_digest(token), self.digest)


def _digest(key: str | bytes) -> bytes:
    """Of one length, so that comparing tells nothing of the key's."""
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).digest()
