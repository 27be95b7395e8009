"""What the GPU backend decides, without a GPU: memory reserved or refused, wide matrices, graphs not wanted."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import REPO
from exl3_vllm import arena, expert_loops, gpu, gpu_dense, kernels, plans
from exl3_vllm.arena import Arena, carve
from exl3_vllm.errors import LayoutError, SettingError, TierError
from exl3_vllm.format import Checkpoint
from exl3_vllm.gpu import Limits
from exl3_vllm.gpu_dense import Dispatch
from exl3_vllm.plans import Gpu
from exl3_vllm.tiers import Resolution
from safetensors import safe_open

sys.path += [str(REPO), str(REPO / "scripts" / "gpu_host")]

import accuracy
import arms
import geometries

import models as gpu_models
from exl3kit import admission

CPU = torch.device("cpu")
HOPPER, SPARK = Gpu((9, 0), 132), Gpu((12, 1), 48)


def test_the_arena_is_as_large_as_the_largest_wish_and_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    made = Arena()
    made.expect(1000, "small")
    made.expect(5000, "large")
    made.expect(2000, "middle")
    made.allocate(CPU)
    first, second = made.take(4000, "a layer", 3, CPU), made.take(5000, "a layer", 4, CPU)
    assert made.nbytes == 5000 and first.data_ptr() == second.data_ptr() and made.overflows == 0
    beyond = made.take(6000, "a layer", 5, CPU)
    assert beyond.data_ptr() != first.data_ptr() and made.overflows == 1 and made.nbytes == 5000


def test_a_capture_that_needs_more_than_is_prepared_is_refused_with_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    made = Arena()
    made.expect(1000, "exl3 linear 128 -> 128")
    made.allocate(CPU)
    with pytest.raises(LayoutError, match=r"exl3 linear 5120 -> 17408, 64 rows: needs 2000 bytes .* 1000 are prepared"):
        made.take(2000, "exl3 linear 5120 -> 17408", 64, CPU)


def test_pieces_of_the_arena_do_not_overlap_and_are_aligned() -> None:
    memory = torch.zeros(4096, dtype=torch.uint8)
    pieces = list(carve(memory, [((3, 5), torch.float16), ((7,), torch.float32), ((2, 2), torch.float16)]))
    for number, piece in enumerate(pieces):
        piece.fill_(number + 1)
    assert [piece.flatten()[0].item() for piece in pieces] == [1, 2, 3]
    assert all((piece.data_ptr() - memory.data_ptr()) % arena.ALIGNMENT == 0 for piece in pieces)


@pytest.mark.parametrize(
    ("columns", "wanted"),
    [(17408, [(0, 17408)]), (32768, [(0, 32768)]), (33024, [(0, 16512), (16512, 33024)])],
)
def test_matrices_up_to_the_bound_stay_whole(columns: int, wanted: list[tuple[int, int]]) -> None:
    assert list(gpu_dense.pieces(columns)) == wanted


def test_a_head_is_kept_in_no_more_parts_than_one_launch_takes() -> None:
    ranges = list(gpu_dense.pieces(248320))
    assert len(ranges) == gpu_dense.MAX_PARTS
    assert [begin for begin, _ in ranges[1:]] == [end for _, end in ranges[:-1]]
    assert ranges[0][0] == 0 and ranges[-1][1] == 248320 and all(end % 128 == 0 for _, end in ranges)


@pytest.mark.parametrize("gpu_found", [HOPPER, SPARK])
def test_zero_never_reconstructs_and_the_table_decides_by_itself(gpu_found: Gpu) -> None:
    table = plans.table_for(gpu_found)
    assert gpu_dense.with_threshold(table, gpu_dense.TABLE_DECIDES) is table
    assert gpu_dense.with_threshold(table, 0).fused_rows > 1 << 24
    assert gpu_dense.with_threshold(table, 128).fused_rows == 127


@pytest.mark.parametrize(("inputs", "outputs"), [(128, 128), (5120, 32768), (5120, 75_968), (2048, 248_320)])
@pytest.mark.parametrize("rows", [1, 2048, 8192])
def test_the_plan_counts_a_matrix_on_its_way_through_cublas_as_the_layer_does(
    inputs: int, outputs: int, rows: int
) -> None:
    blocks = -(-outputs // 128) * 128
    widest = max(end - begin for begin, end in gpu_dense.pieces(blocks))
    assert admission.written_out(inputs, outputs, rows) == pytest.approx(
        gpu_dense._reconstructed_bytes(rows, inputs, widest), abs=4 * arena.ALIGNMENT
    )


def test_sums_of_a_wide_product_stay_within_their_bound() -> None:
    for rows, columns in ((8192, 17408), (8192, 37984), (300, 5120)):
        chunk = gpu_dense.chunk_rows(rows, columns)
        assert chunk <= min(rows, gpu_dense.CHUNK_ROWS)
        assert 4 * chunk * columns <= gpu_dense.CHUNK_BYTES or chunk == 256


TABLE = {**asdict(plans.H200), "fused_rows": 777}


def test_dispatch_says_where_its_table_is_from(tmp_path: Path) -> None:
    choice = Dispatch()
    choice.choose(HOPPER, None)
    assert choice.source == "built in, measured on an H200"
    choice.choose(SPARK, None)
    assert choice.source == "built in, modelled"
    file = tmp_path / "table.json"
    file.write_text('{"capability": [9, 0], "sms": 78, "table": {}}')
    for told, called in ((str(file), r".*table\.json"), (file.read_text(), "the recipe's table")):
        with pytest.raises(SettingError, match=f"EXL3_KERNEL_TABLE, {called}: can not be used .*78 SMs"):
            choice.choose(HOPPER, told)
    choice.choose(HOPPER, json.dumps({"capability": HOPPER.capability, "sms": HOPPER.sms, "table": TABLE}))
    assert choice.source == 'measured here, "the recipe\'s table"' and choice.of(HOPPER).fused_rows == 777


def start(mode: str, sizes: list[int], eager: bool = False) -> Any:
    """What `Limits` reads of vLLM's configuration."""
    return types.SimpleNamespace(
        compilation_config=types.SimpleNamespace(
            cudagraph_mode=types.SimpleNamespace(name=mode), cudagraph_capture_sizes=sizes
        ),
        model_config=types.SimpleNamespace(enforce_eager=eager),
        scheduler_config=types.SimpleNamespace(max_num_batched_tokens=8192),
    )


def test_limits_of_a_start_count_no_graphs_where_none_are_captured() -> None:
    assert Limits.of(start("FULL_AND_PIECEWISE", [1, 512, 8])) == Limits(8192, 512, "FULL_AND_PIECEWISE")
    assert Limits.of(start("FULL_AND_PIECEWISE", [1, 512], eager=True)) == Limits(8192, 0, "NONE")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(kernels, "gpu_of", lambda device: HOPPER)
    monkeypatch.setattr(gpu, "DISPATCH", Dispatch())


def test_graph_decode_0_refuses_a_start_with_graphs_and_says_so(hopper: None) -> None:
    gpu.begin(True, Limits(8192, 512, "FULL_AND_PIECEWISE"))
    gpu.begin(False, Limits(8192, 0, "NONE"))
    with pytest.raises(SettingError, match=r"VLLM_EXL3_GRAPH_DECODE=0: .*FULL_DECODE_ONLY, up to 64.*--enforce-eager"):
        gpu.begin(False, Limits(8192, 64, "FULL_DECODE_ONLY"))


@pytest.mark.parametrize("tier", ["legacy", "sorted", "batched", "kernel"])
def test_a_tier_that_counts_on_the_host_takes_no_graphs_beyond_the_cap(tier: str) -> None:
    loading: Any = types.SimpleNamespace(packed_experts=[], limits=Limits(8192, 512, "FULL_AND_PIECEWISE"))
    with pytest.raises(TierError, match=f"tier {tier}: counts rows on the host above 128 .* up to 512"):
        gpu.require_runnable(Resolution(tier, tier, f"{tier}_ok"), 128, loading)
    loading.limits = Limits(8192, 128, "FULL_AND_PIECEWISE")
    gpu.require_runnable(Resolution(tier, tier, f"{tier}_ok"), 128, loading)


def test_one_launch_takes_any_graph_and_half_bits_take_no_kernel_tier() -> None:
    half: Any = types.SimpleNamespace(half_bits=[5, 8])
    loading: Any = types.SimpleNamespace(packed_experts=[half], limits=Limits(8192, 512, "FULL_AND_PIECEWISE"))
    gpu.require_runnable(Resolution("grouped", "grouped", "grouped_ok"), 128, loading)
    gpu.require_runnable(Resolution("grouped", "sorted", "shared_suh_absent"), 128, loading)
    with pytest.raises(TierError, match=r"tier kernel: takes whole bits .* has 2\.5"):
        gpu.require_runnable(Resolution("kernel", "kernel", "kernel_ok"), 128, loading)


def test_a_receipt_says_what_the_gpu_chose(hopper: None) -> None:
    layers = [types.SimpleNamespace(stacked=types.SimpleNamespace(suh=suh)) for suh in (torch.ones(1), None, None)]
    loading: Any = types.SimpleNamespace(packed_experts=layers, limits=Limits(8192, 0, "NONE"))
    gpu.begin(True, loading.limits)
    wanted = {"dense_table": "built in, measured on an H200", "graphs": "NONE", "one_suh_layers": 1}
    assert gpu.account(loading) == wanted


def test_fat_experts_are_found_and_sorted_alike() -> None:
    """Given routes to 6 experts, some of another rank (-1), then both ways give each expert the same rows."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.stack([torch.randperm(7, generator=generator)[:3] - 1 for _ in range(40)]).to(torch.int32)
    weights = torch.rand(ids.shape, generator=generator)
    fat = [1, 3, 4]
    for found, ordered in zip(
        expert_loops._indexed(ids, weights, fat), expert_loops._sorted(ids, weights, fat), strict=True
    ):
        assert found[0] == ordered[0]
        rows = [sorted(zip(tokens.tolist(), routed.tolist(), strict=True)) for _, tokens, routed in (found, ordered)]
        assert rows[0] == rows[1] and len(rows[0]) == int((ids == found[0]).sum())


def test_time_of_kernels_side_by_side_counts_once_and_each_has_its_kind() -> None:
    assert arms.covered([(0, 4), (1, 2), (3, 6), (10, 11)]) == 7
    names = {
        "void exl3::trellis_gemm<8, 1, (exl3::Tile)2>(exl3::GemmParams)": "exl3 products",
        "void exl3::reconstruct<10, 1, false>(unsigned char const*)": "exl3 reconstruct",
        "exl3::(anonymous namespace)::rotate(exl3::RotateParams)": "exl3 rotations, sums, routing",
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90": "attention",
        "nvjet_sm90_hss_256x128_64x4_1x2_h_bz_coopA_NNT": "cuBLAS",
        "fused_moe_kernel": "Triton fused_moe",
        "triton_red_fused_2": "other",
    }
    assert {name: arms.kind_of(name) for name in names} == names


def test_a_position_beyond_rounding_counts_as_an_outlier() -> None:
    spread = accuracy.spread([np.array([1e-4, 2e-4, 5e-2]), np.array([3e-4])])
    assert spread["outliers"] == 1 and spread["most_but_outliers"] == 3e-4 and spread["positions"] == 4
    wanted = np.array([[3.0, 4.0]], np.float32)
    assert accuracy.each(wanted * 1.01, wanted) == pytest.approx([0.01], rel=1e-4)


@pytest.mark.parametrize("suh", ["own", "pair", "layer"])
def test_checkpoints_of_a_gpu_host_are_read_by_the_plugin(
    suh: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given the host's GPU played by the CPU, then the files are whole, and exactly the wanted scales are equal."""
    for name in ("empty", "rand", "randn", "randint", "ones"):
        made = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, _made=made, **k: _made(*a, **{**k, "device": "cpu"}))
    small = {**geometries.MODELS["tiny-moe"].config, "num_hidden_layers": 1, "num_experts": 3}
    monkeypatch.setitem(geometries.MODELS, "small", geometries.Model(small, (8,), "mcg", suh))
    gpu_models.make("small", tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    assert len(checkpoint.matrices) == 4 + 3 * 3 + 1
    scales = {}
    for name, matrix in checkpoint.matrices.items():
        if name.endswith(("gate_proj", "up_proj")):
            entry = matrix.tensors["suh"]
            with safe_open(entry.file, framework="pt") as file:
                scales[name] = file.get_tensor(entry.name)
    different = {tuple(scale.tolist()) for scale in scales.values()}
    assert len(different) == {"own": 6, "pair": 3, "layer": 1}[suh]
