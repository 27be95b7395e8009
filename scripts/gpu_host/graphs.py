"""What the CUDA graphs of a real engine hold: kernel names while it decodes, and while it prefills.

`python graphs.py MODEL LABEL [--branch] [--mode M]`. `--branch` plants the mistake that cost a deployment 60 % of its
decode speed: a branch on the rows in Python, outside of the operator. vLLM traces it once, at the profile run's rows.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from on_gpu import generate, open_engine, say


def kernels_of(llm: Any, length: int, tokens: int) -> Counter[str]:
    """How often each of our kernels ran during one request; decode steps after the first replay graphs."""
    prompts = [[(7 * i) % 500 + 3 for i in range(length)]]
    generate(llm, prompts, tokens)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        generate(llm, prompts, tokens)
        torch.cuda.synchronize()
    names: Counter[str] = Counter()
    for event in profiler.events():
        for word in ("trellis_gemm", "reconstruct"):
            if word in event.name:
                names[word] += 1
    return names


def plant_branch() -> None:
    """`apply` chooses by rows itself, and tells the operator what to do."""
    from exl3_vllm import linear
    from exl3_vllm.packed_ops import packed_layer

    def apply(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        reconstruct = 1 if x.shape[0] >= 128 else 0
        return packed_layer(x, self.packed, self.shared_suh, self.padding, reconstruct, bias)

    linear.Exl3LinearMethod.apply = apply  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("label")
    parser.add_argument("--branch", action="store_true")
    parser.add_argument("--mode", default="FULL_AND_PIECEWISE")
    options = parser.parse_args()
    if options.branch:
        plant_branch()
    llm = open_engine(
        options.model, dtype="bfloat16", max_model_len=1024, max_num_batched_tokens=1024, max_num_seqs=8,
        sizes=[1, 2, 4, 8, 512], kv_cache_memory_bytes=1 << 28, compilation={"cudagraph_mode": options.mode},
    )  # fmt: skip
    found = {
        "label": options.label,
        "decode": dict(kernels_of(llm, 8, 33)),
        "prefill": dict(kernels_of(llm, 300, 1)),
        "mode": options.mode,
    }
    say(found, options.label)
    print("RESULT", json.dumps(found))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
