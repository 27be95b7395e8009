"""What the demo makes of its answers."""

from __future__ import annotations

from exl3kit import demo
from exl3kit.errors import ExitCode


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
