"""`kit up`, `down`, `status`, `logs`, `render`: parse, call, print."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exl3kit.cli import args, output

if TYPE_CHECKING:
    from exl3kit.serve import Serving

Nodes = Annotated[str, typer.Option("--nodes", help="ssh names separated by commas, a cluster file, or local.")]
DeploymentName = Annotated[
    str | None, typer.Argument(metavar="[RECIPE]", help="A recipe's name; all deployments when left out.")
]


@contextmanager
def stoppable() -> Iterator[None]:
    """Let SIGTERM end the verb as Ctrl-C does: what was started is taken away again."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def up(
    recipe: args.RecipeArg,
    nodes: Nodes = "local",
    sets: args.SetOption = None,
    ready: Annotated[float, typer.Option("--ready", help="Seconds until the first answer must have come.")] = 1800.0,
    as_json: args.JsonOption = False,
) -> None:
    """Serve a recipe: image and weights to the nodes, ranks started, a real completion and every receipt checked."""
    from exl3kit import recipes, serve
    from exl3kit.nodes import open_nodes
    from exl3kit.progress import Progress

    console = output.console(as_json=as_json)
    progress = Progress(console)
    loaded = recipes.load(recipe, sets or ())
    with stoppable(), open_nodes(nodes) as opened:
        serving = serve.up(loaded, opened, progress, ready_s=ready)
    progress.summary()
    if as_json:
        output.emit({**as_fields(serving), "seconds": progress.seconds, "wall_clock": round(progress.total_seconds, 2)})
        return
    word = "serves" if serving.started else "was serving already"
    console.print(f"{serving.deployment.served_name} {word} on {serving.head.node.name}: {serving.url}")


def as_fields(serving: Serving) -> dict[str, Any]:
    """A serving deployment as the object that `--json` prints."""
    deployment = serving.deployment
    return {
        "deployment": deployment.name,
        "model": deployment.served_name,
        "stamp": deployment.stamp,
        "image": deployment.image,
        "generation": serving.head.label("generation"),
        "url": serving.url,
        "node": serving.head.node.name,
        "started": serving.started,
        "probe": {"answer": serving.answer.text, "tokens": serving.answer.tokens, "seconds": serving.answer.seconds},
        "ranks": serving.receipts,
    }


def down(recipe: args.RecipeArg, nodes: Nodes = "local", as_json: args.JsonOption = False) -> None:
    """Stop a deployment on every node and remove its containers and network; image and weights stay."""
    from exl3kit import containers
    from exl3kit.nodes import open_nodes
    from exl3kit.progress import Progress

    console = output.console(as_json=as_json)
    progress = Progress(console)
    name = deployment_name(recipe)
    with open_nodes(nodes) as opened, progress.stage("stop the ranks") as stage:
        removed = containers.take_down(opened, name)
        stage.conclude(", ".join(removed) or f"no rank of {name} was there")
    if as_json:
        output.emit({"deployment": name, "removed": removed, "seconds": progress.seconds})


def deployment_name(recipe: str) -> str:
    """The deployment that a recipe's reference means: the recipe's name, or the reference when no recipe is called so.

    What runs may come from a recipe that is no longer here, and must still be stopped.
    """
    from exl3kit import recipes
    from exl3kit.errors import KitError

    try:
        return recipes.load(recipe).name
    except KitError:
        if "/" in recipe or recipe.endswith((".yaml", ".yml")):
            raise
        return recipe


def status(recipe: DeploymentName = None, nodes: Nodes = "local", as_json: args.JsonOption = False) -> None:
    """What stands on the nodes: ranks, state, stamp, generation and receipts."""
    from exl3kit import status as statuses
    from exl3kit.errors import ExitCode, KitError
    from exl3kit.nodes import open_nodes

    with open_nodes(nodes) as opened:
        told = statuses.status(opened, deployment_name(recipe) if recipe else None)
    if as_json:
        output.emit({"deployments": told})
    elif told:
        output.console().print(table(told))
    else:
        output.console().print(f"nothing of {recipe or 'the kit'} stands on {nodes}")
    if mixed := [one["deployment"] for one in told if one["state"] == "mismatch"]:
        error = KitError(
            "its ranks loaded different checkpoints, so no answer of it means anything",
            where=mixed[0],
            next_step=f"`kit down {mixed[0]}`, then `kit up`, which compares the weights first",
            code=ExitCode.VERIFICATION,
        )
        raise typer.Exit(output.refuse(error, as_json=False))


def table(told: list[dict[str, Any]]) -> Any:
    """Deployments as a table, one row per rank."""
    from rich.table import Table

    shown = Table(box=None, pad_edge=False)
    for column in ("deployment", "state", "rank", "node", "container", "trellis", "stamp", "generation", "note"):
        shown.add_column(column)
    for one in told:
        for rank in one["ranks"]:
            held = sum(receipt["trellis_bytes"] for receipt in rank["receipts"])
            note = rank["unhealthy"] or ""
            row = (one["deployment"], one["state"], str(rank["rank"]), rank["node"], rank["state"])
            shown.add_row(*row, f"{held / 1e6:.1f} MB" if held else "-", one["stamp"][:12], one["generation"], note)
    return shown


def logs(
    recipe: args.RecipeArg,
    nodes: Nodes = "local",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the ranks end; Ctrl-C detaches.")] = False,
    tail: Annotated[int, typer.Option("--tail", min=0, help="Lines of each rank to begin with.")] = 100,
    as_json: args.JsonOption = False,
) -> None:
    """The logs of all ranks, merged."""
    from exl3kit import containers
    from exl3kit import logs as merged
    from exl3kit.errors import KitError
    from exl3kit.nodes import open_nodes

    name = deployment_name(recipe)
    if follow and as_json:
        raise KitError(
            "--follow has no end, and --json prints one object at the end", next_step="leave one of them out"
        )
    with open_nodes(nodes) as opened:
        standing = containers.find(opened, name)
        if not standing:
            raise KitError(f"no rank of {name} is there", where=nodes, next_step=f"`kit up {recipe} --nodes {nodes}`")
        if as_json:
            told = [
                {"rank": one.rank, "node": one.node.name, "line": text}
                for one, text in merged.lines(standing, tail=tail)
            ]
            output.emit({"deployment": name, "lines": told})
            return
        came = merged.follow(standing, tail=tail) if follow else merged.lines(standing, tail=tail)
        try:
            for one, text in came:
                print(f"rank{one.rank}@{one.node.name} | {text}", flush=follow)
        except KeyboardInterrupt:  # following changes nothing on the nodes, so leaving it is its normal end
            return


def render(
    recipe: args.RecipeArg,
    out: Annotated[Path, typer.Option("--out", help="Folder to write to; one folder per node in it.")],
    nodes: Nodes = "local",
    sets: args.SetOption = None,
    as_json: args.JsonOption = False,
) -> None:
    """Write the files that `kit up` would start: per node a compose file and env files; starts nothing."""
    from exl3kit import recipes, serve
    from exl3kit.nodes import open_nodes

    loaded = recipes.load(recipe, sets or ())
    with open_nodes(nodes) as opened:
        deployment, written = serve.render_files(loaded, opened, out)
    if as_json:
        ranks = [
            {
                "rank": rank.rank,
                "node": rank.node,
                "container": rank.container,
                "argv": rank.argv,
                "model_dir": rank.model_dir,
            }
            for rank in deployment.ranks
        ]
        fields = {"deployment": deployment.name, "stamp": deployment.stamp, "spec": deployment.spec}
        output.emit({**fields, "files": [str(path) for path in written], "ranks": ranks})
        return
    for path in written:
        print(path)
