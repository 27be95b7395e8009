"""Many clients for minutes: every request is answered, and no process grows."""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from rig_lib import network

from faults_lib.gang_on_rig import PORT, GangOnRig

SETTLE = 0.2  # share of the time that is left out of the memory's trend: caches fill
FLAT = 0.02  # growth of a rank's memory from the first to the last fifth of the rest

# Run in the head's network: one thread per client, one request at a time each, and one JSON object at the end.
CLIENTS = """
import http.client, json, sys, threading, time
count, seconds, model, port = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3], int(sys.argv[4])
until, told, lock = time.monotonic() + seconds, [], threading.Lock()
def client(number):
    body = json.dumps({"model": model, "prompt": f"{number}+2=", "max_tokens": 16, "temperature": 0})
    while time.monotonic() < until:
        begun = time.monotonic()
        try:
            link = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
            link.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            answer = link.getresponse()
            text = answer.read()
            whole = answer.status == 200 and json.loads(text)["usage"]["completion_tokens"] > 0
            word = "ok" if whole else f"status {answer.status}"
        except Exception as error:
            word = type(error).__name__
            time.sleep(0.1)
        with lock:
            told.append((word, time.monotonic() - begun))
threads = [threading.Thread(target=client, args=(number,)) for number in range(count)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
waits = sorted(seconds for word, seconds in told if word == "ok")
errors = {}
for word, _ in told:
    if word != "ok":
        errors[word] = errors.get(word, 0) + 1
at = lambda share: waits[min(len(waits) - 1, int(share * len(waits)))] if waits else None
found = {"requests": len(told), "errors": errors, "longest_s": max(seconds for _, seconds in told)}
print(json.dumps({**found, "p50_s": at(.5), "p99_s": at(.99)}))
"""


def clients(gang: GangOnRig, count: int, seconds: float) -> subprocess.Popen[str]:
    model = "small" if gang.engine == "small" else "demo"
    inside = ["nsenter", f"--net={network.NAMESPACES / gang.nodes['node1'].namespace}"]
    command = [*inside, "python3", "-c", CLIENTS, str(count), str(seconds), model, str(PORT)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def soak(gang: GangOnRig, count: int, minutes: float) -> dict[str, Any]:
    """Errors, latencies, and for each rank the memory of its processes, sampled every five seconds."""
    if not gang.is_serving(0):
        gang.up()
    incarnation = gang.incarnation()
    going = clients(gang, count, minutes * 60)
    memory: dict[int, list[int]] = {0: [], 1: []}
    while going.poll() is None:
        for rank, sizes in memory.items():
            found = sum(resident(one.pid) for one in gang.seen(rank))
            if found:
                sizes.append(found)
        time.sleep(5)
    told: dict[str, Any] = json.loads(going.communicate()[0])
    trend = {f"rank {rank}": growth(sizes) for rank, sizes in memory.items()}
    same = gang.incarnation() == incarnation
    flat = all(one["growth"] is not None and one["growth"] < FLAT for one in trend.values())
    held = not told["errors"] and same and flat
    return {"clients": count, "minutes": minutes, **told, "memory": trend, "same_incarnation": same, "held": held}


def resident(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return int(text.partition("Pss:")[2].split()[0]) * 1024 if "Pss:" in text else 0


def growth(sizes: list[int]) -> dict[str, float | None]:
    """The medians of the first and the last fifth after settling, MB, and by how much the last is larger."""
    rest = sizes[int(len(sizes) * SETTLE) :]
    part = max(1, len(rest) // 5)
    if len(rest) < 2:
        return {"first_mb": None, "last_mb": None, "growth": None}
    first, last = statistics.median(rest[:part]), statistics.median(rest[-part:])
    return {"first_mb": round(first / 1e6, 1), "last_mb": round(last / 1e6, 1), "growth": round(last / first - 1, 4)}
