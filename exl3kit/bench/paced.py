"""A server of known speed, to try the bench on: it speaks vLLM's API and metrics, and computes by waiting.

    python -m exl3kit.bench.paced --rate 2000        prints {"port": N}, then serves until it is ended

What is measured on it is known beforehand, so whether a campaign finds it can be tested; and it can lie in each of the
ways that the gate must see through. Its figures say nothing about any model. One token is one character.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from exl3kit.bench import metrics

BLOCK = 16  # tokens of a block of its prefix cache
MODEL = "paced"


@dataclass(frozen=True)
class Pace:
    """How fast it is and how it lies.

    rate: prompt tokens per second. decode: generated tokens per second. boot_spread: standard deviation of the
    logarithm of a boot's speed. delay: factor on every wait. lack: a metric, or `cached_tokens`, that is left out. nan:
    a metric that is no number. foreign: somebody else's request falls into every window. busy: a request of somebody
    else runs all the time. preempt: every request is preempted once.
    """

    rate: float = 2000.0
    decode: float = 500.0
    boot_spread: float = 0.0
    delay: float = 1.0
    lack: str | None = None
    nan: str | None = None
    foreign: bool = False
    busy: bool = False
    preempt: bool = False
    max_model_len: int = 4096


class State:
    """Counters and cache of one boot."""

    def __init__(self, pace: Pace, seed: int) -> None:
        self.pace, self.lock = pace, threading.Lock()
        self.slowness = pace.delay * random.Random(seed).lognormvariate(0, pace.boot_spread)
        self.counts: Counter[str] = Counter()
        self.blocks: set[int] = set()
        self.running = 1 if pace.busy else 0

    def hits(self, ids: Sequence[int]) -> int:
        """Prompt tokens whose blocks were seen before; the last token is always computed. Remembers the blocks."""
        keys, before = [], 0
        for end in range(BLOCK, len(ids) + 1, BLOCK):
            before = hash((before, *ids[end - BLOCK : end]))
            keys.append(before)
        with self.lock:
            known = next((number for number, key in enumerate(keys) if key not in self.blocks), len(keys))
            self.blocks |= set(keys)
        return min(known * BLOCK, (len(ids) - 1) // BLOCK * BLOCK)

    def count(self, prompt: int, cached: int, generated: int, ttft: float) -> None:
        """One request is done."""
        with self.lock:
            self.counts.update(
                prompt=prompt, hit=cached, computed=prompt - cached, generated=generated, finished=1,
                preempted=int(self.pace.preempt),
            )  # fmt: skip
            self.counts["ttft_us"] += int(ttft * 1e6)

    def metrics(self) -> str:
        """What vLLM would write under `/metrics`, as far as the gate reads it."""
        with self.lock:
            counts, running = Counter(self.counts), self.running
        source = 'source="{}"'.format
        samples = [
            (metrics.RUNNING, "", running), (metrics.WAITING, "", 0),
            (metrics.HITS, "", counts["hit"]), (metrics.EXTERNAL_HITS, "", 0),
            (metrics.PROMPT, "", counts["prompt"]), (metrics.GENERATED, "", counts["generated"]),
            (metrics.BY_SOURCE, source("local_compute"), counts["computed"]),
            (metrics.BY_SOURCE, source("local_cache_hit"), counts["hit"]),
            (metrics.BY_SOURCE, source("external_kv_transfer"), 0),
            (metrics.PREEMPTIONS, "", counts["preempted"]),
            (metrics.FINISHED, 'finished_reason="length"', counts["finished"]),
            (metrics.TTFT_SUM, "", counts["ttft_us"] / 1e6), (metrics.QUEUE_SUM, "", 0),
            (metrics.CACHE, f'block_size="{BLOCK}",enable_prefix_caching="True"', 1),
        ]  # fmt: skip
        return "".join(
            f'{name}{{engine="0"{"," if labels else ""}{labels}}} {"NaN" if name == self.pace.nan else value}\n'
            for name, labels, value in samples
            if name != self.pace.lack
        )


class Handler(BaseHTTPRequestHandler):
    """The few paths that the observer asks."""

    protocol_version = "HTTP/1.1"
    state: State

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def answer(self, content: bytes, kind: str = "application/json") -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self.answer(self.state.metrics().encode(), "text/plain")
        elif self.path == "/v1/models":
            self.answer(json.dumps({"data": [{"id": MODEL, "max_model_len": self.state.pace.max_model_len}]}).encode())
        elif self.path == "/version":
            self.answer(b'{"version": "paced"}')
        else:
            self.answer(b"{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self.answer(json.dumps({"tokens": [ord(letter) for letter in body["prompt"]]}).encode())
        else:
            self.complete(body)

    def complete(self, body: dict[str, Any]) -> None:
        """One completion, streamed at the boot's pace."""
        begun, state = time.monotonic(), self.state
        prompt = body["prompt"]
        ids = [ord(letter) for letter in prompt] if isinstance(prompt, str) else list(prompt)
        with state.lock:
            state.running += 1
        cached = state.hits(ids)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        wait_until(begun + (len(ids) - cached) / state.pace.rate * state.slowness)
        first = time.monotonic()
        for number in range(body["max_tokens"]):
            wait_until(first + number / state.pace.decode * state.slowness)
            self.event({"choices": [{"text": "x", "token_ids": [120], "finish_reason": None}]})
        state.count(len(ids), cached, body["max_tokens"], first - begun)
        if state.pace.foreign:
            state.count(100, 0, 1, 0.0)
        with state.lock:
            state.running -= 1
        usage: dict[str, Any] = {"prompt_tokens": len(ids), "completion_tokens": body["max_tokens"]}
        if state.pace.lack != "cached_tokens":
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        self.event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def event(self, fields: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(fields).encode() + b"\n\n")
        self.wfile.flush()


def wait_until(moment: float) -> None:
    left = moment - time.monotonic()
    if left > 0:
        time.sleep(left)


def server(pace: Pace, seed: int = 0, port: int = 0) -> ThreadingHTTPServer:
    """A bound server on the loopback; `serve_forever` makes it answer."""
    state = State(pace, seed)
    handler = type("BoundHandler", (Handler,), {"state": state})
    made = ThreadingHTTPServer(("127.0.0.1", port), handler)
    made.daemon_threads = True
    return made


@contextmanager
def running(pace: Pace, seed: int = 0) -> Iterator[str]:
    """The URL of a server of this process."""
    made = server(pace, seed)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{made.server_address[1]}"
    finally:
        made.shutdown()
        made.server_close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=2000.0)
    parser.add_argument("--delay", type=float, default=1.0)
    parser.add_argument("--boot-spread", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    made = server(Pace(rate=asked.rate, delay=asked.delay, boot_spread=asked.boot_spread), asked.seed)
    print(json.dumps({"port": made.server_address[1]}), flush=True)
    made.serve_forever()


if __name__ == "__main__":
    main()
