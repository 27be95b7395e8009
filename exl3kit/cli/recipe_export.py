"""`kit recipe export`: parse, call, print."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from exl3kit.cli import args, output

if TYPE_CHECKING:
    from exl3kit.recipe import Recipe


def export_recipe(
    recipe: args.RecipeArg,
    to: Annotated[
        Literal["v1", "v2"], typer.Option("--as", metavar="v1|v2", help="v1: eugr's spark-vllm-docker; v2: sparkrun.")
    ],
    container: Annotated[
        str | None, typer.Option("--container", help="The image to start; that of `kit build` if left out.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="File to write, not replaced; standard output if left out.")
    ] = None,
    sets: args.SetOption = None,
    as_json: args.JsonOption = False,
) -> None:
    """Write a recipe for another launcher; what it has no word for stands under exl3kit:, and `import` reads it."""
    from exl3kit import exported, recipes

    loaded = recipes.load(recipe, sets or ())
    made = exported.translate(loaded, to, container or image_of(loaded))
    text = exported.as_yaml(made, loaded.name)
    if out is not None:
        write(out, text)
    if as_json:
        output.emit({"recipe": made.data, "beside": list(made.beside), "file": str(out) if out else None})
    elif out is None:
        print(text, end="")
    if made.beside:
        print(f"kit: under exl3kit:, for `kit recipe import` alone: {', '.join(made.beside)}", file=sys.stderr)


def image_of(recipe: Recipe) -> str:
    """The name of the image that `kit build` makes of the recipe; raises `KitError` when its pins are unknown."""
    from exl3kit import lock
    from exl3kit.errors import KitError

    try:
        return lock.make_lock(recipe).tag
    except KitError as unpinned:
        raise KitError(
            "the image has no name yet",
            where=recipe.name,
            why=unpinned.what,
            next_step="--container NAME:TAG, or `kit lock --update RECIPE` first",
            code=unpinned.code,
        ) from unpinned


def write(path: Path, text: str) -> None:
    """Write a file that is not there yet."""
    from exl3kit.errors import KitError

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise KitError("this file is there already, and is not replaced", where=str(path)) from error
    except OSError as error:
        raise KitError("the recipe cannot be written", where=str(path), why=error.strerror) from error
