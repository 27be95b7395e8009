"""`kit build`: make the image of a recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from exl3kit.cli import output
from exl3kit.cli.args import JsonOption, RecipeArg, SetOption

if TYPE_CHECKING:
    from exl3kit.built_image import BuiltImage
    from exl3kit.lock import Lock
    from exl3kit.progress import Progress
    from exl3kit.recipe import Recipe


def build(
    recipe: RecipeArg,
    nodes: Annotated[
        str,
        typer.Option(
            "--nodes", "--node", metavar="NAMES", help="Build on the first of these nodes' engines, copy to the others."
        ),
    ] = "local",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be built; needs no engine.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say which inputs changed since the recipe's image there; build nothing.")
    ] = False,
    since: Annotated[
        str | None, typer.Option(metavar="OLD", help="With --dry-run: what changed since OLD, a stamp or a lock file.")
    ] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Build anew what is there already.")] = False,
    sets: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Build the image of a recipe; nothing to do when its stamp is there already."""
    from exl3kit import lock as locks
    from exl3kit import recipes

    loaded = recipes.load(recipe, sets or [])
    lock = locks.make_lock(loaded)
    changes = locks.explain(locks.recall(since), lock.data) if since is not None else None
    locks.remember(lock)
    if dry_run or since is not None:
        _show_plan(loaded, lock, changes, since, as_json=as_json)
    elif explain:
        _explain(loaded, lock, nodes, as_json=as_json)
    else:
        _build(loaded, lock, nodes, cache=not no_cache, as_json=as_json)


def _show_plan(recipe: Recipe, lock: Lock, changes: list[str] | None, since: str | None, *, as_json: bool) -> None:
    if as_json:
        output.emit(summary(recipe, lock, changes))
        return
    console = output.console()
    console.print(f"stamp {lock.stamp}")
    console.print(f"tag   {lock.tag}")
    console.print(f"from  {described(lock)}")
    if changes is not None:
        console.print(f"since {since}: " + ("nothing changed" if not changes else f"{len(changes)} input(s) changed"))
        for change in changes:
            console.print(f"  {change}")


def _explain(recipe: Recipe, lock: Lock, named: str, *, as_json: bool) -> None:
    from exl3kit import image, nodes

    with nodes.open_nodes(named) as opened:
        changes = {node.name: image.changes(node, recipe, lock) for node in opened}
    if as_json:
        output.emit({**summary(recipe, lock, None), "changes": changes})
        return
    console = output.console()
    for name, told in changes.items():
        if told is None:
            console.print(f"{name} has no image of {recipe.name} yet: all of it would be built")
        elif not told:
            console.print(f"{name} has the image of this very tree, {lock.tag}: nothing would be built")
        for change in told or []:
            console.print(f"{name}: {change}")


def _build(recipe: Recipe, lock: Lock, named: str, *, cache: bool, as_json: bool) -> None:
    from exl3kit import image, nodes
    from exl3kit.cli.serve import stoppable
    from exl3kit.progress import Progress

    progress = Progress(output.console(as_json=as_json))
    with stoppable(), nodes.open_nodes(named) as opened:
        changes = image.changes(opened[0], recipe, lock)
        for change in (changes or [])[:5]:
            progress.tell(f"since the last image: {change}")
        built = image.ensure(recipe, lock, opened, progress=progress, cache=cache)
        names = [node.name for node in opened]
    if as_json:
        output.emit({**summary(recipe, lock, changes), "nodes": names, **_result(built, progress)})
    elif len(progress.timings) > 1:
        progress.summary()


def _result(built: BuiltImage, progress: Progress) -> dict[str, object]:
    """What a build adds to the plan in JSON; `seconds` is the wall clock."""
    return {
        "layers": list(built.layers),
        "size": built.size,
        "built": progress.seconds.get("image", 0) > 0,
        "stages": progress.seconds,
        "seconds": round(progress.total_seconds, 2),
    }


def summary(recipe: Recipe, lock: Lock, changes: list[str] | None) -> dict[str, object]:
    """What a dry run prints as JSON."""
    fields: dict[str, object] = {
        "recipe": recipe.name,
        "stamp": lock.stamp,
        "short": lock.short,
        "tag": lock.tag,
        "platform": lock.data["platform"],
        "build_args": lock.data["build_args"],
        "inputs": {
            "files": [entry.path for entry in lock.files],
            "wheels": len(lock.data["wheels"]),
            "base": {key: value for key, value in lock.data["base"].items() if key != "packages"},
            "packages": len(lock.data["base"].get("packages", {})),
        },
    }
    return fields if changes is None else {**fields, "changes": changes}


def described(lock: Lock) -> str:
    """The inputs in one line."""
    base = lock.data["base"]
    root = base.get("image") or f"{base['rootfs']} ({len(base['packages'])} packages)"
    vllm = lock.data["vllm"]
    return (
        f"{root}, {vllm['distribution']} {vllm['version']}, {len(lock.data['wheels'])} wheels, "
        f"{len(lock.files)} files, {lock.data['platform']}"
    )
