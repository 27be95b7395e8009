"""The trellis kernels from Python: loads the library, gives its operators fake implementations, and wraps them.

The library is exl3_kernels.abi3.so beside this module. Operators write into buffers of the caller and never allocate;
the wrappers here allocate outputs and workspaces through torch, so under a CUDA graph they come from the graph's pool.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exl3_vllm import plans
from exl3_vllm.plans import DensePlan, Gpu, MoePlan, Table

ABI_VERSION = 1
LIBRARY = Path(__file__).with_name("exl3_kernels.abi3.so")
CODEBOOKS = {"3inst": 0, "mcg": 1, "mul1": 2}
ROUTING, ROTATION, GATE_UP, DOWN, COMBINE = 1, 2, 4, 8, 16  # phases of the moe operator
ALL_PHASES = 31


class KernelError(RuntimeError):
    """The kernel library is missing, of another version, or lacks a rate; the text says which and what to do."""


@dataclass(frozen=True)
class Matrix:
    """One EXL3 weight: y = (((x * suh) H) What H) * svh.

    trellis int16 [K/16, N/16, 8 * rate2], suh fp16 [K], svh fp16 [N]; ``columns`` <= N are stored.
    """

    trellis: Tensor
    suh: Tensor
    svh: Tensor
    codebook: str
    columns: int

    @property
    def code(self) -> int:
        """Twice the bits per weight, and the codebook from bit 5 on."""
        return code_of(self.trellis, self.codebook)


@dataclass(frozen=True)
class Experts:
    """The stacked weights of a MoE layer, as the kernels want them; build with ``experts``.

    ``pointers`` int64 [7 or 9, E]: trellis of gate, up, down; svh of gate, up, down; suh of down; without a shared suh
    also suh of gate and up. The tensors behind the pointers must outlive this object: ``keep`` holds them.
    """

    pointers: Tensor
    suh: Tensor | None
    classes: tuple[Tensor | None, Tensor | None]
    codes: tuple[tuple[int, ...], tuple[int, ...]]
    hidden: int
    inter: int
    keep: tuple[Tensor, ...]


def code_of(trellis: Tensor, codebook: str) -> int:
    """The number under which kernels know a rate and codebook: twice the bits | codebook << 5."""
    return trellis.shape[-1] // 8 | CODEBOOKS[codebook] << 5


@functools.cache
def _library(path: Path) -> ctypes.CDLL:
    """The loaded library, its C functions declared and its torch operators registered."""
    if not path.is_file():
        raise KernelError(f"{path}: no kernel library; build it with overlay/csrc/build.py")
    try:
        _publish_torch()
        library = ctypes.CDLL(str(path))
        version = library.exl3_abi_version()
        library.exl3_instances.restype = ctypes.c_char_p
        library.exl3_gemm_workspace.restype = library.exl3_moe_workspace.restype = ctypes.c_int64
    except (OSError, AttributeError) as error:
        raise KernelError(f"{path}: not a usable kernel library: {error}; build it again") from error
    if version != ABI_VERSION:
        raise KernelError(f"{path}: ABI {version}, this package needs {ABI_VERSION}; build both from one source")
    operators: Any = torch.ops  # its methods have no annotations
    operators.load_library(str(path))
    _register_fakes()
    return library


def _publish_torch() -> None:
    """Makes the symbols of torch's loaded libraries visible to ours, which names none of them as a dependency."""
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cuda.so"):
        if (folder / name).is_file():
            ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)


_path = LIBRARY


def load(path: Path = LIBRARY) -> tuple[tuple[int, int], ...]:
    """Loads the library once; returns the (rate2, codebook) pairs that it holds.

    Raises KernelError when the file is missing, cannot be loaded, or has another ABI version.
    """
    global _path
    _path = path
    pairs = (pair.split(":") for pair in _library(path).exl3_instances().decode().split())
    return tuple((int(rate2), int(codebook)) for rate2, codebook in pairs)


def _register_fakes() -> None:
    def nothing(*_: object, **__: object) -> None:  # every operator writes into its arguments and returns nothing
        return None

    names = ("rotate", "gemm", "reconstruct", "finish", "moe", "exl3_fat_gemm", "exl3_fat_gemm_scatter")
    for name in (*names, "exl3_fat_moe_gather", "exl3_fat_moe_gateup", "exl3_fat_moe_down"):
        torch.library.register_fake(f"exl3::{name}", nothing)


@functools.cache
def gpu_of(device: torch.device) -> Gpu:
    """Capability and size of a CUDA device."""
    properties = torch.cuda.get_device_properties(device)
    return Gpu((properties.major, properties.minor), properties.multi_processor_count)


def rotate(x: Tensor, suh: Tensor) -> tuple[Tensor, Tensor]:
    """(a, scale) of x [M, <=K]: a fp16 [M, K] = ((x * suh) H) / scale, scale fp32 [M], a power of two, mostly 1."""
    a = torch.empty((x.shape[0], suh.numel()), dtype=torch.float16, device=x.device)
    scale = torch.empty((x.shape[0],), dtype=torch.float32, device=x.device)
    torch.ops.exl3.rotate(x, suh, a, scale)
    return a, scale


def gemm_workspace(rows: int, k: int, total_n: int, rotations: int, splits: int) -> int:
    """Bytes of workspace that the gemm operator needs."""
    return int(_library(_path).exl3_gemm_workspace(rows, k, total_n, rotations, splits))


def fused_linear(x: Tensor, parts: Sequence[Matrix], shared_suh: bool, out: Tensor, plan: DensePlan) -> None:
    """out [M, sum of columns] = x [M, K] through every part, side by side, decoded on the fly."""
    rotations = 1 if shared_suh else len(parts)
    total_n = sum(part.svh.numel() for part in parts)
    size = gemm_workspace(x.shape[0], parts[0].suh.numel(), total_n, rotations, plan.splits)
    workspace = torch.empty((size,), dtype=torch.uint8, device=x.device)
    torch.ops.exl3.gemm(
        x,
        [part.trellis for part in parts],
        [part.suh for part in parts],
        [part.svh for part in parts],
        [part.code for part in parts],
        [part.columns for part in parts],
        shared_suh,
        out,
        workspace,
        plan.tile,
        plan.row_tiles,
        plan.splits,
    )


def reconstruct(part: Matrix, out: Tensor | None = None, *, original_basis: bool = True) -> Tensor:
    """The decoded weight fp16 [K, N], into ``out`` (rows may be strided) when given."""
    if out is None:
        shape = (part.suh.numel(), part.svh.numel())
        out = torch.empty(shape, dtype=torch.float16, device=part.trellis.device)
    torch.ops.exl3.reconstruct(part.trellis, part.suh, part.svh, part.code, original_basis, out)
    return out


def reconstructed_linear(
    x: Tensor, parts: Sequence[Matrix], out: Tensor, weight: Tensor | None = None, folded_rows: int = 1024
) -> None:
    """The same product through cuBLAS: each part's weight is decoded into ``weight`` (fp16 [K, N] scratch) first.

    From ``folded_rows`` rows on, fp16 x multiplies the weight of the original basis straight into ``out``. Below, and
    for bf16 and fp32 x (whose rows could overflow fp16), rows are rotated with a power-of-two scale, multiplied with
    the inner weight into fp32 and rotated back.
    """
    folded = x.shape[0] >= folded_rows and x.dtype == torch.float16 and out.dtype == torch.float16
    first = 0
    for part in parts:
        columns = out[:, first : first + part.columns]
        first += part.columns
        buffer = _scratch(weight, part)
        reconstruct(part, buffer, original_basis=folded)
        if folded:
            torch.mm(x, buffer[: x.shape[1], : part.columns], out=columns)
        else:
            a, scale = rotate(x, part.suh)
            torch.ops.exl3.finish(torch.mm(a, buffer, out_dtype=torch.float32), scale, part.svh, columns)


def _scratch(weight: Tensor | None, part: Matrix) -> Tensor:
    k, n = part.suh.numel(), part.svh.numel()
    if weight is None:
        return torch.empty((k, n), dtype=torch.float16, device=part.suh.device)
    return weight.view(-1)[: k * n].view(k, n)


def linear(
    x: Tensor,
    parts: Sequence[Matrix],
    *,
    shared_suh: bool = False,
    out_dtype: torch.dtype | None = None,
    table: Table | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """y [M, sum of columns] of x [M, K] (fp16, bf16 or fp32) through a fused layer, on the path that the table chooses.

    ``weight``: fp16 scratch for the reconstructed path, as large as the largest part.
    """
    columns = sum(part.columns for part in parts)
    out = torch.empty((x.shape[0], columns), dtype=out_dtype or x.dtype, device=x.device)
    gpu = gpu_of(x.device)
    table = table or plans.table_for(gpu)
    if x.shape[0] > table.fused_rows:
        reconstructed_linear(x, parts, out, weight, table.folded_rows)
    elif x.shape[0]:
        widths = tuple(part.svh.numel() for part in parts)
        fused_linear(x, parts, shared_suh, out, plans.dense_plan(table, gpu, x.shape[0], parts[0].suh.numel(), widths))
    return out


def experts(gate: Sequence[Matrix], up: Sequence[Matrix], down: Sequence[Matrix]) -> Experts:
    """Tables of a layer's experts; whether all gates and ups share one suh is looked at here, never assumed.

    Raises ValueError where shapes do not fit together or an expert's gate and up differ in rate or codebook.
    """
    for index, (g, u, d) in enumerate(zip(gate, up, down, strict=True)):
        if g.code != u.code:
            raise ValueError(f"expert {index}: gate and up have different rates or codebooks; one launch needs one")
        if g.trellis.shape[:2] != gate[0].trellis.shape[:2] or d.trellis.shape[:2] != down[0].trellis.shape[:2]:
            raise ValueError(f"expert {index}: its matrices have another shape than expert 0's")
    suh = gate[0].suh
    shared = all(torch.equal(matrix.suh, suh) for matrix in (*gate, *up))
    rows: list[list[Tensor]] = [[m.trellis for m in group] for group in (gate, up, down)]
    rows += [[m.svh for m in group] for group in (gate, up, down)]
    rows.append([m.suh for m in down])
    if not shared:
        rows += [[m.suh for m in gate], [m.suh for m in up]]
    device = suh.device
    pointers = torch.tensor([[t.data_ptr() for t in row] for row in rows], dtype=torch.int64, device=device)
    codes = ([m.code for m in gate], [m.code for m in down])
    classes = [torch.tensor(c, dtype=torch.uint8, device=device) if len(set(c)) > 1 else None for c in codes]
    distinct = [tuple(sorted(set(c))) for c in codes]
    keep = tuple(t for row in rows for t in row)
    hidden, inter = suh.numel(), down[0].suh.numel()
    tables, kinds = (classes[0], classes[1]), (distinct[0], distinct[1])
    return Experts(pointers, suh if shared else None, tables, kinds, hidden, inter, keep)


def moe_workspace(tokens: int, topk: int, layer: Experts, plan: MoePlan) -> int:
    """Bytes of workspace that the moe operator needs."""
    shared, count = layer.suh is not None, layer.pointers.shape[1]
    sizes = (tokens, topk, count, layer.hidden, layer.inter, plan.segment_rows, shared)
    return int(_library(_path).exl3_moe_workspace(*sizes, plan.splits_gate_up, plan.splits_down))


def moe_into(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    layer: Experts,
    limit: float,
    plan: MoePlan,
    out: Tensor,
    workspace: Tensor,
    phases: int = ALL_PHASES,
) -> None:
    """The moe operator with a plan and buffers of the caller; ``phases`` fewer than all only to time them."""
    torch.ops.exl3.moe(
        x,
        topk_ids,
        topk_weights,
        layer.suh,
        layer.pointers,
        *layer.classes,
        list(layer.codes[0]),
        list(layer.codes[1]),
        layer.inter,
        limit,
        plan.segment_rows,
        plan.splits_gate_up,
        plan.splits_down,
        list(plan.launch_gate_up),
        list(plan.launch_down),
        phases,
        out,
        workspace,
    )


CHUNK_TOKENS_UNSHARED = 1024
"""Without a shared suh every row has two rotations and fp32 sums: 0.5 GB of workspace for 1,024 tokens x top-8."""


def moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    layer: Experts,
    *,
    limit: float = 0.0,
    out_dtype: torch.dtype | None = None,
    table: Table | None = None,
) -> Tensor:
    """y [T, hidden] = sum over a token's experts of weight * down(silu(gate) * up).

    x fp16, bf16 or fp32 [T, hidden]; topk_ids int32 and topk_weights fp32 [T, top-k]; an id outside 0..E-1 contributes
    nothing. Gate and |up| are held to ``limit`` if it is > 0. No host synchronisation; the same bits on every run.
    """
    out = torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device)
    gpu = gpu_of(x.device)
    table = table or plans.table_for(gpu)
    step = x.shape[0] if layer.suh is not None else CHUNK_TOKENS_UNSHARED
    for first in range(0, x.shape[0], max(1, step)):
        part = slice(first, first + step)
        tokens, topk, count = x[part].shape[0], topk_ids.shape[1], layer.pointers.shape[1]
        shared = layer.suh is not None
        plan = plans.moe_plan(table, gpu, tokens, topk, count, layer.hidden, layer.inter, shared_suh=shared)
        workspace = torch.empty((moe_workspace(tokens, topk, layer, plan),), dtype=torch.uint8, device=x.device)
        moe_into(x[part], topk_ids[part], topk_weights[part], layer, limit, plan, out[part], workspace)
    return out
