"""`kit export`: a deployment in the form of other tools."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exl3kit.cli import args, output
from exl3kit.cli.serve import Nodes

if TYPE_CHECKING:
    from exl3kit.deployment import Deployment

app = typer.Typer(help="A deployment in the form of other tools.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def export() -> None:
    """A deployment in the form of other tools."""


Out = Annotated[Path, typer.Option("--out", help="Folder to write to; one folder per node in it.")]


@app.command()
def compose(
    recipe: args.RecipeArg,
    out: Out,
    nodes: Nodes = "local",
    sets: args.SetOption = None,
    as_json: args.JsonOption = False,
) -> None:
    """The compose file and the env files of each node, as `kit render`; starts nothing."""
    from exl3kit import render

    deployment = planned(recipe, nodes, sets)
    told(render.write_files(render.files(deployment), out), deployment, as_json=as_json)


@app.command("docker-run")
def docker_run(
    recipe: args.RecipeArg,
    out: Out,
    nodes: Nodes = "local",
    sets: args.SetOption = None,
    as_json: args.JsonOption = False,
) -> None:
    """A script of plain `docker run` lines for each node, and its env files; starts nothing."""
    from exl3kit import elsewhere, render

    deployment = planned(recipe, nodes, sets)
    told(render.write_files(elsewhere.docker_files(deployment), out), deployment, as_json=as_json)


@app.command()
def kubernetes(
    recipe: args.RecipeArg,
    image: Annotated[str, typer.Option("--image", help="The image's name in a registry that the cluster pulls from.")],
    claim: Annotated[str, typer.Option("--claim", help="PersistentVolumeClaim that holds the model.")],
    nodes: Nodes = "local",
    sets: args.SetOption = None,
    as_json: args.JsonOption = False,
) -> None:
    """A LeaderWorkerSet manifest, printed as JSON, which kubectl reads as it does YAML; starts nothing."""
    from exl3kit import elsewhere

    del as_json  # a manifest is one JSON object in either case
    output.emit(elsewhere.leader_worker_set(planned(recipe, nodes, sets), image, claim))


def planned(recipe: str, nodes: str, sets: list[str] | None) -> Deployment:
    """The deployment of a recipe on these nodes."""
    from exl3kit import recipes, serve
    from exl3kit.nodes import open_nodes

    with open_nodes(nodes) as opened:
        return serve.survey(recipes.load(recipe, sets or ()), opened).plan(serve.new_generation())


def told(written: list[Path], deployment: Deployment, *, as_json: bool) -> None:
    """The files that were written."""
    if as_json:
        fields = {"deployment": deployment.name, "image": deployment.image}
        output.emit({**fields, "files": [str(path) for path in written]})
        return
    for path in written:
        print(path)


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
