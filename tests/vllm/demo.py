"""The demo models as the tests use them: asking their questions, and damaging copies of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

MARKERS = {"mcg": 0xCBAC1FED - (1 << 32), "mul1": 0x83DCD12D - (1 << 32)}


def questions(model: Path) -> list[dict[str, str]]:
    return json.loads((model / "questions.json").read_text())


def wrong_answers(llm: Any, model: Path) -> list[tuple[str, str]]:
    """(question, what was said) of every answer that is not exact."""
    from vllm import SamplingParams

    pairs = questions(model)
    outputs = llm.generate(
        [pair["question"] for pair in pairs], SamplingParams(temperature=0, max_tokens=64), use_tqdm=False
    )
    said = [output.outputs[0].text for output in outputs]
    return [(pair["question"], text) for pair, text in zip(pairs, said, strict=True) if text != pair["answer"]]


def changed_copy(model: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of the model whose tensors went through `change`; the converter's list is left out of it."""
    copy = folder / model.name
    shutil.copytree(model, copy, ignore=shutil.ignore_patterns("quantization_config.json", "*.safetensors"))
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def flip_marker(module: str) -> Callable[[dict[str, torch.Tensor]], None]:
    """Turn the module's mcg marker into a mul1 marker; not one bit of its trellis changes."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"{module}.mcg"]
        tensors[f"{module}.mul1"] = torch.tensor(MARKERS["mul1"], dtype=torch.int32)

    return change


def other_trellis(module: str) -> Callable[[dict[str, torch.Tensor]], None]:
    """Give the module another valid trellis: its own, turned upside down."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{module}.trellis"] = tensors[f"{module}.trellis"].flip(0).contiguous()

    return change
