"""`kit build`: make the image of a recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from exl3kit.cli import args, output

if TYPE_CHECKING:
    from exl3kit.lock import Lock
    from exl3kit.recipe import Recipe


def build(
    recipe: args.RecipeArg,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be built; needs no engine.")] = False,
    explain: Annotated[
        str | None, typer.Option(metavar="OLD", help="Say which inputs changed since OLD: a stamp or a lock file.")
    ] = None,
    sets: args.SetOption = None,
    as_json: args.JsonOption = False,
) -> None:
    """Build the image of a recipe; nothing to do when its stamp is there already."""
    from exl3kit import lock as locks
    from exl3kit import recipes

    loaded = recipes.load(recipe, sets or [])
    lock = locks.make_lock(loaded)
    changes = locks.explain(locks.recall(explain), lock.data) if explain is not None else None
    locks.remember(lock)
    if as_json:
        output.emit(summary(loaded, lock, changes))
        return
    console = output.console()
    console.print(f"stamp {lock.stamp}")
    console.print(f"tag   {lock.tag}")
    console.print(f"from  {described(lock)}")
    if changes is not None:
        console.print(f"since {explain}: " + ("nothing changed" if not changes else f"{len(changes)} input(s) changed"))
        for change in changes:
            console.print(f"  {change}")


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
