"""Tensor parallel 2 as on two machines, on one: a supervised rank per GPU (`exl3_vllm.rank`), each with its own cache.

`python two_hosts.py MODEL LABEL`. Asks the API, then stops both ranks; both receipts must say what the other says.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from on_gpu import WORK, say, wait_for

TOKENS = 300  # of a prompt: more than the cap of 128, so that it is a prefill of the experts


def environment(rank: int, folder: Path, model: Path, ports: dict[str, int]) -> dict[str, str]:
    own = folder / f"rank{rank}"
    own.mkdir(parents=True, exist_ok=True)
    facts = Path.home() / ".cache/vllm/modelinfos"
    if facts.is_dir():
        shutil.copytree(facts, own / "cache/any/modelinfos", dirs_exist_ok=True)
    return {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": str(rank),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CACHE_ROOT": str(own / "cache"),
        "EXL3_TIER": "grouped",
        "EXL3_RANK": str(rank),
        "EXL3_GENERATION": "gpu-host",
        "EXL3_MODEL_DIR": str(model),
        "EXL3_RUN_DIR": str(own / "run"),
        "EXL3_STATE_DIR": str(own / "state"),
        "EXL3_RECEIPT_DIR": str(own / "receipts"),
        "EXL3_API": f"http://127.0.0.1:{ports['api']}",
        "EXL3_PEERS": f"127.0.0.1:{ports['rank0']},127.0.0.1:{ports['rank1']}",
        "EXL3_GANG_SECRET_FILE": str(folder / "secret"),
        "EXL3_START_S": "200",
    }


def command(rank: int, model: Path, ports: dict[str, int]) -> list[str]:
    words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--served-model-name", "m"]
    words += ["--tensor-parallel-size", "2", "--nnodes", "2", "--node-rank", str(rank)]
    words += [
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(ports["master"]),
        "--distributed-executor-backend",
        "mp",
    ]
    words += ["--max-model-len", "1024", "--max-num-batched-tokens", "1024", "--max-num-seqs", "8"]
    words += ["--kv-cache-memory-bytes", str(1 << 28), "--gpu-memory-utilization", "0.02"]
    words += ["-cc.cudagraph_capture_sizes=[1,2,4,8]", "--disable-custom-all-reduce", "--no-enable-prefix-caching"]
    place = ["--host", "127.0.0.1", "--port", str(ports["api"])] if rank == 0 else ["--headless"]
    return [sys.executable, "-m", "exl3_vllm.rank", "--", *words, *place]


def completion(port: int, ids: list[int]) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    body = {"model": "m", "prompt": ids, "max_tokens": 16, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        return dict(json.loads(connection.getresponse().read()))
    finally:
        connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("label")
    options = parser.parse_args()
    wait_for(options.model)
    folder = WORK / options.label
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "secret").write_text("only of this run\n")
    (folder / "secret").chmod(0o600)
    first = random.SystemRandom().randrange(20000, 30000)
    ports = {name: first + 3 * place for place, name in enumerate(("api", "master", "rank0", "rank1"))}
    record: dict[str, Any] = {"label": options.label}
    started = time.monotonic()
    ranks = []
    for rank in (0, 1):
        with (WORK / "logs" / f"{options.label}.rank{rank}.log").open("wb") as log:
            argv, own = command(rank, options.model, ports), environment(rank, folder, options.model, ports)
            ranks.append(subprocess.Popen(argv, env=own, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
    try:
        while True:
            ended = [rank.poll() for rank in ranks]
            if any(code is not None for code in ended) or time.monotonic() - started > 210:
                raise RuntimeError(f"not serving after {time.monotonic() - started:.0f} s: exit codes {ended}")
            try:
                answer = completion(ports["api"], [(7 * i) % 500 + 3 for i in range(TOKENS)])
                if "choices" in answer:
                    break
            except (OSError, http.client.HTTPException, ValueError):
                time.sleep(0.5)
        record["ready_s"] = round(time.monotonic() - started, 1)
        record["usage"], record["text_tokens"] = answer["usage"], answer["choices"][0]["logprobs"]
        say(record, options.label)
        time.sleep(6)  # receipts are written every 5 s
        receipts = [json.loads((folder / f"rank{n}/receipts/rank{n}.json").read_text()) for n in (0, 1)]
        record["receipts"] = receipts
    finally:
        stopping = time.monotonic()
        for process in ranks:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        codes = []
        for process in ranks:
            try:
                codes.append(process.wait(25))
            except subprocess.TimeoutExpired:
                process.kill()
                codes.append(-9)
        record["exit"], record["stop_s"] = codes, round(time.monotonic() - stopping, 1)
        say(record, options.label)
    keys = ("effective_tier", "tier_reason", "rows_handled", "rows_expected", "fingerprint", "tp_rank", "tp_size")
    print("RESULT", options.label, record["ready_s"], [{key: one[key] for key in keys} for one in receipts], codes)


if __name__ == "__main__":
    main()
