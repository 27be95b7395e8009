"""Checkpoints of exllamav3's own converter, served by vLLM, against the tokens that exllamav3 itself chose."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from logits import ENGINE

Engine = Callable[..., AbstractContextManager[Any]]


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama_3.0bpw_mcg", "llama_4.0bpw_mul1", "qwen3moe_4.0bpw_mcg"])
def test_tokens_and_logits_are_upstreams(name: str, engine: Engine, upstream: Path) -> None:
    from vllm import SamplingParams

    # given upstream's 48 input tokens, its logits at each of them, and the 24 tokens that it went on with
    reference = json.loads((upstream / f"{name}_refs.json").read_text())["text"]
    logits = torch.from_numpy(numpy.load(upstream / f"{name}_refs.npz")["logits"])
    # when vLLM reads and continues them
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, prompt_logprobs=512)
    with engine(upstream / name, **ENGINE) as llm:
        (output,) = llm.generate([{"prompt_token_ids": reference["input_ids"]}], sampling, use_tqdm=False)
    # then the tokens are the same, and the logits within fp16 of upstream's kernels (transformers: 3.5e-4 to 3.9e-4)
    assert list(output.outputs[0].token_ids) == reference["greedy"]
    for position, entry in enumerate(output.prompt_logprobs[1:]):
        row = torch.tensor([entry[token].logprob for token in range(512)])
        assert torch.linalg.norm(row - logits[position]) / torch.linalg.norm(logits[position]) < 2e-3, position
