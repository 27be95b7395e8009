"""vLLM's own server, without an engine, behind the guard of its key and the gate that a stopping rank closes."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

import httpx
import pytest
from exl3_vllm import api_gate, api_guard, exits
from vllm.entrypoints.launchers import launcher
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

KEY = "sesame-0123"


def statuses(app: Any, header: dict[str, str]) -> dict[str, int]:
    """What each of the server's paths answers to an empty request."""

    async def ask() -> dict[str, int]:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://api", headers=header) as client:
            paths = [route.path for route in app.routes if "{" not in getattr(route, "path", "{")]
            return {path: (await client.post(path, json={})).status_code for path in paths}

    return asyncio.run(ask())


@pytest.mark.full
def test_no_path_of_the_real_server_answers_without_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given vLLM's server with its key and nothing else, then /invocations asks for none; given the guard, all do."""
    monkeypatch.setenv(api_guard.VARIABLE, KEY)
    parser = make_arg_parser(FlexibleArgumentParser())
    plain = statuses(build_app(parser.parse_args([]), ("generate",)), {})
    guarded = build_app(parser.parse_args(api_guard.guarded(["vllm", "serve"])[2:]), ("generate",))
    assert plain["/v1/completions"] == 401 and plain["/invocations"] != 401
    without = statuses(guarded, {})
    assert {path for path, status in without.items() if status != 401} <= {"/health", "/metrics"}
    assert statuses(guarded, {"Authorization": f"Bearer {KEY}"})["/invocations"] != 401


@pytest.mark.full
def test_behind_the_closed_gate_the_real_server_answers_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EXL3_RUN_DIR", str(tmp_path))
    parser = make_arg_parser(FlexibleArgumentParser())
    app = build_app(parser.parse_args(api_gate.gated(["vllm", "serve"])[2:]), ("generate",))
    assert 503 not in set(statuses(app, {}).values())
    api_gate.close_gate(tmp_path)
    assert {path for path, status in statuses(app, {}).items() if status != 503} <= {"/metrics"}
    assert not api_gate.holds(tmp_path, api_gate.INSIDE)


def test_the_words_by_which_a_server_is_known_to_stop_are_vllms() -> None:
    assert f'"{exits.STOP_SAID}"' in inspect.getsource(launcher)
