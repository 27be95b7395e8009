"""Options and first steps that the verbs of `kit bench` and `kit parity` share."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exl3kit.cli.serve import stoppable

if TYPE_CHECKING:
    from exl3kit.bench.targets import Target
    from exl3kit.recipe import Recipe

RecipeOption = Annotated[str | None, typer.Argument(metavar="[RECIPE]", help="A recipe that is up, on --nodes.")]
Nodes = Annotated[str, typer.Option("--nodes", help="ssh names separated by commas, a cluster file, or local.")]
Url = Annotated[str | None, typer.Option("--url", help="Measure this server, from here, in place of a recipe.")]
KeyFile = Annotated[str | None, typer.Option("--key-file", help="File with the API key of --url.")]
Out = Annotated[Path | None, typer.Option("--out", help="New folder for the receipts; else bench/TIME-VERB.")]
Count = Annotated[int, typer.Option("--count", min=1, help="Observations of each rung; fewer than 5 are not valid.")]
MaxCv = Annotated[float, typer.Option("--max-cv", min=0, help="Largest coefficient of variation within a boot.")]
Against = Annotated[str | None, typer.Argument(metavar="[B]", help="Recipe of the second arm; else as the first.")]
SetsA = Annotated[list[str] | None, typer.Option("--a", metavar="KEY=VALUE", help="Override a key in the first arm.")]
SetsB = Annotated[list[str] | None, typer.Option("--b", metavar="KEY=VALUE", help="Override a key in the second arm.")]
Quick = Annotated[bool, typer.Option("--quick", help="Accept fewer than 5 observations: for trying, not for figures.")]

LEAST = 5  # as in `exl3kit.bench.plans`, which is not imported before a verb runs


def folder(out: Path | None, verb: str) -> Path:
    """The folder for the receipts of a campaign that begins now."""
    return out or Path("bench") / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{verb}"


def numbers(text: str | None, option: str) -> list[int]:
    """`8192,16384` as numbers; 8K is 8192."""
    from exl3kit.errors import KitError

    try:
        words = [word.strip().upper() for word in (text or "").split(",") if word.strip()]
        return [int(word[:-1]) * 1024 if word.endswith("K") else int(word) for word in words]
    except ValueError as error:
        raise KitError(
            f"{text!r} is no list of numbers", where=option, next_step=f"such as {option} 8K,65536"
        ) from error


def least(quick: bool) -> int:
    """How many observations of a rung must count."""
    return 1 if quick else LEAST


def arms(
    recipe: str, against: str | None, sets: list[str] | None, a_sets: list[str] | None, b_sets: list[str] | None
) -> tuple[Recipe, Recipe]:
    """The recipes of the two arms: `--set` holds for both, `--a` and `--b` for one."""
    from exl3kit import recipes

    both = list(sets or ())
    return recipes.load(recipe, both + (a_sets or [])), recipes.load(against or recipe, both + (b_sets or []))


@contextmanager
def opened_target(
    recipe: str | None, sets: list[str] | None, nodes: str, url: str | None, key_file: str | None
) -> Iterator[Target]:
    """What the options name, while the verb may be stopped."""
    from exl3kit.bench import targets

    with stoppable(), targets.opened(recipe, sets or (), nodes, url, key_file) as target:
        yield target
