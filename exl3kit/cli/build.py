"""`kit build` and `kit fetch`: make the image of a recipe, and get what it is made of."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exl3kit.cli import args, output
from exl3kit.words import counted

if TYPE_CHECKING:
    from exl3kit.built_image import BuiltImage
    from exl3kit.lock import Lock
    from exl3kit.progress import Progress
    from exl3kit.recipe import Recipe


def build(
    recipe: args.RecipeArg,
    other: Annotated[
        str | None, typer.Argument(metavar="LOCK", help="With --explain: compare RECIPE with this, lock with lock.")
    ] = None,
    nodes: Annotated[
        str, args.nodes("Build on the first of these nodes' engines, copy to the others.", "--node")
    ] = "local",
    on: Annotated[
        str | None, typer.Option("--on", metavar="NODE", help="Build on this node instead of the first.")
    ] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Fetch nothing; refuse when something is missing.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be built; needs no engine.")] = False,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Say which inputs changed since the recipe's image there, or between two locks, stamps or recipes; "
            "build nothing.",
        ),
    ] = False,
    since: Annotated[
        str | None, typer.Option(metavar="OLD", help="With --dry-run: what changed since OLD, a stamp or a lock file.")
    ] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Build anew what is there already.")] = False,
    sets: args.SetOption = None,
    as_json: args.JsonOption = False,
) -> None:
    """Build the image of a recipe; nothing to do when its stamp is there already."""
    from exl3kit import lock as locks
    from exl3kit import offline as network
    from exl3kit import recipes

    if other is not None:
        _compare(recipe, other, nodes, explain=explain, as_json=as_json)
        return
    loaded = recipes.load(recipe, sets or [])
    lock = locks.make_lock(loaded)
    changes = locks.explain(locks.recall(since), lock.data) if since is not None else None
    locks.remember(lock)
    if offline:
        network.choose()
    if on is not None and nodes == "local":
        nodes = on
    if dry_run or since is not None:
        _show_plan(loaded, lock, changes, since, as_json=as_json)
    elif explain:
        _explain(loaded, lock, nodes, as_json=as_json)
    else:
        _build(loaded, lock, nodes, on, cache=not no_cache, as_json=as_json)


def fetch(
    names: args.RecipesArg,
    sets: args.SetOption = None,
    as_json: args.JsonOption = False,
) -> None:
    """Fetch what the images of recipes are built from, checked by hash; `kit build --offline` then needs no network."""
    from exl3kit import pins, recipes, wheelhouse
    from exl3kit.cli.serve import stoppable
    from exl3kit.timings import Run

    progress = output.progress(Run("fetch", " ".join(names)), as_json=as_json)
    with stoppable():
        sources = [wheelhouse.of(recipes.load(name, sets or [])) for name in names]
        for one in sources:
            wheelhouse.fetch(one, progress)
            if isinstance(one.pinned.base, pins.Registry):
                progress.tell(
                    f"{one.pinned.base.reference} stays in its registry: `kit bundle save` can carry an image"
                )
    files = {path for one in sources for path in one.files()}
    progress.summary()
    if as_json:
        output.emit({"files": len(files), "size": wheelhouse.size(files), "seconds": progress.seconds})


def _compare(old: str, new: str, named: str, *, explain: bool, as_json: bool) -> None:
    """`kit build --explain OLD NEW`."""
    from exl3kit import lock as locks
    from exl3kit.errors import KitError

    if not explain:
        raise KitError("one recipe is built at a time", where=new, next_step="`kit build --explain A B` compares two")
    changes = locks.explain(_lock_data(old, named), _lock_data(new, named))
    if as_json:
        output.emit({"old": old, "new": new, "changes": changes})
        return
    for change in changes or [f"nothing differs between {old} and {new}"]:
        output.console().print(change, markup=False)


def _lock_data(reference: str, named: str) -> dict[str, Any]:
    """The lock that a file, a recipe, a stamp seen by this machine or an image on the nodes stands for."""
    from exl3kit import image_store, nodes, recipes
    from exl3kit import lock as locks
    from exl3kit.errors import KitError

    try:
        return locks.recall(reference)
    except KitError as unknown:
        if re.fullmatch(r"(exl3kit:)?[0-9a-f]{12,64}", reference):
            with nodes.open_nodes(named) as opened:
                return image_store.recall(opened, reference)[2].data
        try:
            return locks.make_lock(recipes.load(reference)).data
        except KitError:
            raise unknown from None


def _show_plan(recipe: Recipe, lock: Lock, changes: list[str] | None, since: str | None, *, as_json: bool) -> None:
    if as_json:
        output.emit(summary(recipe, lock, changes))
        return
    console = output.console()
    console.print(f"stamp {lock.stamp}")
    console.print(f"tag   {lock.tag}")
    console.print(f"from  {described(lock)}")
    if changes is not None:
        console.print(f"since {since}: {counted(len(changes), 'input') if changes else 'nothing'} changed")
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


def _build(recipe: Recipe, lock: Lock, named: str, on: str | None, *, cache: bool, as_json: bool) -> None:
    from exl3kit import image, nodes
    from exl3kit.cli.serve import stoppable
    from exl3kit.errors import KitError
    from exl3kit.timings import Run

    progress = output.progress(Run("build", recipe.name, named), as_json=as_json)
    with stoppable(), nodes.open_nodes(named) as opened:
        builder = next((node for node in opened if on in (None, node.name)), None)
        if builder is None:
            raise KitError(f"{on} is none of the nodes", where="--on", next_step=f"name one of {named}")
        changes = image.changes(builder, recipe, lock)
        for change in (changes or [])[:5]:
            progress.tell(f"since the last image: {change}")
        built = image.ensure(recipe, lock, opened, progress=progress, cache=cache, builder=on)
        names = [node.name for node in opened]
    progress.summary()
    if as_json:
        output.emit({**summary(recipe, lock, changes), "nodes": names, **_result(built, progress)})


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
