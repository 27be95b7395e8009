"""Memory admission: what a rank takes, by hand-made sums, and what fits when it does not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from spark_nodes import Spark, node_facts, place

from exl3kit import admission, checks, deployment, doctor, reach, recipes, weights
from exl3kit.admission import GIB, MIB, RankPlan, Room, Sizes
from exl3kit.errors import ExitCode, KitError
from exl3kit.recipe import Recipe

RECIPE = """recipe: 1
name: glm
model: {path: %s, served_name: glm}
image: {base: "vllm/vllm-openai:v0.33.0", vllm: 0.33.0, arch: ["12.1"], rates: [4], codebooks: [mcg]}
parallel: {nodes: 2, tensor: 2}
fabric: {require: rdma}
serve: {max_model_len: 131072, max_num_batched_tokens: 2048, max_num_seqs: 4, gpu_memory_utilization: 0.85}
"""
SIZES = Sizes(
    cut=160 * GIB, whole=2 * GIB, trellis=150 * GIB, trellis_weights=300 << 30, largest_in=4096, largest_out=65536
)
DENSE: dict[str, Any] = {
    "num_hidden_layers": 40, "hidden_size": 4096, "intermediate_size": 12288, "vocab_size": 150_000,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
EXPERTS = DENSE | {"moe_intermediate_size": 2048, "num_experts": 128, "num_experts_per_tok": 8}
MODEL = Path(__file__).resolve().parents[2] / "models" / "demo-dense"


@dataclass(frozen=True)
class Named:
    """A node of which only the name is asked."""

    name: str


def recipe(folder: Path, *sets: str) -> Recipe:
    (folder / "glm.yaml").write_text(RECIPE % MODEL)
    return recipes.load(str(folder / "glm.yaml"), sets)


def test_weights_are_cut_over_tensor_ranks_and_stages_and_decoded_without_kernels() -> None:
    assert admission.weight_bytes(SIZES, 2, 1, decoded=False) == 82 * GIB
    assert admission.weight_bytes(SIZES, 2, 2, decoded=False) == 41 * GIB
    assert admission.weight_bytes(SIZES, 1, 1, decoded=True) == (10 + 600 + 2) * GIB


@pytest.mark.parametrize(
    ("config", "sets", "token", "fixed"),
    [
        (DENSE, (), 40 * 2 * 4 * 128 * 2, 0),
        (DENSE, ("serve.kv_cache_dtype=fp8",), 40 * 2 * 4 * 128, 0),
        (DENSE | {"num_key_value_heads": 1}, (), 40 * 2 * 1 * 128 * 2, 0),  # fewer heads than ranks: each has one
        ({"text_config": DENSE}, (), 40 * 2 * 4 * 128 * 2, 0),
        (DENSE | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}, (), 40 * 576 * 2, 0),  # MLA: whole on each rank
        (
            DENSE | {"layer_types": ["full_attention"] * 10 + ["sliding_attention"] * 30, "sliding_window": 1024},
            (), 10 * 2048, 30 * 1024 * 2048,
        ),
        (
            DENSE | {"linear_attn_config": {"kda_layers": list(range(30)), "num_heads": 32, "head_dim": 128}},
            (), 10 * 2048, 30 * 4 * 32 * 128 * 128 // 2,
        ),
    ],
)  # fmt: skip
def test_kv_cache_of_each_kind_of_layer(
    tmp_path: Path, config: dict[str, Any], sets: tuple[str, ...], token: int, fixed: int
) -> None:
    assert admission.kv_bytes(recipe(tmp_path, *sets), config) == (token, fixed)


def test_case_22_scratch_and_activation_grow_with_mnbt_and_are_part_of_the_plan(tmp_path: Path) -> None:
    """Given four times the MNBT, then the experts' scratch and the activation are as much larger, and shown."""
    sizes = replace(SIZES, largest_out=2048)
    small = admission.rank_plan(recipe(tmp_path), sizes, EXPERTS)
    large = admission.rank_plan(recipe(tmp_path, "serve.max_num_batched_tokens=8192"), sizes, EXPERTS)
    assert large.scratch == 8192 * 4096 * 2 + 8192 * 8 * ((1024 + 4096) * 2 + 20)
    assert small.scratch == 1024 * 8 * (6 * 4096 + 10 * 1024) + 2048 * 8 * 20  # each row apart takes more here
    assert large.activation > 3.9 * small.activation
    assert large.fixed - small.fixed == large.scratch - small.scratch + large.activation - small.activation
    assert all(word in admission.describe(small) for word in ("weights", "KV", "scratch", "activation", "graphs"))


def test_a_dense_model_keeps_room_for_its_largest_decoded_matrix(tmp_path: Path) -> None:
    """Given 65,536 outputs on two ranks, then each has room for 32,768 of them, and for 1,024 rows and their sums."""
    weight, rows, sums = 2 * 4096 * 32768, 1024 * (2 * 4096 + 4), 4 * 1024 * 32768
    assert admission.rank_plan(recipe(tmp_path), SIZES, DENSE).scratch == weight + rows + sums
    never = recipe(tmp_path, "exl3.prefill_reconstruct_m=0")
    assert admission.rank_plan(never, SIZES, DENSE).scratch == 0


def test_the_demos_own_headers_give_its_sizes() -> None:
    demo = recipes.load("demo")
    found = weights.survey(demo)
    plan = admission.rank_plan(demo, Sizes.of(found.sizes), found.config)
    assert found.sizes["trellis"] == found.trellis_bytes == 655_360
    assert plan.weights == 2 * found.sizes["trellis_weights"] + 938_496 - 655_360 + 2_620
    assert plan.kv == 256 * 2 * 2 * 2 * 128 * 2  # tokens, layers, K and V, heads, width, bytes


PLAN = RankPlan(weights=80 * GIB, kv=10 * GIB, kv_token=80 * 1024, activation=1 * GIB, scratch=1 * GIB, graphs=1 * GIB,
                context=1 * GIB, max_model_len=131072)  # fmt: skip


def test_case_19_a_share_that_is_not_free_is_refused_with_the_one_that_fits(tmp_path: Path) -> None:
    """Given 110 of 120 GiB free and 0.95 asked for, then 0.88 is proposed, and 0.88 is admitted."""
    room = Room("spark1", 120 * GIB, 110 * GIB, admission.RESERVE_UNIFIED, 1)
    refused = admission.admit(recipe(tmp_path, "serve.gpu_memory_utilization=0.95"), PLAN, room)
    assert not refused.fits and refused.utilization == 0.88
    assert refused.fix == "`--set serve.gpu_memory_utilization=0.88`"
    assert "0.95 is 114.0 GiB per rank, and 106.0 GiB are free for it on spark1" in refused.says
    assert admission.admit(recipe(tmp_path, "serve.gpu_memory_utilization=0.88"), PLAN, room).fits
    assert not admission.admit(recipe(tmp_path, "serve.gpu_memory_utilization=0.89"), PLAN, room).fits


def test_case_19_a_length_that_does_not_fit_is_refused_with_the_longest_that_does(tmp_path: Path) -> None:
    room = Room("spark1", 120 * GIB, 94 * GIB, admission.RESERVE_UNIFIED, 1)
    refused = admission.admit(recipe(tmp_path), PLAN, room)
    assert not refused.fits and refused.max_model_len is not None
    assert f"max_model_len={refused.max_model_len}`" in str(refused.fix)
    longest = replace(PLAN, kv=refused.max_model_len * PLAN.kv_token, max_model_len=refused.max_model_len)
    fitting = recipe(tmp_path, f"serve.gpu_memory_utilization={refused.utilization}")
    assert admission.admit(fitting, longest, room).fits
    longer = replace(longest, kv=(refused.max_model_len + 1024) * PLAN.kv_token)
    assert not admission.admit(fitting, longer, room).fits


def test_case_19_a_model_that_fits_at_no_length_is_refused_without_a_false_promise(tmp_path: Path) -> None:
    room = Room("spark1", 120 * GIB, 60 * GIB, admission.RESERVE_UNIFIED, 1)
    refused = admission.admit(recipe(tmp_path), PLAN, room)
    assert (refused.fits, refused.max_model_len) == (False, None)
    assert "more ranks" in str(refused.fix)


def test_case_22_a_scratch_that_is_far_too_large_is_named_as_the_cause(tmp_path: Path) -> None:
    fat = replace(PLAN, weights=10 * GIB, scratch=120 * GIB)
    refused = admission.admit(recipe(tmp_path), fat, Room("a", 120 * GIB, 110 * GIB, 4 * GIB, 1))
    assert not refused.fits and "max_num_batched_tokens" in str(refused.fix)


def test_a_kv_cache_of_named_size_must_hold_one_request_and_fit(tmp_path: Path) -> None:
    room = Room("a", 120 * GIB, 110 * GIB, 4 * GIB, 1)
    named = "serve={max_model_len: 131072, kv_cache_memory: %s}"

    def verdict(size: str) -> admission.Verdict:
        text = (RECIPE % MODEL).replace("gpu_memory_utilization: 0.85", f"kv_cache_memory: {size}")
        (tmp_path / "kv.yaml").write_text(text)
        return admission.admit(recipes.load(str(tmp_path / "kv.yaml")), PLAN, room)

    assert verdict("12GiB").fits, named
    assert "one request of 131072 tokens" in verdict("8GiB").says
    assert verdict("40GiB").fix == f"`--set serve.kv_cache_memory={22 * GIB // MIB}MiB`"


def test_ranks_that_share_a_machine_share_its_memory(tmp_path: Path) -> None:
    asked = recipe(tmp_path, "serve.gpu_memory_utilization=0.8")
    room = Room("local", 240 * GIB, 230 * GIB, 4 * GIB, 1)
    assert admission.admit(asked, PLAN, room).fits
    assert not admission.admit(asked, PLAN, replace(room, ranks=2)).fits


def test_a_gpu_with_memory_of_its_own_is_judged_by_that() -> None:
    from exl3kit.gpus import Gpu

    probe = place(Spark()).probe
    own = replace(probe, gpus=(Gpu("RTX PRO 6000", "12.0", "580", 96 * GIB, 90 * GIB),))
    assert admission.room_of("a", own, 2, on_cpu=False) == Room("a", 96 * GIB, 90 * GIB, 0, 1)
    shared = admission.room_of("a", probe, 1, on_cpu=False)
    assert (shared.total, shared.reserve) == (127_601_452 * 1024, admission.RESERVE_UNIFIED)


@pytest.mark.parametrize("force", [False, True])
def test_case_19_up_refuses_before_anything_is_changed_and_force_says_what_it_risks(
    tmp_path: Path, force: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a Spark of which half is taken, then preflight refuses with the number that fits; --force only warns."""
    asked = recipe(tmp_path)
    facts = {f"spark{n}": node_facts(Spark(number=n, available_kib=60_000_000)) for n in (1, 2)}
    monkeypatch.setattr(reach, "measure", lambda *nodes, **how: [])
    monkeypatch.setattr(doctor, "place", lambda node, found: checks.Place(node.name, found.address, found.probe))
    nodes = [Named(name) for name in facts]
    found = weights.survey(asked)
    planned = deployment.plan(asked, "0" * 64, list(facts), facts, dict.fromkeys(facts, "/w"), "g")
    if force:
        told = doctor.preflight(asked, found, nodes, facts, planned, force=True)  # type: ignore[arg-type]
        assert sum("may lock up" in one for one in told) == 2
        return
    with pytest.raises(KitError) as refused:
        doctor.preflight(asked, found, nodes, facts, planned)  # type: ignore[arg-type]
    assert refused.value.code == ExitCode.PREFLIGHT
    assert "gpu_memory_utilization 0.85 is 103.4 GiB" in refused.value.what
    assert "`--set serve.gpu_memory_utilization=0.43`" in str(refused.value.next_step)


def test_case_20_a_second_start_waits_for_memory_and_then_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given memory that comes back at the third look, then the start waits for it; given none, it is refused."""
    from exl3kit import facts as facts_module

    asked = recipe(tmp_path)
    sparks = [Spark(available_kib=kib) for kib in (30_000_000, 60_000_000, 118_000_000)]
    looks = iter([place(one).probe for one in sparks] + [place(sparks[0]).probe] * 99)
    monkeypatch.setattr(facts_module, "look", lambda node: next(looks))
    monkeypatch.setattr(doctor, "LOOK_SECONDS", 0.01)
    facts = {"spark1": node_facts(Spark())}
    found = weights.survey(asked)
    planned = deployment.plan(asked, "0" * 64, ["spark1", "spark1"], facts, {"spark1": "/w"}, "g")
    one_rank = replace(planned, ranks=planned.ranks[:1])

    doctor.await_memory(asked, found, [Named("spark1")], facts, one_rank, patience=5)  # type: ignore[list-item]
    with pytest.raises(KitError, match="after what stood there ended") as refused:
        doctor.await_memory(asked, found, [Named("spark1")], facts, one_rank, patience=0.05)  # type: ignore[list-item]
    assert refused.value.code == ExitCode.PREFLIGHT
