"""With an API key every path asks for it, but for health, metrics and preflights."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from exl3_vllm.api_guard import KeyGuard, guarded

KEY = "sesame-0123"


def answers(monkeypatch: pytest.MonkeyPatch, path: str, header: str | None = None, **scope: Any) -> list[Any]:
    """What is sent to a client: `["app"]` when the request reached the server behind the guard."""
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        sent.append("app")

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("the guard reads no body")

    headers = [] if header is None else [(b"Authorization", header.encode())]
    request = {"type": "http", "method": "POST", "path": path, "headers": headers, **scope}
    asyncio.run(KeyGuard(app)(request, receive, send))
    return sent


@pytest.mark.parametrize(
    "path", ["/invocations", "/v1/completions", "/tokenize", "/", "/healthy", "/health/../v1", "/docs"]
)
def test_a_path_without_the_key_is_refused(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    start, body = answers(monkeypatch, path)
    assert (start["status"], body["body"]) == (401, b'{"error": "Unauthorized"}')
    assert answers(monkeypatch, path, f"Bearer {KEY}") == ["app"]


@pytest.mark.parametrize(
    "header", ["Bearer sesame", f"Bearer {KEY} ", f"Basic {KEY}", KEY, "Bearer ", f"Bearer {KEY}é"]
)
def test_anything_but_the_key_is_refused(monkeypatch: pytest.MonkeyPatch, header: str) -> None:
    assert answers(monkeypatch, "/v1/models", header)[0]["status"] == 401


def test_two_keys_in_one_request_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    twice = [(b"authorization", f"Bearer {KEY}".encode()), (b"authorization", b"Bearer other")]
    assert answers(monkeypatch, "/v1/models", headers=twice)[0]["status"] == 401


@pytest.mark.parametrize("path", ["/health", "/metrics", "/metrics/"])
def test_health_and_metrics_need_no_key(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    assert answers(monkeypatch, path) == ["app"]


def test_preflights_and_the_servers_own_messages_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    assert answers(monkeypatch, "/v1/models", method="OPTIONS") == ["app"]
    assert answers(monkeypatch, "", type="lifespan") == ["app"]


def test_a_websocket_without_the_key_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert answers(monkeypatch, "/v1/realtime", type="websocket") == [{"type": "websocket.close", "code": 1008}]


def test_only_vllms_server_gets_the_guard() -> None:
    assert guarded(["vllm", "serve", "/model"])[-2:] == ["--middleware", "exl3_vllm.api_guard.KeyGuard"]
    assert guarded(["/usr/bin/vllm", "serve", "/m"])[-1].endswith("KeyGuard")
    assert guarded(["vllm", "bench"]) == ["vllm", "bench"] and guarded([]) == []
