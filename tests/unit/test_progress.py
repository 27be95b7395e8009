"""What a long verb says while it runs, on a plain log and on terminals, and the seconds it reports."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from docker.errors import DockerException
from rich.console import Console

from exl3kit import progress as reporting
from exl3kit import proving, timings
from exl3kit.progress import Progress, Stage, clock, megabytes
from exl3kit.progress_view import View


def plain(run: timings.Run | None = None) -> tuple[Progress, io.StringIO]:
    out = io.StringIO()
    return Progress(Console(file=out, width=200), heartbeat=0.1, run=run), out


def test_a_stage_says_start_end_and_what_came_of_it() -> None:
    progress, out = plain()
    with progress.stage("wheels", total=2_000_000) as stage:
        stage.advance(2_000_000)
        stage.conclude("2 wheels [x] :x:")
    start, end = out.getvalue().splitlines()
    assert start == "> wheels" and re.sub(r"\d\.\d", "N", end) == "+ wheels N s (2 wheels [x] :x:, 2 MB)"


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


@pytest.mark.parametrize(("seconds", "text"), [(7.4, "7 s"), (59.7, "1:00"), (125, "2:05"), (3725, "1:02:05")])
def test_seconds_for_people(seconds: float, text: str) -> None:
    assert clock(seconds) == text


# ---- rate and time left ----------------------------------------------------------------------------------------------


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that the test sets."""
    clock = SimpleNamespace(at=0.0)
    monkeypatch.setattr(reporting, "time", SimpleNamespace(monotonic=lambda: clock.at))
    return clock


def test_the_rate_is_that_of_late_and_the_time_left_follows_from_it(now: SimpleNamespace) -> None:
    """Given 10 MB/s for a minute and then 1 MB/s, then what is left is told by the latter."""
    stage = Stage("copy", total=700_000_000, started=0.0)
    assert stage.rate is None and stage.standing() == ""
    for second in range(1, 121):
        now.at = float(second)
        stage.advance(10_000_000 if second <= 60 else 1_000_000)
    assert stage.rate == pytest.approx(1e6, rel=0.06)
    assert stage.seconds_left == pytest.approx(40, rel=0.06)
    assert stage.standing().startswith("660 MB of 700 MB, 1 MB/s, ETA ")


def test_a_stall_lowers_the_rate_instead_of_freezing_it(now: SimpleNamespace) -> None:
    stage = Stage("copy", total=1_000_000_000, started=0.0)
    for second in range(1, 11):
        now.at = float(second)
        stage.advance(10_000_000)
    before = stage.seconds_left
    now.at = 40.0
    assert before is not None and stage.seconds_left is not None and stage.seconds_left > 3 * before


def test_after_the_last_byte_no_rate_sinks_while_the_stage_works_on(now: SimpleNamespace) -> None:
    stage = Stage("environment", total=458_000_000, started=0.0)
    for second in (1, 2, 3):
        now.at = float(second)
        stage.advance(153_000_000)
    now.at = 41.0
    stage.say("[wheels 3/4] RUN python3")
    assert stage.standing() == "459 MB, [wheels 3/4] RUN python3"
    assert stage.moved() == "459 MB, 153 MB/s"


def test_a_copy_that_begins_anew_has_no_rate_of_before(now: SimpleNamespace) -> None:
    stage = Stage("copy", total=90_000_000, started=0.0)
    for second in range(1, 9):
        now.at = float(second)
        stage.advance(10_000_000)
    stage.restart(200_000_000)
    assert stage.rate is None and stage.seconds_left is None
    stage.advance(5_000_000)
    now.at = 18.0
    stage.advance(5_000_000)
    assert stage.standing() == "10 MB of 200 MB, 500 kB/s, ETA 6:20"


def test_without_bytes_the_last_time_is_the_outlook() -> None:
    stage = Stage("load", last=83.0)
    stage.say("rank 0 loading")
    assert stage.standing() == "last time 1:23, rank 0 loading"


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (b"a line\nLoading shards:  50% | 1/2\rLoading shards: 100% | 2/2\n\n", "Loading shards: 100% | 2/2"),
        (b'a line\nexl3 rank 0: EXL3-POST-MORTEM {"first": {}}\n', "a line"),
        (b"(pid=66) INFO \treserved_cpus=[]\n", "(pid=66) INFO reserved_cpus=[]"),
        (b"\x1b[2Jnot for a terminal", "\\x1b[2Jnot for a terminal"),
        (b"", ""),
    ],
)
def test_a_start_shows_the_last_line_of_the_head_ranks_log(log: bytes, said: str) -> None:
    """vLLM tells there how far it has loaded."""
    rank = SimpleNamespace(container=SimpleNamespace(logs=lambda tail: log))
    assert proving.latest_word(rank) == said  # type: ignore[arg-type]


def test_a_log_that_cannot_be_had_says_nothing() -> None:
    def lost(tail: int) -> bytes:
        raise DockerException("gone")

    assert proving.latest_word(SimpleNamespace(container=SimpleNamespace(logs=lost))) == ""  # type: ignore[arg-type]


# ---- compared with the last run --------------------------------------------------------------------------------------


def test_the_summary_holds_each_stage_against_the_last_run_of_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a run that came to its end, when the same runs again, then its seconds stand beside; another's do not."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    same = timings.Run("up", "demo", "a,b")
    timings.remember(same, timings.Times({"image": 12.34, "load": 6.0}, 20.0))
    for run, compared in ((same, True), (timings.Run("up", "demo", "a"), False), (None, False)):
        progress, out = plain(run)
        with progress.stage("image") as stage:
            stage.conclude("a tag")
        with progress.stage("first answer"):
            pass
        progress.summary()
        lines = out.getvalue().splitlines()[-3:]
        assert ("(last 12.3 s)" in lines[0], "(last 20.0 s)" in lines[2]) == (compared, compared)
        assert re.fullmatch(r"image +\d+\.\d s .*a tag", lines[0]) and re.match(r"wall clock +\d+\.\d s", lines[2])
    again = timings.recall(same).stages
    assert list(again) == ["image", "first answer"] and max(again.values()) < 6, "the next is compared with this one"


def test_a_stage_that_comes_twice_is_held_against_the_same_turn_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a demo with a start per model, when it runs again, then each start has its own seconds beside it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    run = timings.Run("demo", "both")
    timings.remember(run, timings.Times({"image": 19.3, "first answer": 54.5, "first answer (2)": 73.3}, 150.0))
    progress, out = plain(run)
    progress.skip("image", "is there")
    outlooks = []
    for _ in range(2):
        with progress.stage("first answer") as stage:
            progress.step("first answer", 0.1)
            outlooks.append(stage.last)
    progress.skip("image", "is there")
    progress.summary()
    assert outlooks == [54.5, 73.3]
    lasts = [
        found[1] if (found := re.search(r"last (\S+) s", line)) else "" for line in out.getvalue().splitlines()[-7:]
    ]
    assert lasts == ["19.3", "", "54.5", "", "73.3", "", "150.0"]
    assert list(timings.recall(run).stages) == ["image", "first answer", "first answer (2)", "image (2)"]
    assert list(progress.seconds) == ["image", "first answer"]


def test_a_failed_run_is_nothing_to_be_compared_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    run = timings.Run("up", "demo")
    progress, _ = plain(run)
    with pytest.raises(ZeroDivisionError), progress.stage("image"):
        raise ZeroDivisionError
    assert timings.recall(run).wall is None


def test_times_that_cannot_be_read_or_kept_stop_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    run = timings.Run("up", "demo")
    run.file.write_text('{"stages": 7}')
    assert timings.recall(run) == timings.Times()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    timings.remember(run, timings.Times({}, 1.0))
    assert timings.recall(run) == timings.Times() and list(timings.nodes_named()) == []


# ---- terminals and pipes ---------------------------------------------------------------------------------------------


class Tty(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def drawn(file: io.StringIO, environment: dict[str, str], width: int = 100) -> str:
    """What a stage of 0.2 s and its summary write."""
    console = Console(file=file, width=width, _environ=environment)
    progress = Progress(console)
    with progress.stage("copy", total=100) as stage:
        for _ in range(2):
            stage.advance(50)
            time.sleep(0.1)
    progress.skip("base", "there")
    progress.summary()
    return file.getvalue()


def test_a_terminal_gets_a_line_that_is_renewed() -> None:
    text = drawn(Tty(), {"TERM": "xterm"})
    assert "\x1b[2K" in text and "> copy" not in text
    assert "+\x1b[0m copy" in text or "+ copy" in text


@pytest.mark.parametrize(
    ("file", "environment"),
    [(io.StringIO(), {}), (io.StringIO(), {"TERM": "xterm", "NO_COLOR": "1"}), (Tty(), {"TERM": "dumb"})],
    ids=["pipe", "pipe without colours", "dumb terminal"],
)
def test_whatever_has_no_cursor_gets_plain_lines(file: io.StringIO, environment: dict[str, str]) -> None:
    text = drawn(file, environment)
    assert text.splitlines()[0] == "> copy"
    assert re.search(r"[\x00-\x08\x0b-\x1f]", text) is None


def test_colours_in_a_pipe_are_not_a_cursor_in_a_pipe() -> None:
    """Given FORCE_COLOR, as many build services set it, then lines are coloured, and none is renewed in place."""
    text = drawn(io.StringIO(), {"FORCE_COLOR": "1", "TERM": "xterm"})
    assert "\x1b[32m" in text
    assert set(re.findall(r"\x1b\[[0-9;?]*([A-Za-z])", text)) == {"m"}


def test_no_color_has_no_colours_on_a_terminal_either() -> None:
    text = drawn(Tty(), {"TERM": "xterm", "NO_COLOR": "1"})
    assert "\x1b[2K" in text and re.search(r"\x1b\[[0-9;]*\b[349][0-9]\b[0-9;]*m", text) is None


@pytest.mark.parametrize("width", [20, 40, 59, 60, 80, 100, 200])
def test_the_live_view_fits_every_width(width: int) -> None:
    """Given stages with and without bytes and long names, then no line of the view is wider than the terminal."""
    console = Console(file=Tty(), width=width, _environ={"TERM": "xterm"}, color_system=None)
    progress = Progress(console)
    progress.active += [
        Stage("image to a-node-with-a-long-name", total=4_000_000_000, done=1_000_000_000, last=90.0),
        Stage("first answer", last=83.0, note="rank 0 loading, " * 9),
    ]
    lines = console.render_lines(View(progress).render(), pad=False)
    texts = ["".join(segment.text for segment in line).rstrip() for line in lines]
    assert all(len(text) <= width for text in texts)
    assert any("25%" in text or "1.00 GB of 4.00 GB" in text for text in texts) or width == 20
    assert len(texts) == 3 and all(text.isascii() for text in texts)


def test_a_narrow_terminal_gets_a_summary_in_which_every_line_fits() -> None:
    console = Console(file=Tty(), width=40, _environ={"TERM": "xterm"}, color_system=None)
    progress = Progress(console)
    for name in ("look at nodes and weights of a long name", "image"):
        with progress.stage(name) as stage:
            stage.conclude("a long outcome " * 5)
    console.file = file = Tty()
    progress.summary()
    lines = file.getvalue().splitlines()
    assert len(lines) == 3 and all(len(line) <= 40 for line in lines)
    assert all(re.search(r" \d\.\d s$", line) for line in lines)
