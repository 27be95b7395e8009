"""What the patched places of vLLM call (`overlay/patches`): which of their layers get the quantisation after all.

Those places build layers without any quantisation because other formats store them plain. Nothing here may change what
happens to a checkpoint that is not EXL3, or to layers that an EXL3 checkpoint stores plain.
"""

from __future__ import annotations

from typing import Any


def is_exl3(config: Any) -> bool:
    """Whether a quantisation of vLLM's is ours."""
    return config is not None and config.get_name() == "exl3"


def trellis_only(config: Any, prefix: str) -> Any:
    """`config` if it is EXL3 and the checkpoint stores a trellis at or below the module `prefix`; None, as vLLM had it,
    otherwise. `prefix` is vLLM's name of the module."""
    return config if is_exl3(config) and config.names is not None and config.names.any_below(prefix) else None
