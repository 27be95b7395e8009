"""`kit image status|prune` and `kit rollback`: parse, call, print."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from exl3kit.cli import args, output, teaching

if TYPE_CHECKING:
    from exl3kit.image_store import Held
    from exl3kit.lock import Lock

app = teaching.App("Images of the kit on nodes.")


@app.command()
def status(
    recipe: Annotated[str | None, args.recipe("Say which images match this tree's recipe.")] = None,
    nodes: args.NodesOption = "local",
    sets: args.SetOption = None,
    as_json: args.JsonOption = False,
) -> None:
    """Show each node's images: stamp, match, layers, size, age, users. With RECIPE, exit 5 unless all nodes match."""
    from exl3kit import image_store, lock, recipes
    from exl3kit.errors import ExitCode
    from exl3kit.nodes import open_nodes

    locked = lock.make_lock(recipes.load(recipe, sets or ())) if recipe else None
    with open_nodes(nodes) as opened:
        held = image_store.inventory(opened)
        differing = image_store.differing(opened, locked.stamp) if locked else {}
    if as_json:
        images = {name: [fields(one, locked) for one in found] for name, found in held.items()}
        wanted = {"stamp": locked.stamp, "match": not differing, "differing": differing} if locked else {}
        output.emit({"nodes": images, **wanted})
    else:
        _show(held, locked)
        for name, what in differing.items():
            output.console().print(f"{name} {what}", markup=False)
    if differing:
        raise typer.Exit(int(ExitCode.VERIFICATION))


def fields(one: Held, locked: Lock | None) -> dict[str, Any]:
    """One image as `--json` prints it."""
    match = {"match": one.image.stamp == locked.stamp} if locked else {}
    return {
        **match,
        "stamp": one.image.stamp,
        "tag": one.image.tag,
        "recipes": list(one.names),
        "previous_of": list(one.previous_of),
        "layers": list(one.image.layers),
        "platform": one.image.platform,
        "size": one.image.size,
        "made": one.made.isoformat(),
        "age_seconds": round(one.age_seconds),
        "containers": list(one.users),
    }


def _show(held: dict[str, list[Held]], locked: Lock | None) -> None:
    from exl3kit.cli.sheets import Sheet

    table = Sheet("node", "stamp", "match", "recipe", "layers", "size", "age", "used by")
    for node, found in held.items():
        for one in found:
            match = "-" if locked is None else "yes" if one.image.stamp == locked.stamp else "no"
            names = ", ".join([*one.names, *(f"{name} (previous)" for name in one.previous_of)])
            layers = f"{len(one.image.layers)}, top {one.image.layers[-1].removeprefix('sha256:')[:8]}"
            size = f"{one.image.size / 1e9:.2f} GB"
            row = (node, one.image.stamp[:12], match, names, layers, size, age(one.age_seconds), ", ".join(one.users))
            table.add_row(*row)
        if not found:
            table.add_row(node, "no image of the kit")
    output.console().print(table)


def age(seconds: float) -> str:
    """Seconds for people: `5 min`, `3 h`, `12 days`."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


@app.command()
def prune(
    nodes: args.NodesOption = "local",
    keep: Annotated[int, typer.Option("--keep", min=1, help="How many of the newest images stay.")] = 3,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go; remove nothing.")] = False,
    as_json: args.JsonOption = False,
) -> None:
    """Remove old images; never one that a container uses, that a recipe's tag leads to, or that rollback needs."""
    from exl3kit import image_store
    from exl3kit.nodes import open_nodes

    with open_nodes(nodes) as opened:
        removals = image_store.prune(opened, keep, dry_run=dry_run)
    if as_json:
        told = [{"node": one.node, "tag": one.tag, "size": one.size} for one in removals]
        output.emit({"removed": [] if dry_run else told, "would_remove": told if dry_run else []})
        return
    for one in removals:
        word = "would remove" if dry_run else "removed"
        output.console().print(f"{one.node}: {word} {one.tag} ({one.size / 1e9:.2f} GB, shared layers included)")
    if not removals:
        output.console().print("nothing to remove")


def rollback(
    recipe: args.RecipeArg,
    nodes: args.NodesOption = "local",
    to: Annotated[
        str | None, typer.Option("--to", metavar="STAMP", help="Which image; the previous one when left out.")
    ] = None,
    as_json: args.JsonOption = False,
) -> None:
    """Bring an earlier image of a recipe back on all nodes, from one that has it; builds and restarts nothing."""
    from exl3kit import image_store
    from exl3kit.cli.serve import deployment_name, stoppable
    from exl3kit.nodes import open_nodes
    from exl3kit.timings import Run

    name = deployment_name(recipe)
    progress = output.progress(Run("rollback", name, nodes), as_json=as_json)
    with stoppable(), open_nodes(nodes) as opened:
        built = image_store.bring_back(opened, name, to or image_store.previous(opened, name), progress)
    progress.summary()
    if as_json:
        output.emit({"recipe": name, "stamp": built.stamp, "tag": built.tag, "seconds": progress.seconds})
        return
    console = output.console()
    console.print(f"{name} is {built.tag} again on {nodes}")
    console.print(f"  next: kit up {recipe} --stamp {built.stamp[:12]} --nodes {nodes}")
