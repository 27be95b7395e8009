"""What the demo makes of its answers."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from exl3kit import demo
from exl3kit.cli.demo import show
from exl3kit.errors import ExitCode
from exl3kit.progress import Progress


def told(answer: str, *, exact: bool) -> demo.Told:
    return demo.Told("moe", "2+2=", answer, exact, tokens=4, seconds=0.5)


def outcome(*answers: demo.Told) -> demo.Outcome:
    return demo.Outcome(list(answers), [], "ab" * 32, {})


def test_one_wrong_answer_fails_the_demo_and_is_shown() -> None:
    failure = demo.failure(outcome(told("4", exact=True), told("5", exact=False)))
    assert failure is not None
    assert failure.code == ExitCode.VERIFICATION
    assert "1 of 2 answers" in failure.what
    assert "'2+2=' was answered '5'" in str(failure)


@pytest.mark.parametrize(("started", "keep", "removed"), [(True, False, 1), (True, True, 0), (False, False, 0)])
def test_what_served_before_the_demo_goes_on(
    monkeypatch: pytest.MonkeyPatch, started: bool, keep: bool, removed: int
) -> None:
    """Given a deployment of one's own under the demo's name, then the demo asks it and does not end it."""
    out, gone = io.StringIO(), []
    serving = SimpleNamespace(started=started, deployment=SimpleNamespace(name="demo-tp2"))
    monkeypatch.setattr(demo.serve, "up", lambda *_: serving)
    monkeypatch.setattr(demo.containers, "take_down", lambda nodes, name, volumes: gone.append(name))
    recipe: Any = SimpleNamespace(name="demo-tp2")
    with demo.served(recipe, None, Progress(Console(file=out, width=200)), keep=keep) as told:  # type: ignore[arg-type]
        assert told is serving
    assert len(gone) == removed
    assert ("`kit down demo-tp2` ends it" in out.getvalue()) is not started


def test_what_is_kept_comes_with_the_command_that_ends_it() -> None:
    out = io.StringIO()
    kept = demo.Outcome([told("4", exact=True)], [], "ab" * 32, {"moe": "http://127.0.0.1:8000/v1"})
    show(kept, "spark1", Console(file=out, width=200))
    assert "still serves at http://127.0.0.1:8000/v1; `kit down demo-moe --nodes spark1` ends it" in out.getvalue()


def test_only_exact_answers_pass() -> None:
    seen = outcome(told("4", exact=True), told("4", exact=True))
    assert demo.failure(seen) is None
    assert (seen.exact, seen.tokens_per_second) == (2, 8.0)


def test_the_demo_serves_two_ranks_of_each_model_under_its_own_name() -> None:
    from exl3kit import recipes

    loaded = [recipes.load(reference, sets) for reference, sets in demo.MODELS.values()]
    assert [(recipe.parallel.nodes, recipe.parallel.tensor) for recipe in loaded] == [(2, 2), (2, 2)]
    assert len({recipe.name for recipe in loaded}) == 2
    for recipe in loaded:
        assert recipe.model.path is not None
        assert (recipe.model.path / demo.QUESTIONS).is_file()
