"""Help that teaches: every verb has examples that its command line takes, on any width; misuse says what is meant."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from exl3kit import cli, paths, recipes
from exl3kit.cli import examples, teaching
from exl3kit.errors import MEANINGS, ExitCode

PROGRAM: Any = typer.main.get_command(cli.app)
SHIPPED = {path.stem for path in recipes.shipped()}


def pages(command: Any, context: Any) -> Iterator[tuple[str, Any, Any]]:
    """(words, command, context) of every verb and group, `kit` among them."""
    yield context.command_path, command, context
    for name, below in getattr(command, "commands", {}).items():
        yield from pages(below, typer.Context(below, parent=context, info_name=name))


PAGES = list(pages(PROGRAM, typer.Context(PROGRAM, info_name="kit")))
EXAMPLES = [one.command for verb in examples.EXAMPLES for one in examples.examples_of(verb)]


@pytest.mark.parametrize("path", [path for path, _, _ in PAGES])
def test_every_verb_has_an_example_of_itself(path: str) -> None:
    verb = path.partition(" ")[2]
    assert verb in examples.EXAMPLES, f"no example of `{path}` in exl3kit/cli/examples.py"
    for one in examples.examples_of(verb):
        assert f"{one.command} ".startswith(f"{path} "), one.command


def test_no_example_is_of_a_verb_that_is_gone() -> None:
    assert set(examples.EXAMPLES) == {path.partition(" ")[2] for path, _, _ in PAGES}


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_is_a_command_line_that_the_kit_takes(example: str) -> None:
    """Given an example, when it is parsed but not run, then each word has its place, and recipes and keys exist."""
    words = shlex.split(example)[1:]
    command, name = PROGRAM, "kit"
    while hasattr(command, "commands"):
        name = words.pop(0)
        command = command.commands[name]
    given = command.make_context(name, words).params
    named = given.get("recipe") or []
    for recipe in [named] if isinstance(named, str) else named:
        if recipe.endswith((".yaml", ".yml")):
            continue
        assert recipe in SHIPPED, recipe
        for sets in ("sets", "a_sets", "b_sets"):
            recipes.load(recipe, given.get(sets) or ())


@pytest.mark.parametrize("width", [40, 80, 200])
def test_every_page_fits_the_screen(width: int) -> None:
    """Given any width, then only lines that are to be copied, or a single long word, are wider than it."""
    for path, command, context in PAGES:
        text = teaching.page(command, context, width)
        for line in text.splitlines():
            whole = line.startswith("  kit ") or len(line.split()) < 3
            assert whole or len(line) < width, f"{path}: {line}"
        assert re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text) is None


def test_the_first_page_groups_verbs_in_the_order_of_a_newcomer_and_tells_exit_codes() -> None:
    text = teaching.page(PROGRAM, typer.Context(PROGRAM, info_name="kit"), 80)
    heads = re.findall(r"^(\S.*):$", text, re.MULTILINE)
    assert heads == ["Examples", *cli.PANELS, "Options", "Exit codes"]
    listed = re.findall(r"^  ([a-z]+)  ", text, re.MULTILINE)
    assert listed == [name for verbs in cli.PANELS.values() for name in verbs]
    assert listed[0] == "demo"
    for code in ExitCode:
        assert re.search(rf"^  {int(code)} +{re.escape(MEANINGS[code])}$", text, re.MULTILINE), code


def kit(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "exl3kit.cli", *arguments]
    return subprocess.run(
        program, cwd=paths.REPO, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("typed", "next_step"),
    [
        ("buld", "did you mean `kit build` or `kit bundle`?"),
        ("start demo", "did you mean `kit up`?"),
        ("prefill demo", "did you mean `kit bench prefill`?"),
        ("bench prefil", "did you mean `kit bench prefill` or `kit bench profile`?"),
        ("bench xyz", "`kit bench --help` lists the verbs"),
        ("up demo --dry-rum", "did you mean --dry-run?"),
        ("--json up demo", "options follow the verb: `kit VERB --json`"),
        ("up", "RECIPE: A shipped recipe's name (`kit recipe list`), or the path of a .yaml file; `kit up --help`"),
        ("init", "--nodes: ssh names separated by commas, a cluster file, or local; `kit init --help` shows examples"),
        ("bench load demo --prompt many", "`kit bench load --help` shows examples"),
    ],
)
def test_misuse_says_what_may_have_been_meant(
    typed: str, next_step: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kit", *typed.split()])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out if "--json" not in typed else "") == (ExitCode.USAGE, "")
    assert next_step in printed.err.splitlines()[-1]


# ---- what a pipe gets ------------------------------------------------------------------------------------------------

LOOKS = (
    "",
    "bench --help",
    "recipe list",
    "plan glm-5.3-flash-2x-spark",
    "lock demo",
    "up demo --nodes nosuch.invalid",
)
MORE_LOOKS = (
    "--help",
    "recipe show demo",
    "recipe check",
    "plan demo-tp2",
    "doctor --nodes nosuch.invalid",
    "status --nodes nosuch.invalid",
    "logs demo --nodes nosuch.invalid",
    "bench selftest",
    "overlay check --wheel {tmp}",
    "overlay render demo --out {tmp}",
    "export compose demo --out {tmp} --nodes nosuch.invalid",
    "completion bash",
)


@pytest.mark.parametrize("arguments", [*LOOKS, *(pytest.param(one, marks=pytest.mark.full) for one in MORE_LOOKS)])
def test_pipes_and_poor_terminals_get_plain_text(arguments: str, tmp_path: Path) -> None:
    """Given a pipe, an ASCII locale that Python does not mend, and 40 columns, then no control character comes."""
    poor = {"LC_ALL": "C", "LANG": "", "TERM": "dumb", "COLUMNS": "40", "NO_COLOR": "1"}
    poor |= {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = kit(*arguments.format(tmp=tmp_path).split(), **poor)
    said = done.stdout + done.stderr
    assert done.returncode in (0, 2, 3, 5, 6), said
    assert said and "Traceback" not in said
    assert said.isascii() and re.search(r"[\x00-\x08\x0b-\x1f\x7f]", said) is None, said
