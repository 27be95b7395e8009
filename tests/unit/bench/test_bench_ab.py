"""What makes a whole campaign invalid: one bad row, one difference too many, one tier that did not run. Exit code 8."""

from __future__ import annotations

import contextlib
import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from arena import quiet

from exl3kit.bench import ab, metrics, paced, plans, records, selftest, targets
from exl3kit.bench import campaign as runs
from exl3kit.bench.ab import Question
from exl3kit.bench.comparison import INVALID, NONE
from exl3kit.bench.places import Here
from exl3kit.bench.records import Recorder
from exl3kit.bench.targets import Target
from exl3kit.errors import KitError

ROWS = selftest.recorded()
Record = tuple[dict[str, Any], list[dict[str, Any]]]


def receipt(rows: dict[str, int]) -> dict[str, Any]:
    return {"rank": 0, "pid": 7, "generation": "g", "effective_tier": "sorted", "rows_handled": rows}


def campaign() -> list[Record]:
    """A-B-A with five good rows and the planted hit in each boot, and B's tier engaged."""
    records = []
    for number, arm in enumerate("ABA"):
        boot = {"number": number, "arm": arm, "environment": {"kernel": "6", "ranks": [{"env": {"EXL3_TIER": arm}}]},
                "before": [receipt({"thin": 1})], "after": [receipt({"thin": 1, "sorted": 90})]}  # fmt: skip
        rows = [copy.deepcopy(ROWS["cold"]) for _ in range(5)]
        records.append((boot, [copy.deepcopy(ROWS["warm-up"]), *rows, copy.deepcopy(ROWS["hit"])]))
    return records


SETTINGS = {**Question(named=["ranks.0.env.EXL3_TIER"], tiers={"A": "auto", "B": "sorted"}).as_json()}


def test_good_rows_in_equal_boots_are_a_campaign_and_show_no_effect() -> None:
    found = ab.conclude(campaign(), SETTINGS)
    assert (found.verdict, found.faults) == (NONE, [])
    assert ab.refusal(found, "here", Path("r")) is None


def row_of(records: list[Record]) -> dict[str, Any]:
    return records[1][1][2]


def planted_hit(records: list[Record]) -> None:
    row_of(records).update({**ROWS["hit"], "step": row_of(records)["step"]})


def missing_field(records: list[Record]) -> None:
    row_of(records)["after"] = selftest.sample(row_of(records)["after"], metrics.PREEMPTIONS, None)


def nan(records: list[Record]) -> None:
    row_of(records)["after"] = selftest.sample(row_of(records)["after"], metrics.HITS, "NaN")


def foreign(records: list[Record]) -> None:
    row_of(records)["after"] = selftest.added(row_of(records)["after"], metrics.PROMPT, 9)


def warm_up(records: list[Record]) -> None:
    """The sample's numbers are those of a warm-up, which was told apart when it was made: it is missing as a sample."""
    row_of(records)["step"]["warmup"] = True


def no_rows(records: list[Record]) -> None:
    records[1][0]["after"] = [receipt({"thin": 99})]


def other_kernel(records: list[Record]) -> None:
    records[2][0]["environment"]["kernel"] = "7"


def arm_within_arm(records: list[Record]) -> None:
    records[2][0]["environment"]["ranks"][0]["env"]["EXL3_TIER"] = "C"


def unproven(records: list[Record]) -> None:
    records[0][1][-1] = {**copy.deepcopy(ROWS["cold"]), "step": {**ROWS["cold"]["step"], "planted": "repetition"}}


def slow_row(records: list[Record]) -> None:
    row_of(records)["requests"][0]["times"] = [9.0]


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (planted_hit, "came from the cache"),
        (missing_field, "num_preemptions_total is missing"),
        (nan, "is nan"),
        (foreign, "a foreign request"),
        (warm_up, "4 observations that count, and 5 are the least"),
        (no_rows, "handled no row on the tier sorted"),
        (other_kernel, "boot 2 (A) differs from the first in kernel: 6 → 7"),
        (arm_within_arm, "ranks.0.env.EXL3_TIER"),
        (unproven, "the gate proves nothing"),
        (slow_row, "varies by"),
    ],
)
def test_one_fault_makes_it_invalid_with_eight_and_the_reason(spoil: Callable[[list[Record]], None], word: str) -> None:
    records = campaign()
    spoil(records)
    found = ab.conclude(records, SETTINGS)
    error = ab.refusal(found, "here", Path("r"))
    assert found.verdict == INVALID and error is not None and error.code == 8
    assert any(word in fault for fault in found.faults), found.faults


@pytest.mark.parametrize("boots", [0, 1, 2, 4])
def test_a_number_of_boots_that_does_not_end_with_a_is_refused(boots: int) -> None:
    with pytest.raises(KitError, match="begin and end with A"):
        _ = Question(boots=boots).order


@pytest.mark.parametrize(
    ("pace", "code", "word"),
    [
        (paced.Pace(), 0, "receipts"),
        (paced.Pace(foreign=True), 8, "a foreign request"),
        (paced.Pace(lack=metrics.HITS), 8, "prefix_cache_hits_total is missing"),
        (paced.Pace(nan=metrics.BY_SOURCE), 8, "is nan"),
    ],
    ids=["honest", "foreign", "missing", "nan"],
)
def test_the_verb_ends_with_eight_and_says_why(pace: paced.Pace, code: int, word: str, tmp_path: Path) -> None:
    with paced.running(pace) as url:
        argv = ["bench", "prefill", "--url", url, "--rungs", "64", "--max-cv", "9", "--out", str(tmp_path / "r")]
        done = subprocess.run([sys.executable, "-m", "exl3kit.cli", *argv], capture_output=True, text=True, timeout=120)
    assert done.returncode == code and word in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    lines = [json.loads(line) for line in (tmp_path / "r" / "campaign.jsonl").read_text().splitlines()]
    assert [line["record"] for line in lines].count("observation") == 7  # kept for looking at, whatever they are worth


def test_a_server_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    argv = ["bench", "prefill", "--url", "http://127.0.0.1:9", "--out", str(tmp_path / "r")]
    done = subprocess.run([sys.executable, "-m", "exl3kit.cli", *argv], capture_output=True, text=True, timeout=120)
    assert done.returncode == 7 and "the server cannot be measured" in done.stderr and "Traceback" not in done.stderr


class Counting(Target):
    """A paced server that hands a new receipt out each time it is asked."""

    def receipts(self) -> list[dict[str, Any]]:
        self.asked = getattr(self, "asked", 0) + 1
        return [receipt({"sorted": self.asked})]


def test_a_boot_is_recorded_with_the_receipts_of_before_and_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given ranks whose receipts count on, when one boot is measured, then its record has both ends, and no third
    monkeypatch.setattr(targets, "RUNTIME_RECEIPTS", 0)
    with paced.running(paced.Pace()) as url, contextlib.closing(Recorder(tmp_path)) as recorder:
        recorder.begin("prefill", {})
        one = runs.run(Counting(Here(url)), plans.prefill([64], 1, "salt", 1), recorder, quiet(), max_cv=1)
    (boot,) = records.read(tmp_path).boots
    assert one.faults == [] and (boot["number"], boot["arm"]) == (0, "A")
    assert [boot[end][0]["rows_handled"]["sorted"] for end in ("before", "after")] == [1, 2]
