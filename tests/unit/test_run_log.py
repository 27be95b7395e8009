"""The log of a run: of every verb that does more than read files here; private, few, without secrets."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from exl3kit import cli, hub, paths, plan, run_log, ssh
from exl3kit.errors import MEANINGS, ExitCode
from exl3kit.progress import Progress

TOKEN = "a-word-that-no-pattern-knows"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state directory of the test's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    yield tmp_path
    run_log.end(0)


def kit(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the program in this process."""
    monkeypatch.setattr(sys, "argv", ["kit", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(str(ended.value.code))


def test_an_error_ends_with_the_place_of_a_log_that_says_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Given a node that is not there, then the last line names a private file with arguments, cause and exit code."""
    assert kit(monkeypatch, "plan", "demo", "--nodes", "nosuch.invalid") == 6
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("  log: ")
    log = Path(last.removeprefix("  log: "))
    assert log.stat().st_mode & 0o777 == 0o600 and log.parent.stat().st_mode & 0o777 == 0o700
    text = log.read_text()
    assert "exl3kit: kit plan demo --nodes nosuch.invalid\n" in text
    assert "Traceback" in text and "exit code 6" in text
    assert "typer/main.py" not in text, "the way to the verb tells nothing"
    for line in text.splitlines():
        assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z [\w.]+: |    ", line), line


def test_a_verdict_says_its_exit_code_and_where_the_log_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Given nodes of which one does not answer, then `status` is no error, and yet says where more is to be read."""
    assert kit(monkeypatch, "status", "--nodes", "nosuch.invalid") == 6
    verdict, log = capsys.readouterr().err.splitlines()
    assert verdict == f"kit: exit code 6: {MEANINGS[ExitCode.UNREACHABLE]}"
    assert "no host of this name is known" in Path(log.removeprefix("  log: ")).read_text()


def test_json_names_the_log_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert kit(monkeypatch, "plan", "nosuch", "--json") == 2
    printed = capsys.readouterr()
    assert Path(json.loads(printed.out)["log"]).is_file()


def test_a_fault_of_the_kit_leaves_its_traceback_in_the_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(plan, "make", broken)
    monkeypatch.setenv("XDG_CACHE_HOME", os.environ["XDG_STATE_HOME"])
    assert kit(monkeypatch, "plan", "demo") == 1
    assert "ZeroDivisionError: a bug" in run_log.logs()[-1].read_text()


@pytest.mark.parametrize("verb", [["recipe", "show", "nosuch"], ["recipe", "list"], ["--help"], ["completion", "bash"]])
def test_what_only_reads_files_here_keeps_no_log(
    verb: list[str], state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kit(monkeypatch, *verb)
    assert "log:" not in capsys.readouterr().err
    assert not list(state.rglob("*.log"))


def test_fifty_are_kept_and_ten_of_one_verb(state: Path) -> None:
    """Given an `up` and then many `status`, then the log of the `up` is still there."""
    folder = paths.state_dir("runs")
    (folder / "20200101T000000Z-up-1.log").touch()
    for number in range(100):
        (folder / f"20200102T0000{number:02d}Z-status-{number}.log").touch()
    for number in range(60):
        (folder / f"20190102T0000{number:02d}Z-verb{number}-{number}.log").touch()
    run_log.begin("status")
    names = [path.name for path in run_log.logs()]
    assert len(names) <= run_log.KEPT
    assert "20200101T000000Z-up-1.log" in names
    assert sum("-status-" in name for name in names) == run_log.KEPT_OF_A_VERB
    assert names[-1].endswith(f"-status-{os.getpid()}.log")


def test_no_secret_comes_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Given secrets that the kit read, and what looks like one, wherever they turn up, then the log has neither."""
    file = tmp_path / "token"
    file.write_text(TOKEN)
    monkeypatch.setattr(
        sys, "argv", ["kit", "up", "--set", f"serve.env.MY_TOKEN={TOKEN[::-1]}", "https://me:pw1234@lan"]
    )
    run_log.begin("up")
    assert hub.token(file) == TOKEN
    log = logging.getLogger("exl3kit.test")
    log.info("it says %s in the middle", TOKEN)
    log.info("Authorization: Bearer abcdefgh12345678")
    log.info('{"api_key": "abcdefgh"} HF_TOKEN=hf_abcdefghijklmnopq')
    ssh.finish("local", ["sh", "-c", 'read -r word; echo "$word" >&2; exit 3'], "sh", input=f"{TOKEN}\n", timeout=9)
    try:
        raise ValueError(f"refused: {TOKEN}")
    except ValueError as error:
        run_log.record(error)
    text = run_log.logs()[-1].read_text()
    for secret in (TOKEN, TOKEN[::-1], "pw1234", "abcdefgh", "hf_abc"):
        assert secret not in text, secret
    assert "exit code 3" in text and "ValueError: refused: " in text


def test_it_has_what_the_screen_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a stage that says several things, then the log has all of it, and nothing can forge a line there."""
    run_log.begin("up")
    out = io.StringIO()
    progress = Progress(Console(file=out, width=200))
    with progress.stage("image to node2") as stage:
        for note in ("the first thing", "the first thing", "another\nkit: forged \x1b[2J line"):
            stage.say(note)
        stage.conclude("a tag")
    text = run_log.logs()[-1].read_text()
    assert text.count("the first thing") == 1 and "the first thing" not in out.getvalue()
    assert "> image to node2" in text and re.search(r"\+ image to node2 \d\.\d s \(a tag\)", text)
    assert "\x1b" not in text and "\nkit: forged" not in text


def test_engine_calls_that_only_look_are_left_out_unless_they_fail() -> None:
    run_log.begin("up")
    http = logging.getLogger("urllib3.connectionpool")
    for method, status in (("GET", 200), ("GET", 404), ("POST", 201)):
        http.debug('%s://%s:%s "%s %s %s" %s %s', "http", "localhost", None, method, "/json", "HTTP/1.1", status, None)
    text = run_log.logs()[-1].read_text()
    assert '"GET /json HTTP/1.1" 200' not in text
    assert '"GET /json HTTP/1.1" 404' in text and '"POST /json HTTP/1.1" 201' in text


def test_a_run_of_days_writes_no_endless_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_log, "LONGEST_LOG", 20_000)
    run_log.begin("dash")
    log = logging.getLogger("exl3kit.test")
    for _ in range(1000):
        log.debug("a detail of a look")
    log.info("what matters")
    text = run_log.logs()[-1].read_text()
    assert 100 < text.count("a detail of a look") < 500 and "what matters" in text


def test_a_state_directory_that_cannot_be_written_stops_no_verb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert kit(monkeypatch, "plan", "demo") == 0
    assert kit(monkeypatch, "plan", "nosuch") == 2
    assert re.match(r"  log: none \(.*Not a directory", capsys.readouterr().err.splitlines()[-1])


def test_a_full_disk_under_the_log_stops_no_verb() -> None:
    run_log.begin("up")
    assert run_log._open is not None and isinstance(run_log._open.handler, logging.FileHandler)
    run_log._open.handler.setStream(Path("/dev/full").open("w"))  # noqa: SIM115 - the handler closes it
    logging.getLogger("exl3kit").info("no room")
    run_log.end(0)


def test_the_first_output_comes_soon_with_a_log_too(state: Path) -> None:
    """Given a verb that keeps a log, then that costs it little of a start: under 0.1 s of CPU."""
    program = "import time; start = time.process_time(); from exl3kit import run_log; run_log.begin('up')"
    program += "; import logging; logging.getLogger('exl3kit').info('x'); print(time.process_time() - start)"
    seconds = [
        float(subprocess.run([sys.executable, "-c", program], cwd=paths.REPO, capture_output=True, text=True).stdout)
        for _ in range(3)
    ]
    assert min(seconds) < 0.1 and list(state.rglob("*-up-*.log")), seconds
