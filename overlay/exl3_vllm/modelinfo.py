"""Fills vLLM's cache of model facts while the image is built.

Before it starts, vLLM imports the model's class in a process of its own, only to ask it what it can do, and keeps the
answer below `VLLM_CACHE_ROOT` with a hash of the class's source. A served container has a new and empty cache, so every
rank would ask anew at every start: 12 to 18 s of 64 until the first answer on two busy cores.

`python -m exl3_vllm.modelinfo ARCHITECTURE...` asks at build time; `exl3_vllm.rank` lays the answers where vLLM looks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def here(question: Callable[[], T]) -> T:
    """Ask in this process: a build has no GPU to initialise, and a process for each takes 7 s to import vLLM."""
    return question()


def fill(architectures: Sequence[str]) -> None:
    """Let vLLM ask each architecture and keep the answer; raises KeyError for one that it does not know."""
    from vllm import envs
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = here
    for name in architectures:
        registry.ModelRegistry.models[name].inspect_model_cls()
    for answer in Path(envs.VLLM_CACHE_ROOT).rglob("*.json"):
        answer.chmod(0o644)  # vLLM leaves 0600, and the served container has another user than the build


if __name__ == "__main__":
    fill(sys.argv[1:])
