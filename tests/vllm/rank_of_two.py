"""One of two processes that serve a model together at tensor parallel 2; started twice by test_two_ranks.py.

`python rank_of_two.py RANK PORT MODEL...`: for each model, prints one line of JSON with the answers that are wrong; a
model without questions is a synthetic one, whose logits are saved as logits.pt in its receipt folder instead.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

import torch
from demo import wrong_answers
from engines import open_engine
from logits import options_of, vllm_logits
from plan_figures import held


def main() -> None:
    rank, port, *models = sys.argv[1:]
    os.environ.update(
        RANK=rank,
        LOCAL_RANK=rank,
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        VLLM_HOST_IP="127.0.0.1",
        GLOO_SOCKET_IFNAME="lo",
    )
    receipts = Path(os.environ["EXL3_RECEIPT_DIR"])
    for number, model in enumerate(models):
        # A port of its own for each model: the second must not meet the first one's closing store.
        os.environ["MASTER_PORT"] = str(int(port) + number)
        os.environ["EXL3_RECEIPT_DIR"] = str(receipts / str(number))
        print(json.dumps(serve(Path(model), receipts / str(number))), flush=True)
        # An engine that is collected after the next one was made would take the next one's process groups with it.
        gc.collect()


def serve(model: Path, folder: Path) -> list[tuple[str, str]]:
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}
    if (model / "questions.json").exists():
        with open_engine(model, **options) as llm:
            (folder / f"held{os.environ['RANK']}.json").write_text(json.dumps(held(llm)))
            return wrong_answers(llm, model)
    with open_engine(model, **options, **options_of(model.name)) as llm:
        torch.save(vllm_logits(llm), folder / f"logits{os.environ['RANK']}.pt")
    return []


if __name__ == "__main__":
    main()
