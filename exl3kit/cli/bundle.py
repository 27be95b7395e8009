"""`kit bundle save|load`: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exl3kit.cli import args, output, teaching
from exl3kit.words import counted

if TYPE_CHECKING:
    from exl3kit.built_image import BuiltImage
    from exl3kit.bundle import Writer
    from exl3kit.nodes import Node
    from exl3kit.progress import Progress, Stage
    from exl3kit.recipe import Recipe

    Found = tuple[Node, BuiltImage, list[str]]

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
    import tempfile
    from contextlib import ExitStack

    from exl3kit import bundle, recipes
    from exl3kit.cli.serve import stoppable
    from exl3kit.nodes import open_nodes
    from exl3kit.timings import Run

    progress = output.progress(Run("bundle save", " ".join(names), nodes), as_json=as_json)
    loaded = [recipes.load(name) for name in names]
    folder = file.absolute().parent
    with stoppable(), bundle.beside(file.absolute()) as out, ExitStack() as stack:
        spool = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".kit-bundle-", dir=folder)))
        found = _images(loaded, stack.enter_context(open_nodes(nodes))) if images else []
        files = _sources(loaded, progress) if sources else []
        if kit:
            with progress.stage("the kit's wheels"):
                files += bundle.kit_wheels(spool)
        if models:
            files += [member for recipe in loaded for member in _model(recipe)]
        total = sum(path.stat().st_size for _, path in files) + sum(built.size for _, built, _ in found)
        with progress.stage("bundle", total=total) as stage:
            _write(bundle.Writer(out, stage), loaded, files, found, spool, stage)
    progress.summary()
    written = bundle.read(file)
    if as_json:
        output.emit(_told(written))
    else:
        output.console().print(f"{file}: {file.stat().st_size / 1e9:.2f} GB, {len(written.members)} files")


def _images(loaded: list[Recipe], opened: list[Node]) -> list[Found]:
    """(node, image, recipes) of each image that the recipes have today."""
    from exl3kit import bundle, lock

    stamps: dict[str, list[str]] = {}
    for recipe in loaded:
        stamps.setdefault(lock.make_lock(recipe).stamp, []).append(recipe.name)
    return bundle.saved_images(opened, stamps)


def _sources(loaded: list[Recipe], progress: Progress) -> list[tuple[str, Path]]:
    """(name, path) of everything that the recipes' images are built from, fetched where it is not there yet."""
    from exl3kit import paths, wheelhouse

    every = [wheelhouse.of(recipe) for recipe in loaded]
    for one in every:
        wheelhouse.fetch(one, progress)
    cache = paths.cache_dir()
    return [
        (f"cache/{path.relative_to(cache)}", path) for path in sorted({path for one in every for path in one.files()})
    ]


def _model(recipe: Recipe) -> list[tuple[str, Path]]:
    """(name, path) of the files of a recipe's checkpoint."""
    from exl3kit.errors import KitError

    if recipe.model.path is None:
        raise KitError(
            "a bundle carries checkpoints that lie in a folder",
            where=f"recipe {recipe.name}",
            why="this recipe's comes from a hub",
            next_step="`kit weights fetch`, then a recipe with model.path",
        )
    folder = Path(recipe.model.path)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [(f"models/{folder.name}/{path.relative_to(folder).as_posix()}", path) for path in files]


def _write(
    writer: Writer,
    loaded: list[Recipe],
    files: list[tuple[str, Path]],
    found: list[Found],
    spool: Path,
    stage: Stage,
) -> None:
    """Everything into the bundle, its index last."""
    from exl3kit import bundle

    for name, path in files:
        stage.say(path.name)
        writer.add_file(name, path)
    told = []
    for node, built, of in found:
        stage.say(built.tag)
        writer.add_stream(f"images/{built.stamp}.tar", bundle.image_members(node, built), spool)
        told.append({"stamp": built.stamp, "recipes": of, "platform": built.platform, "layers": list(built.layers)})
    writer.finish([recipe.name for recipe in loaded], told)


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
            progress.tell(f"in the bundle for now: {counted(len(found.images), 'image')}; name --nodes to load them")
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
