"""Serves a checkpoint that upstream's own converter made, and holds its logits against upstream's.

`python fixtures.py NAME [--eager] [--dtype D]`; EXL3_FIXTURES names the folder. Upstream computes in fp16.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import numpy as np
from accuracy import relative, rows_of
from on_gpu import generate, open_engine, say

LIMIT = 2e-3
"""Relative L2 of all logits. Upstream's own two paths differ by 1e-3, and attention here multiplies in tf32."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    folder = Path(os.environ["EXL3_FIXTURES"])
    text = json.loads((folder / f"{options.name}_refs.json").read_text())["text"]
    wanted = np.load(folder / f"{options.name}_refs.npz")["logits"]
    llm = open_engine(
        folder / options.name, dtype=options.dtype, eager=options.eager, sizes=[1, 2, 4], max_model_len=256,
        max_num_batched_tokens=512, max_num_seqs=4, logprobs_mode="raw_logits", max_logprobs=-1,
        kv_cache_memory_bytes=1 << 27, attention_backend="TRITON_ATTN",
    )  # fmt: skip
    ids = text["input_ids"]
    (output,) = generate(llm, [ids], 24, prompt_logprobs=-1, logprobs=-1)
    logits = rows_of(output.prompt_logprobs[1:], wanted.shape[1])
    first = rows_of(output.outputs[0].logprobs[:1], wanted.shape[1])
    found = {
        "fixture": options.name,
        "dtype": options.dtype,
        "eager": options.eager,
        "relative_error": relative(np.concatenate([logits, first]), wanted[: len(ids)]),
        "argmax_agree": int((np.concatenate([logits, first]).argmax(1) == np.array(text["argmax"])).sum()),
        "positions": len(ids),
        "greedy_agree": int((np.array(output.outputs[0].token_ids) == np.array(text["greedy"])).sum()),
        "limit": LIMIT,
    }
    say(found, f"fixture.{options.name}.{options.dtype}.{'eager' if options.eager else 'graphs'}")
    print("RESULT", json.dumps(found))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
