"""Where the GPU's time goes, by part of the model, and what each part would give if it cost nothing. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

IDLE, OTHER = "idle", "other"
PARTS: tuple[tuple[str, str], ...] = (  # in this order: the first that fits
    ("communication", r"nccl|all_?reduce|all_?gather|reduce_scatter|cross_device"),
    ("trellis GEMMs", r"\btrellis_gemm|exl3_(m?gemm|gemv|moe)"),
    (
        "Hadamard and reconstruct",
        r"\b(rotate|reconstruct)\b|had_r|hadamard|finish_(dense|swiglu)|combine_(partial|half)|cast_rows",
    ),
    ("routing", r"\broute_|topk|moe_align"),
    ("attention", r"attn|attention|flash|fmha|paged|mla|reshape_and_cache"),
    ("dense GEMMs", r"gemm|cutlass|cublas|nvjet|wgmma|sm\d+_xmma"),
    ("copies", r"memcpy|memset"),
)  # fmt: skip


def part_of(kernel: str) -> str:
    """The part of the model that a kernel belongs to, by its name."""
    return next((part for part, pattern in PARTS if re.search(pattern, kernel, re.IGNORECASE)), OTHER)


@dataclass(frozen=True)
class Share:
    """part: of the model. seconds: of it. share: of the whole span. ceiling: tokens/s if this part cost nothing."""

    part: str
    seconds: float
    share: float
    ceiling: float


def shares(kernels: Mapping[str, float], span: float, busy: float, tokens: int) -> list[Share]:
    """The span's time by part, largest first, and idle.

    The ceiling of a part is `tokens / (span - its time)`: no change to that part alone can give more, however good it
    is. Kernels that run beside each other are scaled to the time in which any ran, so that all shares add up to one.

    Parameters
    ----------
    kernels: microseconds by name. span, busy: microseconds, see `tracer`. tokens: computed in the span.

    Raises `ValueError` when nothing ran.
    """
    summed = sum(kernels.values())
    if not (span > 0 and busy > 0 and summed > 0):
        raise ValueError("no kernel ran in the trace")
    times = dict.fromkeys([part for part, _ in PARTS] + [OTHER], 0.0)
    for name, lasted in kernels.items():
        times[part_of(name)] += lasted * busy / summed
    times[IDLE] = span - busy
    found = [
        Share(part, time / 1e6, time / span, tokens / ((span - time) / 1e6) if time < span else float("inf"))
        for part, time in times.items()
        if time > 0
    ]
    return sorted(found, key=lambda one: -one.share)


def fused_ceiling(rows: int, layers: int, gemm: float, other: float) -> tuple[float, float]:
    """Tokens/s that the layers measured alone allow: as they are, and with everything but the products for nothing.

    `gemm`, `other`: seconds per layer for `rows` rows, of the products and of what surrounds them (Hadamard,
    reconstruct). This is how a published analysis found that prefill of a trellis format could not reach FP8's by
    dispatch alone: 64 layers of 3.69 ms for 2048 rows are 8,700 tokens/s, and 2.70 ms are 11,800.
    """
    return rows / (layers * (gemm + other)), rows / (layers * gemm)
