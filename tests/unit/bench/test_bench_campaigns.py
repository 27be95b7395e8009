"""Campaigns against servers of known speed: real processes, HTTP and metrics; the pace is waited, not computed."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from arena import campaign

from exl3kit.bench import ab, records
from exl3kit.bench.ab import Question
from exl3kit.bench.comparison import EFFECT, INVALID, Comparison

QUESTION = Question(rungs=(1000,), count=5, boots=7, max_cv=1.0)
PACE = {"rate": 1000.0, "boot_spread": 0.01}  # 1 s a prompt: what a busy machine adds is small against it
DELAYED = {**PACE, "delay": 1.1}
CAMPAIGNS = 20


def test_a_planted_delay_is_found_and_the_file_says_it_again(tmp_path: Path) -> None:
    # given a B that waits half as long again, when both are booted in turn, then the effect is claimed
    question = Question(rungs=(64,), count=5, boots=3, max_cv=1.0)
    found = campaign(tmp_path / "c", question, {"rate": 1000.0}, {"rate": 1000.0, "delay": 2.0}, itertools.count())
    assert found.effect is not None and 0.4 < found.effect.ratio < 0.6
    # and whoever reads the observations later comes to the same
    again = ab.read_again(records.read(tmp_path / "c"))
    assert (again.verdict, again.effect) == (found.verdict, found.effect)


def campaigns(folder: Path, a: dict[str, float], b: dict[str, float]) -> list[Comparison]:
    """Twenty live campaigns, four at a time: their servers wait, and hardly compute."""

    def one(number: int) -> Comparison:
        return campaign(folder / str(number), QUESTION, a, b, itertools.count(1000 * number))

    with ThreadPoolExecutor(max_workers=4) as pool:
        found = list(pool.map(one, range(CAMPAIGNS)))
    print([(one.verdict, one.effect and round(one.effect.ratio, 3)) for one in found])
    return found


@pytest.mark.full
def test_twenty_live_campaigns_without_an_effect_claim_three_at_most(tmp_path: Path) -> None:
    verdicts = [found.verdict for found in campaigns(tmp_path, PACE, PACE)]
    assert verdicts.count(INVALID) == 0
    assert verdicts.count(EFFECT) <= 3


@pytest.mark.full
def test_twenty_live_campaigns_find_a_delay_of_ten_percent(tmp_path: Path) -> None:
    found = campaigns(tmp_path, PACE, DELAYED)
    claimed = [one for one in found if one.verdict == EFFECT and one.effect is not None and one.effect.ratio < 1]
    assert len(claimed) >= 19
