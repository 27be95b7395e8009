"""Checking many recipes: each gets a verdict, and one that is invalid does not hide the others."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from exl3kit import recipes
from exl3kit.errors import KitError
from exl3kit.faults import RecipeError
from exl3kit.recipe import Recipe


@dataclass(frozen=True)
class Verdict:
    """A recipe that loaded, or the error that says why not."""

    ref: str
    recipe: Recipe | None
    error: KitError | None

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def name(self) -> str:
        return self.recipe.name if self.recipe else Path(self.ref).stem

    @property
    def purpose(self) -> str:
        return (self.recipe.purpose or "") if self.recipe else f"invalid: kit recipe check {self.name}"

    @property
    def hardware(self) -> str:
        return (self.recipe.hardware or "") if self.recipe else ""

    def lines(self) -> list[str]:
        """Each fault as one line."""
        if isinstance(self.error, RecipeError):
            return self.error.lines()
        return str(self.error).splitlines() if self.error else []

    def as_json(self) -> dict[str, object]:
        fields: dict[str, object] = {"ref": self.ref, "name": self.name, "ok": self.ok}
        if self.recipe:
            return {**fields, "purpose": self.recipe.purpose, "hardware": self.recipe.hardware}
        return {**fields, **(self.error.as_json() if self.error else {})}


def check(ref: str, sets: Sequence[str] = ()) -> Verdict:
    """The verdict on one recipe; never raises KitError."""
    try:
        return Verdict(ref, recipes.load(ref, sets), None)
    except KitError as error:
        return Verdict(ref, None, error)


def expand(refs: Sequence[str]) -> list[str]:
    """References with patterns replaced by the files they match, in order; all shipped recipes when there are none.

    A pattern that matches nothing stays as it is, and its check says that there is no such recipe.
    """
    if not refs:
        return [recipes.display(path) for path in recipes.shipped()]
    expanded: list[str] = []
    for ref in refs:
        is_pattern = glob.has_magic(ref) and not Path(ref).exists()
        expanded += (sorted(glob.glob(ref)) or [ref]) if is_pattern else [ref]  # noqa: PTH207 - patterns may be absolute
    return expanded
