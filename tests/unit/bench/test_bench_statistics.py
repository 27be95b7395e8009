"""Statistics of campaigns: properties, known values, and the rate of false claims on boots without an effect."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exl3kit.bench import differences, plans, statistics, targets
from exl3kit.bench.comparison import EFFECT, INVALID, NONE, Boot, compare
from exl3kit.errors import KitError

rates = st.floats(min_value=1.0, max_value=1e6)
arms = st.lists(rates, min_size=2, max_size=6)


@pytest.mark.parametrize(
    ("p", "freedom", "value"),  # from the usual printed table
    [
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.975, 3, 3.182),
        (0.95, 5, 2.015),
        (0.995, 10, 3.169),
        (0.975, 120, 1.980),
    ],
)
def test_quantiles_are_those_of_the_table(p: float, freedom: int, value: float) -> None:
    assert statistics.student_quantile(p, freedom) == pytest.approx(value, abs=6e-4)


@given(st.floats(0.5, 0.9999), st.integers(1, 60))
@settings(deadline=None)
def test_the_quantile_is_where_the_probability_is_reached(p: float, freedom: int) -> None:
    assert statistics.student_below(statistics.student_quantile(p, freedom), freedom) == pytest.approx(p, abs=1e-9)


@given(arms, arms)
@settings(deadline=None)
def test_an_effect_turns_round_with_the_arms(a: list[float], b: list[float]) -> None:
    there, back = statistics.effect(a, b), statistics.effect(b, a)
    assert there.ratio == pytest.approx(1 / back.ratio)
    assert there.low == pytest.approx(1 / back.high)
    assert there.low <= there.ratio <= there.high


@given(arms, arms, st.floats(0.01, 100))
@settings(deadline=None)
def test_units_do_not_matter(a: list[float], b: list[float], unit: float) -> None:
    plain, scaled = statistics.effect(a, b), statistics.effect([x * unit for x in a], [x * unit for x in b])
    assert scaled.ratio == pytest.approx(plain.ratio)
    assert scaled.high == pytest.approx(plain.high)


@given(arms, arms)
@settings(deadline=None)
def test_a_stricter_level_gives_a_wider_interval(a: list[float], b: list[float]) -> None:
    loose, strict = statistics.effect(a, b, level=0.1), statistics.effect(a, b, level=0.01)
    assert strict.low <= loose.low and loose.high <= strict.high


@given(st.lists(rates, min_size=1, max_size=8), st.lists(rates, min_size=1, max_size=8))
@settings(deadline=None)
def test_separated_means_that_sorting_keeps_the_sides_apart(a: list[float], b: list[float]) -> None:
    apart = statistics.separated(a, b)
    assert apart == (max(a) < min(b) or max(b) < min(a)) and (not apart or not set(a) & set(b))


@pytest.mark.parametrize("bad", [([1.0], [1.0]), ([], [1.0, 2.0, 3.0]), ([1.0, math.nan], [1.0]), ([0.0, 1.0], [1.0])])
def test_what_is_no_comparison_is_refused(bad: tuple[list[float], list[float]]) -> None:
    with pytest.raises(ValueError):
        statistics.effect(*bad)


def boots(draw: random.Random, order: str, effect: float, boot_spread: float) -> list[Boot]:
    """Boots whose own speed is drawn anew for each, and with observations around it."""
    made = []
    for arm in order:
        speed = 1000 * draw.lognormvariate(0, boot_spread) * (effect if arm == "B" else 1)
        made.append(Boot(arm, {str(n): [speed * draw.lognormvariate(0, 0.02) for _ in range(5)] for n in (1, 2)}))
    return made


@pytest.mark.parametrize("order", ["ABA", "ABABA", "ABABABA"])
def test_false_claims_stay_within_the_level_however_many_observations_a_boot_has(order: str) -> None:
    # given boots that differ by 3% though nothing was changed, as boots do
    draw = random.Random(order)
    claims = sum(compare(boots(draw, order, 1.0, 0.03)).verdict == EFFECT for _ in range(1000))
    # then a claim is rare: the stated level of 1,000, give or take three standard deviations
    expected = 1000 * statistics.LEVEL
    assert claims <= expected + 3 * math.sqrt(expected)


def test_five_boots_find_ten_percent_where_boots_differ_by_one() -> None:
    draw = random.Random(7)
    assert sum(compare(boots(draw, "ABABA", 1 / 1.1, 0.01)).verdict == EFFECT for _ in range(300)) >= 285


def test_an_effect_smaller_than_the_drift_of_a_is_not_claimed() -> None:
    steady = [Boot("A", {"1": [100, 100]}), Boot("B", {"1": [130, 130]}), Boot("A", {"1": [100.5, 100.5]})]
    drifting = [Boot("A", {"1": [100, 100]}), Boot("B", {"1": [130, 130]}), Boot("A", {"1": [150, 150]})]
    assert compare(steady).verdict == EFFECT
    found = compare(drifting)
    assert found.verdict == NONE and "drifted" in found.why


@pytest.mark.parametrize("order", ["", "A", "AB", "AAA", "BAB", "ABAB"])
def test_boots_must_alternate_and_end_with_a(order: str) -> None:
    assert compare([Boot(arm, {"1": [1.0]}) for arm in order]).verdict == INVALID


def test_faults_make_a_campaign_invalid_whatever_its_figures_say() -> None:
    found = compare([Boot("A", {"1": [1.0]}), Boot("B", {"1": [9.0]}), Boot("A", {"1": [1.0]})], ["it hit the cache"])
    assert (found.verdict, found.why, found.effect) == (INVALID, "it hit the cache", None)


@given(
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 2)),
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 2)),
)
@settings(max_examples=50, deadline=None)
def test_differences_are_empty_exactly_for_equal_environments(a: dict[str, int], b: dict[str, int]) -> None:
    assert (differences.between({"x": [a]}, {"x": [b]}) == {}) == (a == b)


def test_one_more_argument_shifts_no_other() -> None:
    a = targets.options(["vllm", "serve", "/model", "--port", "1", "--enforce-eager", "--seed", "0"])
    b = targets.options(["vllm", "serve", "/model", "--port", "1", "--seed", "0"])
    assert differences.between(a, b) == {"--enforce-eager": (True, None)}


def test_rungs_are_what_the_model_takes() -> None:
    assert plans.ladder(70_000) == [8192, 16384, 32768, 65536]
    assert plans.ladder(256) == [63, 127, 255]
    assert plans.ladder(256, [200, 10, 200]) == [10, 200]
    with pytest.raises(KitError, match="300 tokens"):
        plans.ladder(256, [300])


def test_a_plan_warms_up_first_goes_in_rounds_and_ends_with_a_planted_hit() -> None:
    steps = plans.prefill([10, 20], 2, "s")
    assert [step["tokens"] for step in steps] == [10, 20, 10, 20, 10, 20, 20]
    assert [bool(step.get("warmup")) for step in steps] == [True, True] + [False] * 5
    assert steps[-1]["salt"] == steps[-2]["salt"] and steps[-1]["planted"]
    assert len({step["salt"] for step in steps}) == len(steps) - 1


def test_streams_that_would_only_queue_are_left_out() -> None:
    assert {step["kind"] for step in plans.streams(4096, 4, "s", (1, 4, 8))} == {"C1", "C4"}
    assert {step["kind"] for step in plans.streams(4096, None, "s", (1, 4, 8))} == {"C1", "C4", "C8"}
