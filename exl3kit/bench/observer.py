"""The client of every measurement: one program, standard library only, that runs beside the API.

    python3 -c SOURCE JOB

The kit runs it inside the head's container (no tunnel, no proxy, no port of the node in between, and the API key never
leaves the container), or on this machine against `--url`. It observes and judges nothing: each observation is written
down as it was, with the server's metrics before and after, one JSON object per line.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import json
import os
import random
import socket
import sys
import threading
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

SETTLE_S = 5.0  # metrics are brought up to date when an iteration ends, not when the client has its last byte
LOOK_S = 0.02
ANSWER_S = 3600.0  # one prompt of 300,000 tokens on a slow machine
KEPT = tuple(
    "vllm:" + name
    for name in (
        "num_requests_running", "num_requests_waiting{", "prefix_cache_hits_total", "external_prefix_cache_hits_total",
        "prompt_tokens_total", "prompt_tokens_by_source_total", "generation_tokens_total", "request_success_total",
        "num_preemptions_total", "time_to_first_token_seconds_sum", "request_queue_time_seconds_sum",
        "spec_decode_num_", "cache_config_info",
    )
)  # fmt: skip
"""Beginnings of the lines of `/metrics` that are recorded: 2 kB in place of 40."""


class Unanswered(Exception):
    """The server refused or broke off; the sentence says how."""


class Server:
    """The API as this program reaches it."""

    def __init__(self, url: str, key: str | None) -> None:
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "127.0.0.1", parts.port or 80
        self.key = key

    def open(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=ANSWER_S)
        try:
            connection.connect()
        except OSError as error:
            raise Unanswered(f"{self.host}:{self.port} takes no connection: {error}") from error
        return connection

    def headers(self) -> dict[str, str]:
        told = {"Content-Type": "application/json"}
        return told | {"Authorization": f"Bearer {self.key}"} if self.key else told

    def get(self, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, bytes]:
        """Status and content of one request (POST when there is a body)."""
        data = None if body is None else json.dumps(body).encode()
        with contextlib.closing(self.open()) as connection:
            try:
                connection.request("GET" if data is None else "POST", path, data, self.headers())
                answer = connection.getresponse()
                return answer.status, answer.read()
            except (OSError, http.client.HTTPException) as error:
                raise Unanswered(f"{path} broke off: {error!r}") from error

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON answer of one request; raises `Unanswered` for any status but 200."""
        status, content = self.get(path, body)
        if status != 200:
            raise Unanswered(f"{path} answered {status}: {content[:300].decode('utf-8', 'replace')}")
        return json.loads(content)

    def metrics(self) -> str:
        """The metrics that a gate may want, as the server wrote them; empty when it has none."""
        status, content = self.get("/metrics")
        lines = content.decode("utf-8", "replace").splitlines() if status == 200 else []
        return "".join(f"{line}\n" for line in lines if line.startswith(KEPT) and "_bucket{" not in line)


# Prompts --------------------------------------------------------------------------------------------------------------


def opening(salt: str) -> str:
    """What a prompt begins with; two salts that begin alike have openings that differ from the first letters on.

    With blocks of 16 tokens of one letter each, prompts that shared their first 16 letters hit the cache.
    """
    return f"{hashlib.sha256(salt.encode()).hexdigest()[:16]} "


def prompt_ids(server: Server, model: str, text: str, salt: str, count: int) -> list[int]:
    """Exactly `count` token ids that no other salt begins with: the salt, then the text from a place of its own."""
    start = random.Random(salt).randrange(len(text))
    turned = text[start:] + text[:start]
    said, ids = opening(salt), list[int]()
    while len(ids) < count:
        # every repetition has a heading of its own, so that a long prompt does not repeat itself word for word
        said += "".join(f"{turned}\n({salt} {number})\n" for number in range(1 + count * 8 // len(turned)))
        ids = server.ask("/tokenize", {"model": model, "prompt": said})["tokens"]
    return ids[:count]


# One request ----------------------------------------------------------------------------------------------------------


def stream(server: Server, body: Mapping[str, Any], begun: float) -> dict[str, Any]:
    """Send one completion and follow its stream.

    Times are seconds after `begun` on this program's monotonic clock: `sent` just before the first byte of the request
    left, `times` of every chunk that carried tokens. `usage` is the server's own.
    """
    seen: dict[str, Any] = {"status": 0, "sent": None, "times": [], "usage": None, "finish": None, "error": None}
    with contextlib.closing(server.open()) as connection:
        try:
            data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
            seen["sent"] = time.monotonic() - begun
            connection.request("POST", "/v1/completions", data, server.headers())
            answer = connection.getresponse()
            seen["status"] = answer.status
            if answer.status != 200:
                seen["error"] = answer.read()[:300].decode("utf-8", "replace")
                return seen
            read_events(answer, seen, begun)
        except (OSError, http.client.HTTPException, ValueError) as error:
            seen["error"] = repr(error)
    return seen


def read_events(answer: http.client.HTTPResponse, seen: dict[str, Any], begun: float) -> None:
    """Note when tokens came, why they ended, and the usage."""
    while line := answer.readline():
        now = time.monotonic() - begun
        if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
            continue
        event = json.loads(line[6:])
        if event.get("error"):
            seen["error"] = json.dumps(event["error"])[:300]
        for choice in event.get("choices") or ():
            if choice.get("token_ids") or choice.get("text") or choice.get("finish_reason"):
                seen["times"].append(round(now, 6))
            seen["finish"] = choice.get("finish_reason") or seen["finish"]
        seen["usage"] = event.get("usage") or seen["usage"]


def round_trip(server: Server) -> float:
    """Seconds that this client and the way to the server cost: the median of five requests that compute nothing."""
    times = []
    for _ in range(5):
        begun = time.monotonic()
        server.get("/health")
        times.append(time.monotonic() - begun)
    return sorted(times)[2]


# One observation ------------------------------------------------------------------------------------------------------


def observe(server: Server, model: str, text: str, step: Mapping[str, Any], prompts: dict[str, Any]) -> dict[str, Any]:
    """What one step of a plan did: its requests (all sent at once) between two looks at the metrics.

    `step`: `salt`, `max_tokens`, `concurrency`, and either `tokens` (exact length of a prompt from the text) or `words`
    (a text to go on with). A salt that was used before gives the same prompt: a deliberate cache hit.
    """
    many = int(step.get("concurrency", 1))
    bodies = []
    for number in range(many):
        salt = step["salt"] if many == 1 else f"{step['salt']}.{number}"
        if salt not in prompts:
            words = step.get("words")
            prompts[salt] = f"[{salt}] {words}" if words else prompt_ids(server, model, text, salt, int(step["tokens"]))
        bodies.append({
            "model": model, "prompt": prompts[salt], "max_tokens": step["max_tokens"],
            "ignore_eos": True, "temperature": 0, "return_token_ids": True,
        })  # fmt: skip
    seen: dict[str, Any] = {"step": dict(step), "at": time.time(), "round_trip": round_trip(server)}
    seen["machine"] = machine()
    seen["before"] = server.metrics()
    seen["requests"] = at_once(server, bodies)
    seen["after"] = settled(server, seen["before"])
    return seen


def profiled(server: Server, model: str, job: Mapping[str, Any], prompts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The steps of a job, once to warm up and once under the server's profiler."""
    for step in job["steps"]:
        observe(server, model, job["text"], {**step, "salt": step["salt"] + "w"}, prompts)
    server.get("/start_profile", {})
    try:
        seen = [observe(server, model, job["text"], step, prompts) for step in job["steps"]]
    finally:
        server.get("/stop_profile", {})
    yield from seen


def at_once(server: Server, bodies: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Send every body at the same moment; their streams in the order of the bodies."""
    begun = time.monotonic()
    if len(bodies) == 1:
        return [stream(server, bodies[0], begun)]
    seen: list[dict[str, Any]] = [{} for _ in bodies]
    start = threading.Barrier(len(bodies))

    def one(number: int) -> None:
        start.wait()
        seen[number] = stream(server, bodies[number], begun)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seen


def settled(server: Server, before: str) -> str:
    """The metrics once they have stopped moving and differ from those before, at most `SETTLE_S` later."""
    deadline, last = time.monotonic() + SETTLE_S, ""
    while time.monotonic() < deadline:
        now = server.metrics()
        if now == last and now != before:
            return now
        last = now
        time.sleep(LOOK_S)
    return last


# The machine and the server -------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """What can be read of clock, heat and memory where the server runs; what cannot is left out."""
    told: dict[str, Any] = {}
    with contextlib.suppress(OSError):
        told["load"] = os.getloadavg()[0]
    for line in read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            told["mem_available"] = int(line.split()[1]) * 1024
    mhz = numbers("/sys/devices/system/cpu", "cpu*/cpufreq/scaling_cur_freq")
    heat = numbers("/sys/class/thermal", "thermal_zone*/temp")
    if mhz:
        told["cpu_mhz"] = round(sum(mhz) / len(mhz))
    if heat:
        told["temperature"] = max(heat)
    return told | gpu()


def read(path: str | Path) -> str:
    """A file's text; empty when it cannot be had."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def numbers(folder: str, pattern: str) -> list[float]:
    """Thousandths in all files of a pattern, as units."""
    texts = [read(path).strip() for path in Path(folder).glob(pattern)]
    return [int(text) / 1000 for text in texts if text.lstrip("-").isdecimal()]


def gpu() -> dict[str, Any]:
    """Clock, heat and power of the GPUs that nvidia-smi shows."""
    import shutil
    import subprocess

    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    asked = "clocks.sm,temperature.gpu,power.draw"
    try:
        done = subprocess.run(
            [program, f"--query-gpu={asked}", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return {}
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return {"gpu": lines} if done.returncode == 0 and lines else {}


def facts(server: Server) -> dict[str, Any]:
    """What the server says of itself, and the machine it runs on."""
    model = server.ask("/v1/models")["data"][0]
    told = {"model": model["id"], "max_model_len": model.get("max_model_len"), "metrics": server.metrics()}
    with contextlib.suppress(Unanswered, KeyError):
        told["vllm"] = server.ask("/version")["version"]
    return told | {"host": socket.gethostname(), "cpus": os.cpu_count(), "kernel": os.uname().release,
                   "cpu": cpu_name(), "machine": machine(), "round_trip": round_trip(server)}  # fmt: skip


def cpu_name() -> str:
    lines = read("/proc/cpuinfo").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


# Scores, for parity ---------------------------------------------------------------------------------------------------


def packed(logprobs: Mapping[Any, Any]) -> str:
    """One distribution over the vocabulary as base64 of little-endian float32; refused unless every token is there."""
    size = len(logprobs)
    values = array("f", [float("nan")]) * size
    for token, value in logprobs.items():
        if int(token) < size:
            values[int(token)] = value["logprob"] if isinstance(value, dict) else value
    if any(value != value for value in values):
        raise Unanswered(f"{size} log-probabilities came, and they are not those of tokens 0 to {size - 1}")
    if sys.byteorder == "big":
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode()


def forced(server: Server, model: str, ids: Sequence[int], *, whole: bool) -> Iterator[dict[str, Any]]:
    """Every position of a given text: the log-probabilities of the `whole` vocabulary, or of its own token alone."""
    body = {"model": model, "prompt": list(ids), "max_tokens": 1, "temperature": 0}
    body["prompt_logprobs"] = -1 if whole else 0
    told = server.ask("/v1/completions", body)["choices"][0]["prompt_logprobs"]
    for position, entry in enumerate(told):
        if entry is not None:
            token = ids[position]
            row = {"at": position, "token": token, "logprob": entry[str(token)]["logprob"]}
            yield {**row, "all": packed(entry)} if whole else row


def generated(server: Server, model: str, ids: Sequence[int], count: int) -> list[dict[str, Any]]:
    """`count` greedy tokens after `ids`, each with the distribution that it was taken from."""
    body = {"model": model, "prompt": list(ids), "max_tokens": count, "ignore_eos": True, "temperature": 0,
            "logprobs": -1, "return_tokens_as_token_ids": True, "return_token_ids": True}  # fmt: skip
    choice = server.ask("/v1/completions", body)["choices"][0]
    rows = []
    for token, entry in zip(choice["token_ids"], choice["logprobs"]["top_logprobs"], strict=True):
        rows.append({"token": token, "all": packed({name.removeprefix("token_id:"): v for name, v in entry.items()})})
    return rows


def followed(server: Server, model: str, prompt: Sequence[int], steps: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Decode steps along tokens that another run chose: `{step, token, all}` of each step that was one.

    Where this server chooses otherwise, it is put back on the way with a longer prompt. The first token after a prompt
    comes from prefill and is left out.
    """
    done = 0
    while done < len(steps):
        rows = generated(server, model, [*prompt, *steps[:done]], len(steps) - done)
        for offset, row in enumerate(rows):
            step = done + offset
            if offset > 0:
                yield {"step": step, **row}
            if row["token"] != steps[step]:
                done = step + 1
                break
        else:
            return


def score(server: Server, model: str, job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Distributions over a text (`prefill`) and along decode steps (`decode`), and the log-likelihood of the text.

    `job`: `text`, `tokens` of it in windows of `window`, `prompts` to decode `count` tokens after, `steps` of another
    run to follow (by number of the prompt), and `entries`: where a window would hold more numbers than that, `contexts`
    positions of the text are looked at instead of all.
    """
    ids = server.ask("/tokenize", {"model": model, "prompt": job["text"]})["tokens"][: int(job["tokens"])]
    size = len(base64.b64decode(generated(server, model, ids[:8], 1)[0]["all"])) // 4
    window = int(job["window"])
    whole = size * window <= int(job["entries"])
    yield {"kind": "vocabulary", "size": size, "tokens": len(ids), "all_positions": whole}
    for start in range(0, len(ids), window):
        part = ids[start : start + window]
        if len(part) > 1:
            for row in forced(server, model, part, whole=whole):
                yield {"kind": "prefill", **row, "at": start + row["at"]}
    for end in [] if whole else spaced(len(ids), int(job["contexts"])):
        (row,) = generated(server, model, ids[max(0, end - window) : end], 1)
        yield {"kind": "prefill", "at": end, "token": ids[end], "all": row["all"]}
    for number, words in enumerate(job["prompts"]):
        prompt = server.ask("/tokenize", {"model": model, "prompt": words})["tokens"]
        steps = (job.get("steps") or {}).get(str(number))
        if steps is None:
            rows = generated(server, model, prompt, int(job["count"]))
            yield {"kind": "steps", "prompt": number, "tokens": [row["token"] for row in rows]}
            found: Iterator[dict[str, Any]] = iter([{"step": step, **row} for step, row in enumerate(rows)][1:])
        else:
            found = followed(server, model, prompt, steps)
        yield from ({"kind": "decode", "prompt": number, **row} for row in found)


def spaced(length: int, count: int) -> list[int]:
    """`count` positions from 1 to length - 1, evenly."""
    return sorted({1 + number * (length - 1) // count for number in range(count)} - {length})


def main(arguments: Sequence[str]) -> int:
    job = json.loads(arguments[0] if arguments[0] != "-" else sys.stdin.read())
    url = job.get("url") or os.environ["EXL3_API"]
    key_file = job.get("key_file") or os.environ.get("EXL3_API_KEY_FILE")
    server = Server(url, Path(key_file).read_text(encoding="utf-8").strip() if key_file else None)
    prompts: dict[str, Any] = {}
    try:
        if job["do"] == "facts":
            results: Iterator[dict[str, Any]] = iter([facts(server)])
        elif job["do"] == "score":
            results = score(server, job["model"], job)
        elif job["do"] == "profile":
            results = profiled(server, job["model"], job, prompts)
        else:
            results = (observe(server, job["model"], job["text"], step, prompts) for step in job["steps"])
        for result in results:
            print(json.dumps(result), flush=True)
    except (Unanswered, KeyError, ValueError) as error:
        print(json.dumps({"unanswered": str(error) if isinstance(error, Unanswered) else repr(error)}), flush=True)
        return 7
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
