"""A thousand campaigns drawn from recorded boots without an effect: false claims stay within the stated level.

`boots.json` holds the rates of every observation, by boot, that 20 live campaigns of A against A recorded on a crowded
machine (see `test_bench_campaigns`): the boots' medians spread by 3.3%, though nothing was changed.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

from exl3kit.bench import statistics
from exl3kit.bench.comparison import EFFECT, Boot, compare

BOOTS = json.loads(Path(__file__).with_name("boots.json").read_text())
CAMPAIGNS = 1000


def drawn(draw: random.Random) -> list[Boot]:
    """A campaign whose boots, and the observations in them, are drawn with replacement."""
    recorded = [(arm, draw.choice(BOOTS)) for arm in "ABABABA"]
    return [Boot(arm, {"300": draw.choices(rates, k=len(rates))}) for arm, rates in recorded]


def test_false_claims_stay_within_the_stated_level() -> None:
    draw = random.Random(20261130)
    claims = sum(compare(drawn(draw)).verdict == EFFECT for _ in range(CAMPAIGNS))
    expected = CAMPAIGNS * statistics.LEVEL
    assert len(BOOTS) == 140 and claims <= expected + 3 * math.sqrt(expected)
