"""`kit bundle save|load`: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exl3kit.cli import args, output, teaching

if TYPE_CHECKING:
    from exl3kit.progress import Progress
    from exl3kit.recipe import Recipe

app = teaching.App("Everything a site without a network needs, in one file.")
File = Annotated[Path, typer.Argument(metavar="FILE", help="The bundle, a tar file.", show_default=False)]


@app.command()
def save(
    file: File,
    names: args.RecipesArg,
    nodes: args.NodesOption = "local",
    images: Annotated[bool, typer.Option("--images/--no-images", help="The built images, from the nodes.")] = True,
    sources: Annotated[
        bool, typer.Option("--sources/--no-sources", help="What images are built from: wheels and root file systems.")
    ] = True,
    kit: Annotated[bool, typer.Option("--kit/--no-kit", help="The wheels of the kit's own environment.")] = True,
    models: Annotated[bool, typer.Option("--models/--no-models", help="The recipes' checkpoints.")] = False,
    as_json: args.JsonOption = False,
) -> None:
    """Write a bundle of recipes: images, their sources and the kit's own wheels, with a hash of everything."""
    from exl3kit import bundle, recipes
    from exl3kit.cli.serve import stoppable
    from exl3kit.timings import Run

    progress = output.progress(Run("bundle save", " ".join(names), nodes), as_json=as_json)
    loaded = [recipes.load(name) for name in names]
    with stoppable(), bundle.beside(file.absolute()) as out:
        _write(
            loaded, nodes, out, file.absolute().parent, progress, images=images, sources=sources, kit=kit, models=models
        )
    progress.summary()
    written = bundle.read(file)
    if as_json:
        output.emit(_told(written))
    else:
        output.console().print(f"{file}: {file.stat().st_size / 1e9:.2f} GB, {len(written.members)} files")


def _write(
    loaded: list[Recipe],
    named: str,
    out: object,
    beside: Path,
    progress: Progress,
    *,
    images: bool,
    sources: bool,
    kit: bool,
    models: bool,
) -> None:
    import tempfile

    from exl3kit import bundle, lock, nodes, paths, wheelhouse

    told = []
    with progress.stage("bundle") as stage, tempfile.TemporaryDirectory(prefix=".kit-bundle-", dir=beside) as folder:
        writer = bundle.Writer(out, stage)  # type: ignore[arg-type]
        if sources:
            every = [wheelhouse.of(recipe) for recipe in loaded]
            for one in every:
                wheelhouse.fetch(one, progress)
            for path in sorted({path for one in every for path in one.files()}):
                stage.say(path.name)
                writer.add_file(f"cache/{path.relative_to(paths.cache_dir())}", path)
        if kit:
            for name, path in bundle.kit_wheels(Path(folder)):
                writer.add_file(name, path)
        if models:
            for recipe in loaded:
                _add_model(writer, recipe)
        if images:
            stamps: dict[str, list[str]] = {}
            for recipe in loaded:
                stamps.setdefault(lock.make_lock(recipe).stamp, []).append(recipe.name)
            with nodes.open_nodes(named) as opened:
                for node, built, of in bundle.saved_images(opened, stamps):
                    stage.say(built.tag)
                    writer.add_stream(f"images/{built.stamp}.tar", bundle.image_members(node, built), Path(folder))
                    told.append({"stamp": built.stamp, "recipes": of, "platform": built.platform,
                                 "layers": list(built.layers)})  # fmt: skip
        writer.finish([recipe.name for recipe in loaded], told)


def _add_model(writer: object, recipe: Recipe) -> None:
    from exl3kit import bundle
    from exl3kit.errors import KitError

    assert isinstance(writer, bundle.Writer)
    if recipe.model.path is None:
        raise KitError(
            "a bundle carries checkpoints that lie in a folder",
            where=f"recipe {recipe.name}",
            why="this recipe's comes from a hub",
            next_step="`kit weights fetch`, then a recipe with model.path",
        )
    folder = Path(recipe.model.path)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            writer.add_file(f"models/{folder.name}/{path.relative_to(folder).as_posix()}", path)


@app.command()
def load(
    file: File,
    nodes: Annotated[str | None, args.nodes("Load the images there: ssh names, a cluster file, or local.")] = None,
    into: Annotated[Path, typer.Option("--models-into", help="Where checkpoints go.")] = Path("models"),
    as_json: args.JsonOption = False,
) -> None:
    """Check a bundle, then take from it: sources into the cache, images onto --nodes, checkpoints into a folder."""
    from exl3kit import bundle, paths
    from exl3kit.cli.serve import stoppable
    from exl3kit.nodes import open_nodes
    from exl3kit.timings import Run

    progress = output.progress(Run("bundle load", file.name, nodes or ""), as_json=as_json)
    found = bundle.read(file)
    with stoppable():
        with progress.stage("check the bundle", total=sum(member.size for member in found.members)) as stage:
            bundle.verify(found, stage)
            stage.conclude(f"{len(found.members)} files as they were saved")
        for kind, place in (("cache", paths.cache_dir()), ("kit", paths.cache_dir("kit")), ("models", into)):
            if found.of(kind):
                with progress.stage(kind, total=sum(member.size for member in found.of(kind))) as stage:
                    stage.conclude(f"{len(bundle.unpack(found, kind, place, stage))} files in {place}")
        if nodes is not None and found.images:
            with open_nodes(nodes) as opened:
                bundle.load_images(found, opened, progress)
        elif found.images:
            progress.tell(f"{len(found.images)} image(s) stay in the bundle: name --nodes to load them")
    if found.of("kit"):
        progress.tell(f"the kit without a network: PIP_NO_INDEX=1 PIP_FIND_LINKS={paths.cache_dir('kit')} ./kit.py")
    progress.summary()
    if as_json:
        output.emit({**_told(found), "seconds": progress.seconds})


def _told(found: object) -> dict[str, object]:
    from exl3kit import bundle

    assert isinstance(found, bundle.Bundle)
    return {
        "file": str(found.path),
        "recipes": list(found.recipes),
        "images": [{"stamp": one["stamp"], "platform": one["platform"]} for one in found.images],
        "files": {kind: len(found.of(kind)) for kind in bundle.KINDS},
        "size": sum(member.size for member in found.members),
    }
