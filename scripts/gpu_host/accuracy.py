"""Logits of one engine on fixed prompts: while it generates, and again with the same tokens as a prompt.

`python accuracy.py MODEL LABEL [--dtype D] [--eager] [--tp N] [--mode M]` writes OUT/LABEL.npz and OUT/LABEL.json.
`python accuracy.py --compare DIRECTORY` compares all that lie there: a.npz with b.npz for each pair of one model.
Decode steps are compared with the prefill of the same tokens: a prefill alone says nothing of the decode path.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from on_gpu import WORK, generate, open_engine, say

LENGTHS = (20, 150, 300, 41)  # the third passes the crossover to reconstruct, and the experts' cap
TOKENS = 24


def prompts(vocabulary: int) -> list[list[int]]:
    return [
        [(7 * i * (n + 1) + i * i) % (vocabulary - 3) + 3 for i in range(length)] for n, length in enumerate(LENGTHS)
    ]


def rows_of(entries: Any, vocabulary: int) -> np.ndarray[Any, Any]:
    """fp32 [positions, vocabulary] of vLLM's per-position dictionaries."""
    rows = np.zeros((len(entries), vocabulary), np.float32)
    for row, entry in zip(rows, entries, strict=True):
        row[np.fromiter(entry, np.int64, len(entry))] = [one.logprob for one in entry.values()]
    return rows


def run(options: argparse.Namespace) -> None:
    from exl3_vllm import diagnostics

    changes: dict[str, Any] = {"eager": options.eager, "dtype": options.dtype, "tensor_parallel_size": options.tp}
    if options.mode:
        changes["compilation"] = {"cudagraph_mode": options.mode}
    if options.uncompiled:  # torch.compile off, graphs of whole steps: Python branches are live
        changes["compilation"] = {"mode": 0, "cudagraph_mode": "FULL"}
    if options.backend:
        changes["attention_backend"] = options.backend
    receipts = WORK / f"receipts-{options.label}"
    os.environ.setdefault("EXL3_RECEIPT_DIR", str(receipts))  # the only word of ranks in other processes
    started = time.monotonic()
    llm = open_engine(
        options.model, max_model_len=512, max_num_batched_tokens=1024, max_num_seqs=8, sizes=[1, 2, 4, 8],
        logprobs_mode="raw_logits", max_logprobs=-1, kv_cache_memory_bytes=1 << 28, **changes,
    )  # fmt: skip
    record: dict[str, Any] = {"label": options.label, "start_s": round(time.monotonic() - started, 1)}
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    asked = prompts(vocabulary)
    decoded = generate(llm, asked, TOKENS, logprobs=-1)
    tokens = [list(output.outputs[0].token_ids) for output in decoded]
    again = generate(llm, [ids + said for ids, said in zip(asked, tokens, strict=True)], 1, prompt_logprobs=-1)
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    errors = []
    for number, (ids, said) in enumerate(zip(asked, tokens, strict=True)):
        prefill = rows_of(again[number].prompt_logprobs[1:], vocabulary)
        steps = rows_of(decoded[number].outputs[0].logprobs, vocabulary)
        errors.append(relative(steps, prefill[len(ids) - 1 :]))
        arrays[f"prompt{number}"] = prefill[: len(ids) - 1]
        arrays[f"decode{number}"], arrays[f"tokens{number}"] = steps, np.array(said)
    np.savez(WORK / f"{options.label}.npz", **arrays)
    record["decode_against_prefill"] = errors
    if options.tp == 1:
        record["receipt"] = diagnostics.exl3_fat_diag()
    else:
        time.sleep(6)  # receipts are written every 5 s
        folder = Path(os.environ["EXL3_RECEIPT_DIR"])
        record["receipts"] = [json.loads(file.read_text()) for file in sorted(folder.glob("rank*.json"))]
        asked_rows = sum(len(ids) for ids in asked)
        record["prompt_tokens"] = {"first": asked_rows, "again": asked_rows + TOKENS * len(asked)}
        keys = ("effective_tier", "tier_reason", "rows_handled", "rows_expected", "tp_rank", "fallback_calls")
        print("RESULT", options.label, [{key: one[key] for key in keys} for one in record["receipts"]])
    say(record, options.label)
    print("RESULT", options.label, "decode against prefill", [f"{error:.2e}" for error in errors])


def relative(got: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> float:
    """Relative L2 over all positions; NaN is infinite."""
    found = float(np.linalg.norm(got.astype(np.float64) - wanted) / np.linalg.norm(wanted.astype(np.float64)))
    return found if found == found else float("inf")


OUTLIER = 3e-3
"""A position beyond this took another expert somewhere: routers choose by differences smaller than any rounding."""


def each(got: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Relative L2 of each position."""
    return np.linalg.norm(got.astype(np.float64) - wanted, axis=1) / np.linalg.norm(wanted.astype(np.float64), axis=1)


def spread(errors: list[np.ndarray[Any, Any]]) -> dict[str, Any]:
    """Over all positions, and over those that are no outliers."""
    found = np.concatenate(errors)
    kept = found[found < OUTLIER]
    return {
        "median": float(np.median(found)),
        "most_but_outliers": float(kept.max()) if len(kept) else None,
        "outliers": int(len(found) - len(kept)),
        "most": float(found.max()),
        "positions": len(found),
    }


def compare(files: list[Path]) -> dict[str, Any]:
    """Every file against the first one: prompts, and decode steps as long as the tokens agree."""
    base = np.load(files[0])
    found: dict[str, Any] = {"base": files[0].stem, "outlier": OUTLIER}
    for file in files[1:]:
        other = np.load(file)
        names = [name for name in base.files if name.startswith("prompt")]
        prompt = spread([each(other[name], base[name]) for name in names])
        steps, agree = [], 0
        for number in range(len(names)):
            same = np.cumprod(base[f"tokens{number}"] == other[f"tokens{number}"])
            count = min(int(same.sum()) + 1, len(same))
            agree += int(same.sum())
            steps.append(each(other[f"decode{number}"][:count], base[f"decode{number}"][:count]))
        agreement = {"tokens_agree": agree, "of": len(names) * TOKENS}
        found[file.stem] = {"prompt": prompt, "decode": spread(steps), **agreement}
    return found


def reference(model: Path, label: str) -> None:
    """The same prompts through transformers in fp32, on weights that our own decoder wrote out."""
    import torch
    from exl3_vllm.export import export_dense
    from transformers import AutoModelForCausalLM

    torch.backends.cuda.matmul.allow_tf32 = False
    dense = WORK / f"{model.name}-dense"
    export_dense(model, dense, torch.float32)
    network = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).cuda().eval()
    vocabulary = network.config.vocab_size
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    with torch.no_grad():
        for number, ids in enumerate(prompts(vocabulary)):
            grown, steps = list(ids), []
            for step in range(TOKENS):
                logits = network(torch.tensor([grown], device="cuda")).logits[0].float()
                if not step:
                    arrays[f"prompt{number}"] = logits[:-1].cpu().numpy()
                steps.append(logits[-1].cpu().numpy())
                grown.append(int(logits[-1].argmax()))
            arrays[f"decode{number}"], arrays[f"tokens{number}"] = np.stack(steps), np.array(grown[len(ids) :])
    np.savez(WORK / f"{label}.npz", **arrays)
    print("RESULT", label, "reference made")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("label", nargs="?")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--mode", help="cudagraph mode")
    parser.add_argument("--uncompiled", action="store_true")
    parser.add_argument("--base", default="reference", help="what the others are compared with")
    parser.add_argument("--backend", help="attention backend")
    parser.add_argument("--reference", action="store_true")
    parser.add_argument("--compare", metavar="PREFIX", help="all npz files of the work folder that begin so")
    options = parser.parse_args()
    if options.compare:
        files = sorted(
            WORK.glob(f"{options.compare}.*.npz"), key=lambda file: (f".{options.base}." not in file.name, file.name)
        )
        found = compare(files)
        say(found, f"compare.{options.compare}.{options.base}")
        for name, value in found.items():
            print("RESULT", options.compare, name, value, flush=True)
    elif options.reference:
        reference(options.model, options.label)
    else:
        run(options)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
