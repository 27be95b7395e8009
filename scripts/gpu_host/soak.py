"""Many mixed steps of one engine: prefills, decodes, preemptions; no error, and the same memory at the end.

`python soak.py MODEL LABEL [--steps N]`. The KV cache holds a fraction of what the requests ask for, so the scheduler
preempts all the time. Also speculative: `--speculative` drafts by n-gram, whose row counts are others.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from on_gpu import open_engine, sampling, say


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("label")
    parser.add_argument("--steps", type=int, default=10000)
    parser.add_argument("--seconds", type=int, default=400)
    parser.add_argument("--kv-mib", type=int, default=64)
    parser.add_argument("--speculative", action="store_true")
    options = parser.parse_args()
    changes: dict[str, Any] = {}
    if options.speculative:
        changes["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    llm = open_engine(
        options.model, dtype="bfloat16", max_model_len=2048, max_num_batched_tokens=2048, max_num_seqs=64,
        kv_cache_memory_bytes=options.kv_mib << 20, disable_log_stats=False, **changes,
    )  # fmt: skip
    engine, chance = llm.llm_engine, random.Random(3)
    vocabulary = engine.model_config.get_vocab_size()
    record: dict[str, Any] = {"label": options.label, "wanted_steps": options.steps, "memory": []}
    steps = asked = finished = tokens = active = 0
    started = time.monotonic()
    while steps < options.steps and time.monotonic() - started < options.seconds:
        while active < 96:
            length, answer = chance.choice((8, 40, 130, 300, 700, 1500)), chance.choice((1, 16, 64, 200))
            ids = [chance.randrange(3, vocabulary) for _ in range(length)]
            if options.speculative:
                ids = (ids[:20] * (length // 20 + 1))[:length]
            engine.add_request(str(asked), {"prompt_token_ids": ids}, sampling(answer))
            asked, active = asked + 1, active + 1
        for output in engine.step():
            if output.finished:
                finished, active = finished + 1, active - 1
                tokens += len(output.outputs[0].token_ids)
        steps += 1
        if steps % 500 == 0 or steps == 100:
            entry = {
                "step": steps,
                "allocated": torch.cuda.memory_allocated(),
                "reserved": torch.cuda.memory_reserved(),
            }
            record["memory"].append({**entry, "host_kib": resident()})
            record |= {"steps": steps, "asked": asked, "finished": finished, "tokens": tokens}
            record["seconds"] = round(time.monotonic() - started, 1)
            record["preemptions"] = preemptions(llm)
            say(record, options.label)
    print("RESULT", options.label, {key: value for key, value in record.items() if key != "memory"})
    print("RESULT", options.label, "memory", record["memory"][0], record["memory"][-1])


def resident() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1])


def preemptions(llm: Any) -> int:
    return int(sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions"))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
