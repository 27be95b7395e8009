"""The operators of the kernel library against what the overlay gives them, before weights are read.

A library of another source may lack an operator, or take one argument more; called, it would end the first prefill with
"incompatible function arguments", after 164 GiB of weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

EXPECTED: dict[str, tuple[str, ...]] = {
    "rotate": ("x", "suh", "a", "a_scale"),
    "gemm": (
        *("x", "trellis", "suh", "svh", "codes", "columns", "shared_suh", "out", "workspace"),
        *("tile", "row_tiles", "splits"),
    ),
    "reconstruct": ("trellis", "suh", "svh", "code", "original_basis", "out"),
    "finish": ("x", "a_scale", "svh", "out"),
    "moe": (
        *("x", "topk_ids", "topk_weights", "suh", "pointers", "classes_gate_up", "classes_down"),
        *("codes_gate_up", "codes_down", "inter", "limit", "segment_rows", "splits_gate_up", "splits_down"),
        *("launch_gate_up", "launch_down", "phases", "out", "workspace"),
    ),
    "exl3_fat_gemm": ("a", "packed", "out", "svh", "K", "mcg", "mul1"),
    "exl3_fat_gemm_scatter": ("a", "packed", "out", "svh", "token_idx", "route_weight", "K", "mcg", "mul1", "fault"),
    "exl3_fat_moe_gather": ("x", "row_token", "row_expert", "suh_ptrs", "h13", "num_rows", "fault"),
    "exl3_fat_moe_gateup": (
        *("h13", "gate_trellis", "up_trellis", "gate_svh", "up_svh", "down_suh", "h2"),
        *("seg_expert", "seg_row0", "seg_rows", "num_segs", "limit", "K", "mcg", "mul1", "fault"),
    ),
    "exl3_fat_moe_down": (
        *("h2", "down_trellis", "down_svh", "out", "row_token", "row_weight"),
        *("seg_expert", "seg_row0", "seg_rows", "num_segs", "K", "mcg", "mul1", "fault"),
    ),
}
"""Each operator of the namespace `exl3` that the overlay calls, with the names of its arguments."""


def found_operators() -> dict[str, tuple[str, ...]]:
    """The arguments of each expected operator that is registered in this process."""
    import torch

    found = {}
    for name in EXPECTED:
        for schema in torch._C._jit_get_schemas_for_operator(f"exl3::{name}"):
            found[name] = tuple(argument.name for argument in schema.arguments)
    return found


def wrong_operators(found: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """A sentence for each operator that is missing or takes other arguments."""
    for name, wanted in EXPECTED.items():
        if name not in found:
            yield f"the kernel library has no operator {name}; build the image again"
        elif tuple(found[name]) != wanted:
            has, gives = f"{len(found[name])} ({', '.join(found[name])})", f"{len(wanted)} ({', '.join(wanted)})"
            yield f"the kernel library's {name} takes {has} arguments, the overlay gives {gives}; build the image again"


def problems() -> list[str]:
    """Every operator that is not as expected, where the image holds a library; nothing where it holds none."""
    from exl3_vllm import kernels

    if not kernels.LIBRARY.is_file():
        return []
    try:
        kernels.load()
    except kernels.KernelError as error:
        return [str(error)]
    return list(wrong_operators(found_operators()))
