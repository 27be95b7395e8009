"""`kit export`: a deployment in the form of other tools."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from exl3kit.cli import args, output
from exl3kit.cli.serve import Nodes

app = typer.Typer(help="A deployment in the form of other tools.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def export() -> None:
    """A deployment in the form of other tools."""


@app.command()
def systemd(
    recipe: args.RecipeArg,
    out: Annotated[Path, typer.Option("--out", help="Folder to write to; one folder per node in it.")],
    nodes: Nodes = "local",
    sets: args.SetOption = None,
    as_json: args.JsonOption = False,
) -> None:
    """Units that run the compose file of each node, and the commands that install them; starts nothing."""
    from exl3kit import recipes, render, serve
    from exl3kit import systemd as units
    from exl3kit.nodes import open_nodes

    loaded = recipes.load(recipe, sets or ())
    with open_nodes(nodes) as opened:
        deployment = serve.survey(loaded, opened).plan(serve.new_generation())
    written = render.write_files(units.files(deployment), out)
    steps = units.steps(deployment)
    if as_json:
        fields = {"deployment": deployment.name, "unit": units.unit_name(deployment), "image": deployment.image}
        output.emit({**fields, "files": [str(path) for path in written], "install": steps})
        return
    for path in written:
        print(path)
    for node, argvs in steps.items():
        print(f"\n# copy {out / node} to {node}; there, in that folder, as root (the image {deployment.image} and the")
        print("# weights must be there: `kit build`, `kit weights copy`)")
        for argv in argvs:
            print(shlex.join(argv))
