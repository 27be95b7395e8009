"""`kit lock`: show the lock of a recipe, or look its pins up anew."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from exl3kit.cli import args, output

if TYPE_CHECKING:
    from exl3kit.recipe import Recipe


def lock(
    recipe: args.RecipeArg,
    update: Annotated[
        bool, typer.Option("--update", help="Look up versions, wheels and digests, and write them.")
    ] = False,
    sets: args.SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object: the lock itself.")] = False,
) -> None:
    """Show every input of a recipe's image; its sha256 is the stamp."""
    from exl3kit import lock as locks
    from exl3kit import recipes

    loaded = recipes.load(recipe, sets or [])
    if update:
        _update(loaded, as_json)
        return
    made = locks.make_lock(loaded)
    locks.remember(made)
    if as_json:
        output.emit(made.data)
        return
    console = output.console()
    data = made.data
    console.print(f"stamp {made.stamp}")
    for key in ("platform", "python", "vllm", "arch", "rates", "codebooks", "build_args"):
        console.print(f"{key:<10} {data[key]}")
    base = {key: value for key, value in data["base"].items() if key != "packages"}
    console.print(f"{'base':<10} {base}, {len(data['base'].get('packages', {}))} packages")
    for wheel in data["wheels"]:
        console.print(f"wheel {wheel['sha256'][:12]} {wheel['filename']}")
    for entry in made.files:
        console.print(f"file  {entry.sha256[:12]} {'x' if entry.executable else '-'} {entry.path}")


def _update(loaded: Recipe, as_json: bool) -> None:
    from exl3kit import kernel_builder, paths, pins, resolve

    console = output.console(as_json=as_json)
    progress = output.progress(as_json=as_json)
    if loaded.model.repo is not None and loaded.model.revision is None:
        from exl3kit import hub

        with progress.stage(f"branches of {loaded.model.repo}"):
            branches = hub.branches(loaded.model.repo)
        for name, commit in branches.items():
            console.print(f"model.revision: {commit}   # {name} ; write the one you want", markup=False)
    updated = resolve.update(loaded.image, progress)
    if loaded.image.arch:
        with progress.stage("packages of the kernels' builder"):
            kernel_builder.update()
    before = pins.read(updated.pins.path) if updated.pins.path.exists() else None
    changed = before != updated.pins
    if changed:
        updated.pins.save()
    for note in updated.notes:
        console.print(note)
    where = paths.shown(updated.pins.path)
    console.print(f"{where} " + ("written; commit it" if changed else "is up to date"))
    if as_json:
        output.emit(
            {"file": where, "changed": changed, "notes": updated.notes, "unset": updated.pins.unset()},
        )
