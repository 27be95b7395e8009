"""Gives output heads their trellis where a model's class forgets to pass the quantisation on.

47 of vLLM 0.33's 167 heads are made without `quant_config` (Qwen3-Next, gpt-oss, DeepSeek-V4, ...): `lm_head.trellis`
would have nowhere to go. One wrap serves them all, and changes nothing for a head that is stored as a plain weight.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead


def find_quantised_heads() -> None:
    """Wrap the head's constructor; a second call changes nothing."""
    original = ParallelLMHead.__init__
    if original.__module__ == __name__:
        return

    @functools.wraps(original)
    def init(self: Any, *arguments: Any, **named: Any) -> None:
        # The quantisation is the seventh positional parameter in 0.32 and 0.33; callers name it or leave it out.
        if named.get("quant_config") is None and len(arguments) < 7:
            found: Any = getattr(get_current_vllm_config_or_none(), "quant_config", None)
            if getattr(found, "get_name", str)() == "exl3" and found.holds_matrix(named.get("prefix", "")):
                named["quant_config"] = found
        original(self, *arguments, **named)

    init.__module__ = __name__
    ParallelLMHead.__init__ = init
