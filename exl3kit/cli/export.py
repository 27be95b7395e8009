"""`kit export`: a deployment in the form of other tools."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exl3kit.cli import args, output, teaching

if TYPE_CHECKING:
    from collections.abc import Mapping

    from exl3kit.deployment import Deployment

app = teaching.App("A deployment in the form of other tools.")


@dataclass(frozen=True)
class Target:
    """Options that say which nodes' files are written, and where to."""

    out: Annotated[Path, typer.Option("--out", help="Folder to write to; one folder per node in it.")]
    nodes: args.NodesOption = "local"
    sets: args.SetOption = None

    def planned(self, recipe: str) -> Deployment:
        """The deployment of a recipe on these nodes."""
        return planned(recipe, self.nodes, self.sets)

    def written(self, files: Mapping[str, str]) -> list[Path]:
        """Write the files of each node; gives their paths."""
        from exl3kit import render

        return render.write_files(files, self.out)


@app.command()
@args.spread
def compose(recipe: args.RecipeArg, target: Target, as_json: args.JsonOption = False) -> None:
    """The compose file and the env files of each node, as `kit render`; starts nothing."""
    from exl3kit import render

    deployment = target.planned(recipe)
    told(target.written(render.files(deployment)), deployment, as_json=as_json)


@app.command("docker-run")
@args.spread
def docker_run(recipe: args.RecipeArg, target: Target, as_json: args.JsonOption = False) -> None:
    """A script of plain `docker run` lines for each node, and its env files; starts nothing."""
    from exl3kit import elsewhere

    deployment = target.planned(recipe)
    told(target.written(elsewhere.docker_files(deployment)), deployment, as_json=as_json)


@app.command()
@args.spread
def systemd(recipe: args.RecipeArg, target: Target, as_json: args.JsonOption = False) -> None:
    """Units that run the compose file of each node, and the commands that install them; starts nothing."""
    from exl3kit import systemd as units

    deployment = target.planned(recipe)
    written = target.written(units.files(deployment))
    steps = units.steps(deployment)
    told(written, deployment, {"unit": units.unit_name(deployment), "install": steps}, as_json=as_json)
    for node, argvs in () if as_json else steps.items():
        print(f"\n# copy {target.out / node} to {node}; there, in that folder, as root (the image {deployment.image}")
        print("# and the weights must be there: `kit build`, `kit weights sync`)")
        for argv in argvs:
            print(shlex.join(argv))


@app.command()
def kubernetes(
    recipe: args.RecipeArg,
    image: Annotated[str, typer.Option("--image", help="The image's name in a registry that the cluster pulls from.")],
    claim: Annotated[str, typer.Option("--claim", help="PersistentVolumeClaim that holds the model.")],
    nodes: args.NodesOption = "local",
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


def told(written: list[Path], deployment: Deployment, more: dict[str, Any] | None = None, *, as_json: bool) -> None:
    """The files that were written."""
    if as_json:
        fields = {"deployment": deployment.name, "image": deployment.image, **(more or {})}
        output.emit({**fields, "files": [str(path) for path in written]})
        return
    for path in written:
        print(path)
