"""`kit recipe`: list, show, check and describe recipes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from exl3kit.cli import args, output, recipe_export, recipe_import, teaching
from exl3kit.errors import ExitCode

if TYPE_CHECKING:
    from exl3kit.recipe_checks import Verdict

app = teaching.App("List, show and check recipes.")


@app.command("list", cls=teaching.Lookup)
def list_recipes(as_json: args.JsonOption = False) -> None:
    """The recipes that come with the kit: what each is for, and on which machines."""
    from exl3kit import recipe_checks, recipes

    verdicts = [recipe_checks.check(str(path)) for path in recipes.shipped()]
    if as_json:
        output.emit({"recipes": [verdict.as_json() for verdict in verdicts]})
        return
    console = output.console()
    width = max((len(verdict.name) for verdict in verdicts), default=0)
    for verdict in verdicts:
        console.print(output.hung(f"{verdict.name:<{width}}  {verdict.purpose}", width + 2), markup=False)
        console.print(output.hung(f"{'':<{width}}  {verdict.hardware}", width + 2), style="dim", markup=False)


@app.command(cls=teaching.Lookup)
def show(recipe: args.RecipeArg, sets: args.SetOption = None, as_json: args.JsonOption = False) -> None:
    """The recipe after extends and --set, with defaults filled in and the source of each value."""
    from exl3kit import recipe_view, recipes

    effective = recipes.load_effective(recipe, sets or [])
    if as_json:
        output.emit(recipe_view.as_json(effective))
    else:
        print(recipe_view.as_yaml(effective), end="")


@app.command(cls=teaching.Lookup)
def check(
    files: Annotated[
        list[str] | None,
        args.recipe("Names, files or patterns such as 'recipes/*.yaml'; all shipped recipes if none is given."),
    ] = None,
    sets: args.SetOption = None,
    as_json: args.JsonOption = False,
) -> None:
    """Say for each recipe whether it is valid, and every fault with file, line and column; exit 2 on any."""
    from exl3kit import recipe_checks

    verdicts = [recipe_checks.check(ref, sets or []) for ref in recipe_checks.expand(files or [])]
    if as_json:
        output.emit({"ok": all(v.ok for v in verdicts), "recipes": [verdict.as_json() for verdict in verdicts]})
    else:
        _print_verdicts(verdicts)
    if not all(verdict.ok for verdict in verdicts):
        raise typer.Exit(int(ExitCode.USAGE))


def _print_verdicts(verdicts: list[Verdict]) -> None:
    from exl3kit.faults import printable

    for verdict in verdicts:
        if verdict.ok:
            print(f"ok       {printable(verdict.ref)}")
        else:
            print(f"invalid  {printable(verdict.ref)}")
            for line in verdict.lines():
                print(f"  {line}")


@app.command(cls=teaching.Lookup)
def schema(as_json: args.JsonOption = True) -> None:
    """The JSON Schema of a recipe, for editors: `kit recipe schema > recipe.schema.json`."""
    from exl3kit import recipe_view

    del as_json  # every verb takes --json, and a schema has no other form
    output.emit(recipe_view.json_schema())


app.command("import")(recipe_import.import_recipes)
app.command("export")(recipe_export.export_recipe)
