"""Makes vLLM check, for EXL3 models too, that every parameter was filled from the checkpoint.

vLLM does so for unquantised models only. Without it a checkpoint that lost its head or a norm is served with whatever
the memory held. Trellis placeholders are empty and exempt there; `exl3_vllm.loading` accounts for them.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from exl3_vllm.errors import CompletenessError


def track_exl3_loading() -> None:
    """Wrap the default loader's `load_weights`; a second call changes nothing."""
    original = DefaultModelLoader.load_weights
    if hasattr(original, "__wrapped__") and original.__module__ == __name__:
        return

    @functools.wraps(original)
    def load_weights(self: DefaultModelLoader, model: Any, model_config: Any) -> None:
        if model_config.quantization != "exl3":
            return original(self, model, model_config)
        self.enable_weights_track = True
        try:
            return original(self, model, model_config)
        except ValueError as error:
            unfilled = re.search(r"not initialized from checkpoint: \{(.*)\}", str(error))
            if unfilled is None:
                raise
            first = sorted(re.findall(r"'([^']*)'", unfilled.group(1)))[0]
            what = "is a parameter of the model, and the checkpoint holds nothing for it"
            raise CompletenessError(f"tensor {first}", what, "Fetch the missing shard or index again") from error

    load_weights.__module__ = __name__
    DefaultModelLoader.load_weights = load_weights  # type: ignore[method-assign]
