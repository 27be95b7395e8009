"""What a long verb says while it runs, on a plain log, and the seconds it reports."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from exl3kit.progress import Progress, megabytes


def plain() -> tuple[Progress, io.StringIO]:
    out = io.StringIO()
    return Progress(Console(file=out, width=200), heartbeat=0.1), out


def test_a_stage_says_start_end_and_what_came_of_it() -> None:
    progress, out = plain()
    with progress.stage("wheels", total=2_000_000) as stage:
        stage.advance(2_000_000)
        stage.conclude("2 wheels [x] :x:")
    assert out.getvalue().splitlines() == ["> wheels", "+ wheels 0.0 s (2 wheels [x] :x:, 2 MB)"]


def test_a_silent_stage_still_says_that_it_lives() -> None:
    progress, out = plain()
    with progress.stage("load") as stage:
        stage.say("unpacking")
        time.sleep(0.4)
    assert ". load 0 s: unpacking" in out.getvalue()


def test_a_failed_stage_is_marked_and_the_failure_goes_on() -> None:
    progress, out = plain()
    with pytest.raises(KeyboardInterrupt), progress.stage("copy"):
        raise KeyboardInterrupt
    assert out.getvalue().splitlines()[-1].startswith("x copy")
    assert progress.timings[-1].outcome == "failed"


def test_seconds_are_per_stage_without_the_steps_inside() -> None:
    progress, _ = plain()
    with progress.stage("image"):
        progress.step("RUN make", 3.0)
    with progress.stage("image"):
        pass
    progress.skip("base", "there")
    assert set(progress.seconds) == {"image", "base"} and progress.seconds["image"] < 1


@pytest.mark.parametrize(("count", "text"), [(900, "1 kB"), (2_400_000, "2 MB"), (2_060_000_000, "2.06 GB")])
def test_bytes_for_people(count: int, text: str) -> None:
    assert megabytes(count) == text
