"""A small engine in the place of vLLM, to put faults to the gang hundreds of times: it starts in under 3 s.

Real: the processes (API server > engine core > worker on rank 0, launcher > worker on rank 1), the gloo group between
the workers, one all-reduce per token, the routes /health, /metrics, /v1/models and /v1/completions, and what vLLM does
when a worker dies: nothing, until the next request; then rank 0 ends with status 0. Not real: there is no model, a
token is a number that the workers add up.

    python3 small_engine.py serve MODEL --port 8000 --nnodes 2 --node-rank 0 --master-addr A ... [--headless]

A prompt steers it: `hang` never comes back, `grow N` makes the worker take N MB of memory.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
STEP_S = 0.004  # of a token, about what a model of 8 layers takes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*")
    for name in ("--host", "--master-addr", "--served-model-name"):
        parser.add_argument(name, default="127.0.0.1")
    for name in ("--port", "--nnodes", "--node-rank", "--master-port"):
        parser.add_argument(name, type=int, default=1)
    parser.add_argument("--headless", action="store_true")
    options, _ = parser.parse_known_args()
    if options.headless:
        _, worker = spawn("Worker_TP1", lambda pipe: work(options, pipe))
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        _, status = os.waitpid(worker, 0)
        print(f"Worker died unexpectedly (exit code: {os.waitstatus_to_exitcode(status)})", file=sys.stderr, flush=True)
        time.sleep(0.5)  # as vLLM's launcher, it ends some time after its worker
        os._exit(0)
    serve(options)


def spawn(title: str, body: Callable[[socket.socket], None]) -> tuple[socket.socket, int]:
    """Run `body` in a forked child under vLLM's kind of title; the child ends with its parent."""
    ours, theirs = socket.socketpair()
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        theirs.close()
        return ours, pid
    ours.close()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    set_title(f"VLLM::{title}")
    try:
        body(theirs)
    except BaseException as error:
        print(f"{title}: {error!r}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def set_title(title: str) -> None:
    """Overwrite this process's command line, as setproctitle does."""
    text = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(text[45]), int(text[46])
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, title.encode(), min(len(title), end - start - 1))


# Worker: one all-reduce per token ------------------------------------------------------------------------------------


def work(options: argparse.Namespace, pipe: socket.socket) -> None:
    import torch
    from torch import distributed

    rank = options.node_rank if options.nnodes > 1 else 0
    os.environ.update(MASTER_ADDR=options.master_addr, MASTER_PORT=str(options.master_port))
    distributed.init_process_group("gloo", rank=rank, world_size=max(1, options.nnodes))
    receipt = {"rank": rank, "fingerprint": "small engine", "trellis_tensors": 1, "trellis_bytes": 1}
    (Path(os.environ["EXL3_RECEIPT_DIR"]) / f"rank{rank}.json").write_text(json.dumps(receipt))
    pipe.sendall(b"up\n")
    order = torch.zeros(2, dtype=torch.int64)  # what to do (0 token, 1 hang, 2 grow), and how much
    kept = []
    lines = pipe.makefile()
    while True:
        if rank == 0:
            words = lines.readline().split()
            if not words:
                return
            order[0], order[1] = int(words[0]), int(words[1])
        distributed.broadcast(order, 0)
        if order[0] == 1:
            threading.Event().wait()
        if order[0] == 2 and rank == 0:
            kept.append(b"x" * (int(order[1]) << 20))
        token = torch.ones(1)
        distributed.all_reduce(token)
        time.sleep(STEP_S)
        if rank == 0:
            pipe.sendall(f"{int(token)}\n".encode())


# Engine core: passes orders on, one at a time ------------------------------------------------------------------------


def core(options: argparse.Namespace, pipe: socket.socket) -> None:
    worker, _ = spawn("Worker_TP0", lambda below: work(options, below))
    below, above = worker.makefile("rw"), pipe.makefile("rw")
    while line := below.readline():
        above.write(line)
        above.flush()
        order = above.readline()
        if not order:
            return
        below.write(order)
        below.flush()
    raise RuntimeError("the worker ended")


# API server ----------------------------------------------------------------------------------------------------------


class Engine:
    """The way to the engine core, with vLLM's counters."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.pipe, _ = spawn("EngineCore", lambda pipe: core(options, pipe))
        self.lines = self.pipe.makefile("rw")
        self.up = self.lines.readline() == "up\n"
        self.turn = threading.Lock()
        self.running = self.waiting = self.tokens = self.prompts = self.done = 0
        self.draining = False

    def generate(self, prompt: str, count: int) -> int:
        """`count` tokens; the number of ranks that each was computed on. Raises `RuntimeError` when the engine died."""
        self.prompts += 1
        words = prompt.split()
        first = "1 0" if words[:1] == ["hang"] else f"2 {words[1]}" if words[:1] == ["grow"] else "0 0"
        ranks = 0
        for number in range(count):
            self.waiting += 1
            with self.turn:
                self.waiting -= 1
                self.running += 1
                try:
                    self.lines.write((first if number == 0 else "0 0") + "\n")
                    self.lines.flush()
                    line = self.lines.readline()
                except OSError as error:
                    raise RuntimeError("the engine died") from error
                finally:
                    self.running -= 1
                if not line:
                    raise RuntimeError("the engine died")
            ranks = int(line)
            self.tokens += 1
        self.done += 1
        return ranks

    def metrics(self) -> str:
        values = {
            "num_requests_running": self.running,
            "num_requests_waiting": self.waiting,
            "generation_tokens_total": self.tokens,
            "prompt_tokens_total": self.prompts,
            "request_success_total": self.done,
            "kv_cache_usage_perc": 0.0,
        }
        return "".join(f'vllm:{name}{{engine="0"}} {value}\n' for name, value in values.items())


def serve(options: argparse.Namespace) -> NoReturn:
    engine = Engine(options)
    if not engine.up:
        print("engine core failed to start", file=sys.stderr, flush=True)
        os._exit(1)

    class Handler(BaseHTTPRequestHandler):
        def answer(self, code: int, body: Any) -> None:
            data = (body if isinstance(body, str) else json.dumps(body)).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            routes: dict[str, Any] = {
                "/health": "",
                "/metrics": engine.metrics(),
                "/v1/models": {"data": [{"id": "small"}]},
            }
            self.answer(200 if self.path in routes else 404, routes.get(self.path, ""))

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if engine.draining:
                self.answer(503, {"error": "stopping"})
                return
            count = int(asked.get("max_tokens", 1))
            try:
                ranks = engine.generate(asked["prompt"], count)
            except RuntimeError as error:
                self.answer(500, {"error": str(error)})
                print(f"API server: {error}, shutting down", file=sys.stderr, flush=True)
                os._exit(0)  # vLLM's rank 0 ends with 0 after its peer has died
            text = " ".join([str(ranks)] * count)
            self.answer(200, {"choices": [{"text": text}], "usage": {"completion_tokens": count}})

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer((options.host, options.port), Handler)

    def drain() -> None:
        engine.draining = True
        while engine.running or engine.waiting:
            time.sleep(0.02)
        time.sleep(0.1)
        os._exit(0)

    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=drain).start())
    print(f"small engine: listens on {options.port}", flush=True)
    server.serve_forever()
    raise SystemExit(1)


if __name__ == "__main__":
    main()
