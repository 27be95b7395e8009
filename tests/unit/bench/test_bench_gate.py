"""The cold gate on recorded observations of a real vLLM, and the figures taken from what passes it."""

from __future__ import annotations

import copy

import pytest

from exl3kit.bench import engagement, gate, selftest, summaries
from exl3kit.bench.metrics import Missing, Scrape, Window

CASES = [*selftest.of_recorded(), *selftest.of_campaigns()]


@pytest.mark.parametrize("case", CASES, ids=[case.name.replace(" ", "-") for case in CASES])
def test_each_case_is_judged_as_it_must_be(case: selftest.Case) -> None:
    assert case.held, case


def test_a_gate_that_lets_everything_pass_fails_the_selftest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "judge", lambda observation: gate.Verdict())
    error = selftest.refusal([*selftest.of_recorded()])
    assert error is not None and error.code == 8


def test_a_gate_that_refuses_everything_fails_the_selftest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "judge", lambda observation: gate.Verdict(["because"]))
    error = selftest.refusal([*selftest.of_recorded()])
    assert error is not None and error.code == 8


def test_throughput_is_what_was_computed_over_the_time_to_the_first_token() -> None:
    row = selftest.recorded()["cold"]
    verdict = gate.judge(row)
    request = row["requests"][0]
    assert verdict.computed == request["usage"]["prompt_tokens"] == 255
    assert verdict.ttft == pytest.approx(request["times"][0] - request["sent"])
    assert verdict.prefill == pytest.approx(255 / verdict.ttft)
    assert verdict.decode is None  # one token: there is no decode to speak of


def test_decode_counts_from_the_first_token_on_and_of_several_streams_all_of_it() -> None:
    rows = selftest.recorded()
    one, many = gate.judge(rows["decode"]), gate.judge(rows["streams"])
    times = rows["decode"]["requests"][0]["times"]
    assert one.decode == pytest.approx((one.generated - 1) / (times[-1] - times[0]))
    last = max(request["times"][-1] for request in rows["streams"]["requests"])
    first = min(request["sent"] for request in rows["streams"]["requests"])
    assert many.generated == 4 * rows["streams"]["step"]["max_tokens"]
    assert many.decode == pytest.approx(many.generated / (last - first))


def test_acceptance_is_tokens_per_draft_step() -> None:
    row = copy.deepcopy(selftest.recorded()["decode"])
    for when, drafts, accepted in (("before", 10, 20), ("after", 110, 240)):
        row[when] += f'vllm:spec_decode_num_drafts_total{{engine="0"}} {drafts}\n'
        row[when] += f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}\n'
    assert gate.judge(row).acceptance == pytest.approx(1 + 220 / 100)


def test_rows_leave_warm_up_and_planted_faults_out() -> None:
    rows = selftest.recorded()
    found = summaries.rows(summaries.judged([rows["warm-up"], *[rows["cold"]] * 5, rows["hit"]]))
    assert [(row.name, row.count, row.cv) for row in found] == [("255", 5, 0.0)]


@pytest.mark.parametrize("config", ['enable_prefix_caching="False",block_size="128"', 'block_size="512"'])
def test_a_server_that_cannot_hit_its_cache_needs_no_planted_hit(config: str) -> None:
    row = copy.deepcopy(selftest.recorded()["cold"])
    row["step"]["planted"] = "repetition"
    row["before"] = "".join(line + "\n" for line in row["before"].splitlines() if "cache_config" not in line)
    row["before"] += f"vllm:cache_config_info{{{config}}} 1.0\n"
    assert summaries.unproven(summaries.judged([row])) == []


def test_samples_of_several_engines_are_added() -> None:
    text = 'vllm:x_total{engine="0"} 2\nvllm:x_total{engine="1"} 3\n'
    assert Scrape(text).total("vllm:x_total") == 5
    assert Window(text, text.replace("3", "7")).delta("vllm:x_total") == 4
    with pytest.raises(Missing, match="backwards"):
        Window(text, text.replace("3", "1")).delta("vllm:x_total")


BEFORE = [{"rank": 0, "pid": 1, "generation": "g", "effective_tier": "sorted", "rows_handled": {"thin": 5}}]


@pytest.mark.parametrize(
    ("after", "word"),
    [
        ({"rows_handled": {"thin": 9, "sorted": 40}}, None),
        ({"rows_handled": {"thin": 9}}, "no row on the tier sorted"),
        ({"rows_handled": {"thin": 9, "sorted": 40, "legacy": 2}}, "2 rows on the tier legacy"),
        ({"rows_handled": {"sorted": 40}, "effective_tier": "legacy"}, "runs the tier legacy"),
        ({"rows_handled": {"sorted": 40}, "pid": 2}, "started anew"),
    ],
)
def test_a_claimed_tier_must_have_done_the_rows(after: dict[str, object], word: str | None) -> None:
    found = engagement.faults(BEFORE, [{**BEFORE[0], **after}], "sorted")
    assert found == [] if word is None else any(word in fault for fault in found)


def test_a_claim_without_receipts_is_no_claim_and_auto_claims_nothing() -> None:
    assert engagement.faults([], [], "sorted")
    assert engagement.faults(BEFORE, [], "sorted")
    assert engagement.faults([], BEFORE, "sorted")
    assert engagement.faults([], [], "auto") == []
