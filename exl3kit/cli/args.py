"""Arguments that several verbs share, so that they read, complete and explain alike."""

from __future__ import annotations

from typing import Annotated

import typer


def complete_recipe(incomplete: str) -> list[tuple[str, str]]:
    """Shipped recipes for the shell: names with their first comment line, read without parsing any YAML."""
    from exl3kit import paths

    names = []
    for path in sorted(paths.RECIPES.glob("*.yaml")):
        if path.stem.startswith(incomplete):
            first = path.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
            names.append((path.stem, first.removeprefix("#").strip() if first.startswith("#") else ""))
    return names


RecipeArg = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="A shipped recipe's name (`kit recipe list`), or the path of a .yaml file.",
        autocompletion=complete_recipe,
        show_default=False,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, such as serve.port=9000; may be repeated."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
