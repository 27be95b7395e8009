"""Makes vLLM know the overlay's variables that begin with `VLLM_`.

vLLM warns of every `VLLM_` name that is not in its table, and refuses it under `--fail-on-environ-validation`. Of those
in the table it lets every value through to the hash of compiled graphs, which is right for these two: they change what
a graph holds.
"""

from __future__ import annotations

import os

from vllm import envs

NAMES = ("VLLM_EXL3_PREFILL_RECONSTRUCT_M", "VLLM_EXL3_GRAPH_DECODE")


def name_variables() -> None:
    """Add them to vLLM's table; `exl3_vllm.settings` reads them, strictly."""
    for name in NAMES:
        envs.environment_variables.setdefault(name, lambda name=name: os.environ.get(name))  # type: ignore[misc]
