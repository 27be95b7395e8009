"""Parity's arithmetic: divergence, what a difference means next to the control, and what proves nothing."""

from __future__ import annotations

import math
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exl3kit.bench import observer, parity
from exl3kit.bench.parity import DIFFERENT, INVALID, SAME, Question, Scores

logits = st.lists(st.floats(-20, 20), min_size=4, max_size=4)


def logs(weights: list[float]) -> list[float]:
    total = math.log(sum(math.exp(weight) for weight in weights))
    return [weight - total for weight in weights]


@given(logits, logits)
@settings(deadline=None)
def test_divergence_is_the_textbook_sum_and_zero_only_for_equals(p: list[float], q: list[float]) -> None:
    a, b = logs(p), logs(q)
    expected = sum(math.exp(x) * (x - y) for x, y in zip(a, b, strict=True))
    assert parity.divergence(a, b) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert parity.divergence(a, a) == pytest.approx(0, abs=1e-12)


@given(logits, logits, st.floats(-5, 5))
@settings(deadline=None)
def test_a_common_factor_of_a_distribution_does_not_matter(p: list[float], q: list[float], more: float) -> None:
    a, b = logs(p), logs(q)
    assert parity.divergence([x + more for x in a], b) == pytest.approx(parity.divergence(a, b), abs=1e-9)


@pytest.mark.parametrize("bad", [[0.0], [], [math.nan, 0.0], [math.inf, 0.0]])
def test_what_is_no_distribution_is_refused(bad: list[float]) -> None:
    with pytest.raises((ValueError, OverflowError)):
        parity.divergence([0.0, 0.0], bad)


def scores(shift: float = 0.0, decode: int = 4) -> Scores:
    made = Scores()
    for kind, count in (("prefill", 8), ("decode", decode)):
        for place in range(count):
            made.distributions[kind, 0, place] = array("f", logs([1.0 + shift, 0.5, 0.0, place / 10]))
    made.likelihoods = dict.fromkeys(range(8), -1.0)
    return made


def test_the_same_is_said_beside_a_control_that_repeats_itself() -> None:
    found = parity.judge(scores(), scores(), scores(), Question())
    assert found.verdict == SAME
    assert [one.kind for one in found.control] == [one.kind for one in found.other] == ["prefill", "decode"]
    assert "bit for bit" in found.sentences[0]
    assert parity.refusal(found, "here") is None


def test_a_difference_is_told_with_its_size_and_ends_with_five() -> None:
    found = parity.judge(scores(), scores(), scores(0.1), Question())
    error = parity.refusal(found, "here")
    assert found.verdict == DIFFERENT and error is not None and error.code == 5
    assert "above the limit" in found.sentences[0] and "nats" in str(error)


def test_nothing_is_said_of_another_arm_when_the_control_differs_from_itself() -> None:
    found = parity.judge(scores(), scores(0.1), scores(), Question())
    error = parity.refusal(found, "here")
    assert found.verdict == INVALID and error is not None and error.code == 8
    assert "control" in found.sentences[0]


def test_prefill_alone_proves_no_parity_of_decode() -> None:
    found = parity.judge(scores(decode=0), scores(decode=0), scores(decode=0), Question())
    assert found.verdict == INVALID and "0 decode positions" in " ".join(found.sentences)


def test_an_arm_that_goes_its_own_way_in_decode_is_different() -> None:
    found = parity.judge(scores(), scores(), scores(decode=1), Question())
    assert found.verdict == DIFFERENT and "decode" in found.sentences[0]


def test_a_tier_that_did_no_rows_is_no_tier_to_be_the_same_as() -> None:
    found = parity.judge(scores(), scores(), scores(), Question(), ["boot 2 (B): rank 0 handled no row on the tier x"])
    error = parity.refusal(found, "here")
    assert found.verdict == INVALID and error is not None and error.code == 8 and "no row" in str(error)


def test_a_nan_proves_nothing() -> None:
    broken = scores()
    broken.distributions["prefill", 0, 3][1] = math.nan
    assert parity.judge(scores(), scores(), broken, Question()).verdict == INVALID


def test_a_distribution_without_some_tokens_is_refused() -> None:
    assert list(parity.unpacked(observer.packed({"0": -1.0, "1": -2.0}))) == [-1.0, -2.0]
    with pytest.raises(observer.Unanswered, match="not those of tokens"):
        observer.packed({"0": -1.0, "7": -2.0})


class Dictated:
    """A server whose greedy choice is the number of tokens before it, but for some places."""

    def __init__(self, other: dict[int, int]) -> None:
        self.other = other

    def ask(self, path: str, body: dict[str, object]) -> object:
        prompt, count = body["prompt"], body["max_tokens"]
        assert isinstance(prompt, list) and isinstance(count, int)
        said: list[int] = []
        for _ in range(count):
            place = len(prompt) + len(said)
            said.append(self.other.get(place, place))
        tops = [{f"token_id:{n}": -float(n + 1) for n in range(3)} for _ in said]
        return {"choices": [{"token_ids": said, "logprobs": {"top_logprobs": tops}}]}


def test_decode_follows_the_other_runs_tokens_and_leaves_out_what_prefill_computed() -> None:
    # given a server that says 99 where the other run said 5, after a prompt of 3 tokens
    server = Dictated({5: 99})
    rows = list(observer.followed(server, "m", [0, 1, 2], [3, 4, 5, 6, 7]))  # type: ignore[arg-type]
    # then step 0 and the first step after the detour, both computed by prefill, are left out, and no other
    assert [row["step"] for row in rows] == [1, 2, 4]
