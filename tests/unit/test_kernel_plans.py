"""The host-side tile table: what it chooses, that kernels accept every choice, that another GPU's file is refused."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "overlay"))

from exl3_vllm import plans
from exl3_vllm.plans import H200, HALF, NARROW, SM12X, THIN, TILE_ROWS, WIDE, Gpu

HOPPER, SPARK, RTX = Gpu((9, 0), 132), Gpu((12, 1), 48), Gpu((12, 0), 188)
GPUS = ((HOPPER, H200), (SPARK, SM12X), (RTX, SM12X))
LAYERS = ((5120, (17408,)), (17408, (5120,)), (4096, (4096, 1024, 1024)), (128, (128,)))


def test_each_architecture_has_its_own_table() -> None:
    assert [plans.table_for(gpu) for gpu, _ in GPUS] == [table for _, table in GPUS]


@pytest.mark.parametrize("gpu, table", GPUS)
@pytest.mark.parametrize("k, widths", LAYERS)
def test_every_dense_plan_is_one_the_kernel_accepts(
    gpu: Gpu, table: plans.Table, k: int, widths: tuple[int, ...]
) -> None:
    for rows in (*range(1, 130), 200, 512, 4096, 100_000):
        plan = plans.dense_plan(table, gpu, rows, k, widths)
        assert plan.row_tiles * TILE_ROWS[plan.tile] >= rows
        assert 0 <= plan.splits <= min(64, k // 64)


@pytest.mark.parametrize("gpu, table", GPUS)
@pytest.mark.parametrize("experts, hidden, inter", [(288, 4096, 1024), (4, 256, 256), (512, 2048, 128)])
def test_every_segment_of_a_moe_plan_has_exactly_one_launch(
    gpu: Gpu, table: plans.Table, experts: int, hidden: int, inter: int
) -> None:
    for tokens in (*range(1, 300), 2048, 7168):
        for shared in (True, False):
            plan = plans.moe_plan(table, gpu, tokens, 2, experts, hidden, inter, shared_suh=shared)
            longest = min(plan.segment_rows, -(-tokens // 16) * 16)
            for launch in (plan.launch_gate_up, plan.launch_down):
                ranges = [launch[i : i + 3] for i in range(0, len(launch), 3)]
                assert all(most <= TILE_ROWS[tile] for tile, _, most in ranges)
                for rows in range(1, longest + 1):
                    assert sum(least <= rows <= most for _, least, most in ranges) == 1, (tokens, rows)
            assert NARROW not in plan.launch_gate_up[::3]  # gate and up need 256 columns
            assert shared or plan.splits_gate_up >= 1
            assert plan.splits_gate_up <= hidden // 64 and plan.splits_down <= inter // 64


def test_measured_choices_on_the_h200() -> None:
    """Given the geometries of the bench, when the table is asked, then it names what measured best."""
    chosen = {rows: plans.dense_plan(H200, HOPPER, rows, 17408, (5120,)) for rows in (1, 16, 32, 64)}
    assert [(plan.tile, plan.splits) for plan in chosen.values()] == [(THIN, 13), (THIN, 13), (NARROW, 6), (NARROW, 6)]
    assert plans.dense_plan(H200, HOPPER, 1, 5120, (17408,)).splits in (5, 7)
    plan = plans.moe_plan(H200, HOPPER, 2048, 8, 288, 4096, 1024, shared_suh=True)
    assert plan.launch_gate_up == (HALF, 1, 64, WIDE, 65, 128) and plan.launch_down == (HALF, 1, 64, NARROW, 65, 128)


def test_row_tiles_fill_the_last_wave_where_an_sm_holds_one_cta() -> None:
    assert plans.dense_plan(SM12X, HOPPER, 1024, 5120, (17408,)) == plans.DensePlan(WIDE, 9, 0)  # 1,257 us, 8: 1,356
    assert plans.dense_plan(SM12X, HOPPER, 4096, 5120, (17408,)) == plans.DensePlan(WIDE, 33, 0)
    assert plans.dense_plan(H200, HOPPER, 1024, 5120, (17408,)) == plans.DensePlan(NARROW, 8, 0)  # 588 us, 9: 610


def test_a_grid_that_fills_the_gpu_is_not_cut() -> None:
    assert plans.splits_for(H200, HOPPER, tiles=132 * 40, k=4096, rows=128, columns=132 * 40 * 128) == 0


def test_a_written_table_is_read_back_on_its_own_gpu_only(tmp_path: Path) -> None:
    table, path = replace(SM12X, fused_rows=777), tmp_path / "table.json"
    path.write_text(json.dumps({"capability": SPARK.capability, "sms": SPARK.sms, "table": asdict(table)}))
    assert plans.load_table(str(path), SPARK) == plans.load_table(path.read_text(), SPARK) == table
    for told, called in ((str(path), "table.json"), (path.read_text(), "the recipe's table")):
        with pytest.raises(ValueError, match=f"{called}: measured on .* run the bench here"):
            plans.load_table(told, RTX)
    path.write_text(json.dumps({"capability": [12, 1], "sms": 48, "table": asdict(table) | {"speed": 9}}))
    with pytest.raises(ValueError, match="speed"):
        plans.load_table(str(path), SPARK)
