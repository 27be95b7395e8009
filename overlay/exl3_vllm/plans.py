"""Which tile class and how many splits a product gets: host-side tables, pure functions of sizes and the GPU.

Numbers come from `python -m exl3_vllm.bench` on the GPU named beside them; where no such GPU was at hand, from the
model in docs/kernels.md. A table that the bench wrote on this machine replaces the built-in one (`load_table`).
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, replace
from pathlib import Path

THIN, HALF, WIDE, NARROW = range(4)  # as in abi.h
TILE_ROWS = (32, 64, 128, 128)
TILE_COLUMNS = (256, 256, 256, 128)
BLOCK_K = 64  # K of one pipeline stage


@dataclass(frozen=True)
class Gpu:
    """What the choices depend on: compute capability (9, 0), number of SMs."""

    capability: tuple[int, int]
    sms: int


@dataclass(frozen=True)
class Table:
    """The choices for one GPU architecture.

    ``dense_tiles``: (up to this many rows, tile class), ascending. ``fused_rows``: above this many rows a dense layer
    is reconstructed and given to cuBLAS; from ``folded_rows`` on with both rotations decoded into the weight, which
    costs more per weight and nothing per row. The next six are the cost model of splits, in microseconds: weights
    decoded and floating point operations done per microsecond on the whole GPU, how much slower an SM is with one CTA
    than with several, what each split and each further CTA of an SM cost, and bytes of partial sums per microsecond.
    ``stages_per_split``: K stages that a split keeps at least. ``moe_decode_tokens``: up to here experts take the split
    path. ``moe_half_rows``: segments of up to this many rows go to the half tile.
    """

    dense_tiles: tuple[tuple[int, int], ...]
    fused_rows: int
    folded_rows: int
    weights_per_us: float
    flops_per_us: float
    alone: float
    us_per_split: float
    us_per_cta: float
    bytes_per_us: float
    stages_per_split: int = 4
    down_tile: int = WIDE
    moe_decode_tokens: int = 256
    moe_half_rows: int = 64


H200 = Table(
    dense_tiles=((16, THIN), (1 << 30, NARROW)),
    fused_rows=192,
    folded_rows=1024,
    weights_per_us=3.0e6,
    flops_per_us=330e6,
    alone=1.12,
    us_per_split=0.25,
    us_per_cta=0.4,
    bytes_per_us=3.0e6,
    down_tile=NARROW,
)
# GB10 and RTX cards: tensor cores slow enough, relative to everything else, that the fused path stays ahead of
# reconstruct + cuBLAS much longer, and the 8-warp tiles are best (docs/kernels.md, "Model of GB10").
SM12X = Table(
    dense_tiles=((32, THIN), (64, HALF), (1 << 30, WIDE)),
    fused_rows=4096,
    folded_rows=1024,
    weights_per_us=1.2e6,
    flops_per_us=90e6,
    alone=1.12,
    us_per_split=0.4,
    us_per_cta=0.5,
    bytes_per_us=0.8e6,
)


@dataclass(frozen=True)
class DensePlan:
    """One fused product: tile class, row tiles, splits of K (0: finished in the GEMM)."""

    tile: int
    row_tiles: int
    splits: int


@dataclass(frozen=True)
class MoePlan:
    """One MoE layer. Launches are flat (tile, fewest rows, most rows) of the segments that each serves."""

    segment_rows: int
    splits_gate_up: int
    splits_down: int
    launch_gate_up: tuple[int, ...]
    launch_down: tuple[int, ...]


def table_for(gpu: Gpu) -> Table:
    """The built-in table of the GPU's architecture."""
    return H200 if gpu.capability < (12, 0) else SM12X


def load_table(told: str, gpu: Gpu) -> Table:
    """The table that the bench wrote, if it wrote it on such a GPU.

    ``told`` is the JSON itself, or the path of a file that holds it. Raises ValueError when it is for another GPU or
    names an unknown choice, OSError when the file cannot be read.
    """
    path = name_of(told)
    content = json.loads(told if told.startswith("{") else Path(told).read_text())
    if tuple(content["capability"]) != gpu.capability or content["sms"] != gpu.sms:
        raise ValueError(
            f"{path}: measured on capability {content['capability']} with {content['sms']} SMs, "
            f"this GPU is {gpu.capability} with {gpu.sms}; run the bench here"
        )
    choices = dict(content["table"])
    choices["dense_tiles"] = tuple((int(rows), int(tile)) for rows, tile in choices["dense_tiles"])
    try:
        return Table(**choices)
    except TypeError as unknown:
        raise ValueError(f"{path}: {unknown}; run the bench of this version") from unknown


def name_of(told: str) -> str:
    """What a table is called in words: its file, unless it was given whole."""
    return "the recipe's table" if told.startswith("{") else told


def splits_for(table: Table, gpu: Gpu, tiles: int, k: int, rows: int, columns: int) -> int:
    """Cuts of K for ``tiles`` CTAs per split and ``rows`` x ``columns`` sums; 0: no cut, finished in the GEMM."""
    return _cheapest_splits(table, gpu, tiles, 1, k, rows, columns)[1]


def _cheapest_splits(
    table: Table, gpu: Gpu, tiles: int, row_tiles: int, k: int, rows: int, columns: int
) -> tuple[float, int]:
    """(us, splits) of the fastest number of cuts. Every row tile decodes the weights anew.

    Time = work x imbalance over the SMs + what splits cost. The SM with most CTAs decides: 68 tiles on 132 SMs take 7
    splits (476 CTAs, at most 4 on an SM) and not 8 (544, at most 5), as measured: 45.4 and 47.9 us.
    """
    work = k * columns * (row_tiles / table.weights_per_us + 2 * rows / table.flops_per_us)
    per_split = table.us_per_split + tiles / gpu.sms * table.us_per_cta + 2 * 4 * rows * columns / table.bytes_per_us

    def cost(splits: int) -> float:
        share = tiles * max(1, splits) / gpu.sms
        most = -(-tiles * max(1, splits) // gpu.sms)
        return work * most / share * (table.alone if most == 1 else 1.0) + splits * per_split

    return min((cost(splits), splits) for splits in range(min(64, max(1, k // BLOCK_K // table.stages_per_split)) + 1))


@functools.lru_cache(1 << 14)  # asked at every call of a layer; a prefill's row counts repeat
def dense_plan(table: Table, gpu: Gpu, rows: int, k: int, widths: tuple[int, ...]) -> DensePlan:
    """The plan of a fused product of ``rows`` x ``k`` with matrices of ``widths`` columns side by side.

    Where an SM holds one CTA (wide), a few more row tiles, each shorter, can fill the last wave: 1,024 rows x 17,408
    columns are 544 tiles of 128 rows, on 132 SMs five waves for 4.1 waves' work; 612 tiles of 114 rows took 7 % less in
    the emulation of bench K9. Two CTAs of an SM (narrow) share what is left over, and more tiles only decode more.
    """
    tile = next(tile for most, tile in table.dense_tiles if rows <= most)
    column_tiles = sum(-(-width // TILE_COLUMNS[tile]) for width in widths)
    least = max(1, -(-rows // TILE_ROWS[tile]))
    most_tiles = least + least // 2 if tile == WIDE else least

    def cost(row_tiles: int) -> tuple[float, int, int]:
        us, splits = _cheapest_splits(table, gpu, row_tiles * column_tiles, row_tiles, k, rows, sum(widths))
        return us, row_tiles, splits

    _, row_tiles, splits = min(map(cost, range(least, most_tiles + 1)))
    return DensePlan(tile, row_tiles, splits)


def moe_plan(
    table: Table, gpu: Gpu, tokens: int, topk: int, experts: int, hidden: int, inter: int, *, shared_suh: bool
) -> MoePlan:
    """The plan of a MoE layer; ``inter`` is one expert's intermediate width on this rank."""
    slots = tokens * topk
    half = table.moe_half_rows
    if tokens <= table.moe_decode_tokens:
        busy = min(slots, experts)  # experts that have rows, at most
        launch: tuple[int, ...] = (THIN, 1, 32) if tokens <= 32 else (THIN, 1, 32, HALF, 33, 64)
        # One row for each busy expert is also what is written. Sums through the workspace even without a cut: finishing
        # in kernels of their own takes a few microseconds less than in the GEMM, whose CTAs are few here.
        gate_up = splits_for(table, gpu, busy * (inter // 128), hidden, 1, busy * 2 * inter)
        down = splits_for(table, gpu, busy * -(-hidden // 256), inter, 1, busy * hidden)
        plan = MoePlan(min(64, -(-tokens // 16) * 16), max(2, gate_up), max(1, down), launch, launch)
    else:
        # Short segments first: the other order is 4 % slower at 2,048 tokens and 8 % at 7,168 with skewed routing.
        gate_up_launch = (HALF, 1, half, WIDE, half + 1, 128)
        down_launch = (HALF, 1, half, table.down_tile, half + 1, 128)
        plan = MoePlan(128, 0, 0, gate_up_launch, down_launch)
    return plan if shared_suh else replace(plan, splits_gate_up=max(1, plan.splits_gate_up))
