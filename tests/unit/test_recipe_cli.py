"""`kit recipe`, and what every verb shares: exit codes, JSON, completion, interruption, bugs."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from exl3kit import cli, paths, recipes
from exl3kit.errors import ExitCode

KIT = [sys.executable, "-m", "exl3kit.cli"]


def kit(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the program from the repository; the environment is this one's with `environment` on top."""
    return subprocess.run(
        [*KIT, *arguments],
        cwd=paths.REPO,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )


def test_list_names_each_recipe_with_purpose_and_hardware() -> None:
    done = kit("recipe", "list")
    assert (done.returncode, done.stderr) == (0, "")
    for path in recipes.shipped():
        recipe = recipes.load(path.stem)
        assert recipe.name in done.stdout
        assert recipe.purpose in done.stdout
        assert recipe.hardware in done.stdout
    listed = json.loads(kit("recipe", "list", "--json").stdout)["recipes"]
    assert [entry["name"] for entry in listed] == [path.stem for path in recipes.shipped()]


def test_show_prints_yaml_that_checks(tmp_path: Path) -> None:
    """Given an override, when the effective recipe is shown and read again, then it is the same recipe."""
    shown = kit("recipe", "show", "demo-tp2", "--set", "serve.port=9000")
    assert shown.returncode == 0
    copy = tmp_path / "copy.yaml"
    copy.write_text(shown.stdout)
    assert kit("recipe", "check", str(copy)).stdout == f"ok       {copy}\n"
    assert recipes.load(str(copy)) == recipes.load("demo-tp2", ["serve.port=9000"])
    as_data = json.loads(kit("recipe", "show", "demo-tp2", "--json").stdout)
    assert as_data["recipe"]["parallel"] == {"nodes": 2, "tensor": 2, "pipeline": 1, "expert": False}
    assert as_data["sources"]["parallel.nodes"].startswith("recipes/demo-tp2.yaml:")


def test_check_says_one_line_per_recipe_and_ends_with_2_on_any_fault(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("recipe: 1\nname: bad\nmodle: x\n")
    done = kit("recipe", "check", "recipes/*.yaml", str(bad))
    assert done.returncode == ExitCode.USAGE
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[: len(recipes.shipped())]] == ["ok"] * len(recipes.shipped())
    assert lines[len(recipes.shipped()) :] == [
        f"invalid  {bad}",
        f"  {bad}:1:1: the key image is missing",
        f"  {bad}:1:1: the key model is missing",
        f"  {bad}:3:1: unknown key modle (did you mean model?)",
    ]
    report = json.loads(kit("recipe", "check", str(bad), "--json").stdout)
    assert report["ok"] is False
    assert report["recipes"][0]["faults"][2] == {
        "where": f"{bad}:3:1",
        "file": str(bad),
        "line": 3,
        "column": 1,
        "what": "unknown key modle",
        "next": "did you mean model?",
    }
    assert kit("recipe", "check").returncode == 0


def test_schema_is_json_schema() -> None:
    schema = json.loads(kit("recipe", "schema", "--json").stdout)
    assert schema["$schema"].startswith("https://json-schema.org/")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["recipe", "show", "dmeo"], "kit: dmeo: no shipped recipe is called 'dmeo'\n  next: did you mean demo?\n"),
        (["recipe", "shwo", "demo"], "did you mean `kit recipe show`?"),
        (["recpie"], "did you mean `kit recipe`?"),
        (["recipe", "show", "demo", "--jsn"], "--json"),
        (["recipe", "show"], "Missing argument 'RECIPE'"),
        (
            ["recipe", "show", "demo", "--set", "serve.prt=1"],
            "kit: --set serve.prt=1 (column 7): unknown key serve.prt",
        ),
    ],
)
def test_misuse_is_a_sentence_with_exit_code_2(arguments: list[str], said: str) -> None:
    done = kit(*arguments)
    assert (done.returncode, done.stdout) == (ExitCode.USAGE, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    as_data = json.loads(kit(*arguments, "--json").stdout)
    assert as_data["exit_code"] == ExitCode.USAGE
    assert as_data["error"]["what"]


def test_interruption_ends_with_130(tmp_path: Path) -> None:
    """Given a verb that waits for a pipe nobody writes to, when Ctrl-C comes, then it says so and ends with 130."""
    fifo = tmp_path / "r.yaml"
    os.mkfifo(fifo)
    # Interrupted before it has imported itself, any Python program prints a traceback: wait until it has.
    ready = "import sys, exl3kit.cli as c, exl3kit.recipes; print('ready', flush=True); c.main()"
    program = subprocess.Popen(
        [sys.executable, "-c", ready, "recipe", "check", str(fifo)],
        cwd=paths.REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None and program.stdout.readline() == "ready\n"
    with pytest.raises(subprocess.TimeoutExpired):
        program.wait(1)
    program.send_signal(signal.SIGINT)
    assert program.communicate(timeout=30)[1] == "kit: interrupted\n"
    assert program.returncode == ExitCode.INTERRUPTED


def test_a_bug_is_a_sentence_and_a_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Given a verb that raises what nobody expected, then there is one sentence, and the traceback is in a file."""

    def broken() -> list[Path]:
        raise ZeroDivisionError("a bug")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(recipes, "shipped", broken)
    monkeypatch.setattr(sys, "argv", ["kit", "recipe", "list", "--json"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == ExitCode.FAULT
    printed = capsys.readouterr()
    (log,) = (tmp_path / "exl3kit" / "crashes").iterdir()
    assert printed.err.splitlines() == [
        "kit: the kit failed: ZeroDivisionError: a bug",
        f"  next: this is a fault of the kit; please report it: `kit report` packs {log}",
    ]
    assert json.loads(printed.out)["exit_code"] == ExitCode.FAULT
    assert 'raise ZeroDivisionError("a bug")' in log.read_text()
    assert log.stat().st_mode & 0o077 == 0


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash in which `kit` is the program, from the repository."""
    program = f'kit() {{ {shlex.quote(sys.executable)} -m exl3kit.cli "$@"; }}; {line}'
    return subprocess.run(
        ["bash", "-c", program], cwd=paths.REPO, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("verb", ["recipe list", "recipe schema", "lock demo", "--help", "recipe show demo"])
def test_a_reader_that_left_is_no_error(verb: str) -> None:
    """Given a pipe whose reader ended, when a verb prints, then it ends quietly, as any program in a pipe."""
    done = shell(f"kit {verb} | true; exit ${{PIPESTATUS[0]}}")
    assert (done.returncode, done.stdout, done.stderr) == (141, "", "")


@pytest.mark.parametrize("verb", ["recipe list", "recipe schema", "lock demo", "--help", "recipe check nope"])
def test_a_full_disk_behind_stdout_is_one_sentence(verb: str) -> None:
    done = shell(f"kit {verb} > /dev/full")
    assert (done.returncode, done.stderr) == (1, "kit: stdout cannot be written (No space left on device)\n")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "2>/dev/full", ">&- 2>&-", "<&-"])
def test_closed_streams_change_neither_verdict_nor_json(closed: str) -> None:
    """Given a closed or full stream, then the exit code is the same, and stdout holds the JSON object or nothing."""
    done = shell(f"kit recipe show nope --json {closed}")
    assert done.returncode == ExitCode.USAGE
    assert ">&-" in closed.split() or json.loads(done.stdout)["exit_code"] == ExitCode.USAGE
    assert "Traceback" not in done.stderr


def test_a_damaged_environment_is_no_bug(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Given an environment that lost a package, when a verb needs it, then the way out is named."""
    monkeypatch.setitem(sys.modules, "pydantic", None)
    monkeypatch.delitem(sys.modules, "exl3kit.recipe")
    monkeypatch.delitem(sys.modules, "exl3kit.recipes")
    monkeypatch.delattr("exl3kit.recipes")
    monkeypatch.setattr(sys, "argv", ["kit", "recipe", "show", "demo"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == ExitCode.PREFLIGHT
    said = capsys.readouterr().err
    assert said.startswith("kit: the kit's environment is damaged: ")
    assert f"next: rm -r {sys.prefix}, then start kit.py again" in said


def test_a_terminal_without_utf8_ends_no_verb(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(f"recipe: {'名' * 100}\n", encoding="utf-8")
    done = kit("recipe", "check", str(bad), PYTHONIOENCODING="latin-1", PYTHONUTF8="0")
    assert done.returncode == ExitCode.USAGE
    assert "\\u540d" in done.stdout
