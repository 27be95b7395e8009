"""`vllm serve` with the plugin, and clients that never stop asking: errors, rates, and the receipt at the end.

`python serving.py MODEL LABEL [--clients 64] [--seconds 180] [--device N]`
"""

from __future__ import annotations

import argparse
import collections
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from on_gpu import WORK, say, wait_for


class Clients:
    """Threads that send completions of random prompts, streamed or whole, and count what comes of them."""

    def __init__(self, port: int, until: float, vocabulary: int) -> None:
        self.port, self.until, self.vocabulary = port, until, vocabulary
        self.lock = threading.Lock()
        self.done = self.tokens = 0
        self.errors: collections.Counter[str] = collections.Counter()
        self.latencies: list[float] = []

    def run(self, number: int) -> None:
        chance = random.Random(number)
        while time.monotonic() < self.until:
            started = time.monotonic()
            try:
                got = self.ask(chance)
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                with self.lock:
                    self.errors[f"{type(error).__name__}: {str(error)[:120]}"] += 1
                time.sleep(0.5)
                continue
            with self.lock:
                self.done += 1
                self.tokens += got
                self.latencies.append(time.monotonic() - started)

    def ask(self, chance: random.Random) -> int:
        length, answer = chance.choice((16, 128, 512, 2048)), chance.choice((16, 64, 128))
        prompt = [chance.randrange(3, self.vocabulary) for _ in range(length)]
        streamed = chance.random() < 0.5
        body = {
            "model": "m",
            "prompt": prompt,
            "max_tokens": answer,
            "temperature": 0,
            "ignore_eos": True,
            "stream": streamed,
        }
        if streamed:
            body["stream_options"] = {"include_usage": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            reply = connection.getresponse()
            text = reply.read().decode()
        finally:
            connection.close()
        if reply.status != 200:
            raise ValueError(f"HTTP {reply.status}: {text[:80]}")
        if streamed:
            lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
            if lines[-1] != "[DONE]":
                raise ValueError("the stream ended early")
            usage = json.loads(lines[-2])["usage"]
        else:
            usage = json.loads(text)["usage"]
        if usage["completion_tokens"] != answer or usage["prompt_tokens"] != length:
            raise ValueError(f"{usage} for {length} and {answer} tokens")
        return answer


def server(model: Path, port: int, log: Path) -> subprocess.Popen[bytes]:
    words = ["serve", str(model), "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "m"]
    words += ["--max-model-len", "4096", "--max-num-seqs", "64", "--max-num-batched-tokens", "8192"]
    words += ["--kv-cache-memory-bytes", str(4 << 30), "--gpu-memory-utilization", "0.25"]
    words += ["-cc.cudagraph_capture_sizes=[1,2,4,8,16,32,64]", "--no-enable-prefix-caching"]
    environment = {**os.environ, "EXL3_RECEIPT_DIR": str(WORK / "receipts"), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.cli.main", *words], env=environment, stdout=file, stderr=file
        )


def wait_ready(port: int, process: subprocess.Popen[bytes], seconds: float) -> None:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            time.sleep(0.5)
        finally:
            connection.close()
    raise RuntimeError("the server did not get ready")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("label")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=180)
    options = parser.parse_args()
    wait_for(options.model)
    vocabulary = json.loads((options.model / "config.json").read_text())["vocab_size"]
    port = random.SystemRandom().randrange(20000, 40000)
    log = WORK / "logs" / f"{options.label}.server.log"
    started = time.monotonic()
    process = server(options.model, port, log)
    record: dict[str, Any] = {"label": options.label, "clients": options.clients}
    try:
        wait_ready(port, process, 200)
        record["ready_s"] = round(time.monotonic() - started, 1)
        clients = Clients(port, time.monotonic() + options.seconds, vocabulary)
        threads = [threading.Thread(target=clients.run, args=(n,), daemon=True) for n in range(options.clients)]
        begun = time.monotonic()
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) and time.monotonic() < clients.until + 60:
            time.sleep(5)
            spent = time.monotonic() - begun
            record |= {"seconds": round(spent, 1), "requests": clients.done, "tokens": clients.tokens}
            record |= {"errors": dict(clients.errors), "tokens_per_s": round(clients.tokens / spent, 1)}
            say(record, options.label)
        ordered = sorted(clients.latencies)
        record["latency_s"] = {"median": ordered[len(ordered) // 2], "p99": ordered[len(ordered) * 99 // 100]}
        receipts = sorted((WORK / "receipts").glob("rank*.json"))
        record["receipt"] = json.loads(receipts[0].read_text()) if receipts else None
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        stopping = time.monotonic()
        try:
            record["exit"] = process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            record["exit"] = "killed"
        record["stop_s"] = round(time.monotonic() - stopping, 1)
        say(record, options.label)
    print("RESULT", options.label, {key: value for key, value in record.items() if key != "receipt"})


if __name__ == "__main__":
    main()
