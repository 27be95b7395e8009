"""Questions to the API of this container's own vLLM: one by hand (`--ask`), and those by which the head judges it."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from exl3_vllm import api_gate, watch
from exl3_vllm.rank_settings import Settings

POLL_S = 1.0
START_POLL_S = 0.5
PROBE_S = 300.0  # a cold first token compiles and autotunes


def get(url: str, *, timeout: float, body: bytes | None = None, key: str | None = None) -> tuple[int, str]:
    """HTTP status and text; status 0 and the reason when there is no answer."""
    headers = {"Content-Type": "application/json"} if body is not None else {}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url, data=body, headers=headers)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy on the way to oneself
    try:
        with direct.open(request, timeout=timeout) as answer:
            return answer.status, answer.read().decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode("utf-8", "replace")
    except (OSError, ValueError) as error:  # URLError, timeouts and resets alike; ValueError: half an answer
        return 0, str(getattr(error, "reason", error))


def ask(settings: Settings, request: Mapping[str, Any]) -> dict[str, Any]:
    """Wait until the API is up, send one request, return `{status, seconds, waited, answer}`.

    `request`: `path`, `body` (JSON, or null for GET), `wait_s` (how long the API may take to come up), `timeout_s` (how
    long one answer may take). status is 0 when no API or no answer came; `answer` then says why.
    """
    begun = time.monotonic()
    while True:
        code, text = get(settings.api + "/health", timeout=5)
        if code == 200:
            break
        if time.monotonic() - begun > request["wait_s"]:
            why = f"no /health within {request['wait_s']:.0f} s, last: {code or text}"
            return {"status": 0, "seconds": 0.0, "waited": time.monotonic() - begun, "answer": why}
        time.sleep(0.25)
    waited = time.monotonic() - begun
    body = None if request.get("body") is None else json.dumps(request["body"]).encode()
    sent = time.monotonic()
    code, text = get(settings.api + request["path"], timeout=request["timeout_s"], body=body, key=settings.api_key())
    seconds = time.monotonic() - sent
    try:
        answer: Any = json.loads(text)
    except ValueError:
        answer = text
    return {"status": code, "seconds": seconds, "waited": waited, "answer": answer}


class Judge:
    """Asks the head's API from a thread of its own: first until a token came, then for the counters of the engine.

    A green `/health` is not believed: it stays green when no token comes.
    """

    def __init__(self, settings: Settings, key: str | None) -> None:
        self.ready = False
        self.samples: list[tuple[float, dict[str, float]]] = []  # (time, counters), newest last; taken by the reader
        self._api, self._key, self._run_dir = settings.api, key, settings.run_dir
        self._stop = threading.Event()
        threading.Thread(target=self._run, name="exl3-judge", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(POLL_S if self.ready else START_POLL_S):
            if not self.ready:
                self.ready = self._gives_a_token()
                continue
            code, text = get(self._api + "/metrics", timeout=5)
            if code == 200:
                unanswered = {"unanswered": float(api_gate.holds(self._run_dir, api_gate.UNANSWERED))}
                self.samples.append((time.monotonic(), {**watch.parse_metrics(text), **unanswered}))

    def _gives_a_token(self) -> bool:
        if get(self._api + "/health", timeout=5)[0] != 200:
            return False
        code, text = get(self._api + "/v1/models", timeout=5, key=self._key)
        try:
            model = json.loads(text)["data"][0]["id"]
        except (ValueError, KeyError, IndexError, TypeError):
            return False
        body = json.dumps({"model": model, "prompt": "1", "max_tokens": 1, "temperature": 0}).encode()
        code, _ = get(self._api + "/v1/completions", timeout=PROBE_S, body=body, key=self._key)
        return 200 <= code < 500 and code != 429  # a model that serves no completions says so, and that is an answer
