"""`kit weights fetch|verify|sync`: parse, call, print."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exl3kit.cli import args, output, teaching

if TYPE_CHECKING:
    from exl3kit.deployment import NodeFacts
    from exl3kit.nodes import Node
    from exl3kit.recipe import Recipe

app = teaching.App("Fetch, verify and copy a recipe's weights.")


@app.command("fetch")
def fetch(
    recipe: args.RecipeArg,
    nodes: Annotated[str, args.nodes("Where to; the first fetches, the others get a copy.")] = "local",
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="A file with the hub's token; else HF_TOKEN, else the login's.")
    ] = None,
    sets: args.SetOption = None,
    as_json: args.JsonOption = False,
) -> None:
    """Download model.repo at model.revision into Hugging Face's cache; goes on where it was broken off."""
    from exl3kit import hub, weight_verify
    from exl3kit import weights as weight_files
    from exl3kit.errors import ExitCode, KitError
    from exl3kit.timings import Run

    progress = output.progress(Run("weights fetch", recipe, nodes), as_json=as_json)
    with opened(recipe, sets, nodes) as (loaded, image, there, facts):
        model, first = loaded.model, there[0]
        if model.repo is None:
            where = f"{loaded.name}: model.path"
            raise KitError(
                "this recipe names a folder, and there is nothing to fetch", where=where, code=ExitCode.USAGE
            )
        repo, revision = weight_files.pinned(loaded)
        require_image(first, image, loaded)
        secret = hub.token(token_file)
        with progress.stage(f"fetch on {first.name}") as stage:
            folder = hub.fetch(first, facts[first.name], image, repo, revision, secret, stage)
        with progress.stage("verify"):
            held = weight_verify.verify(loaded, [first], facts, image, full=False)
    progress.summary()
    show_held(held, {"folder": folder, "node": first.name}, as_json=as_json)


@app.command("verify")
def verify(
    recipe: args.RecipeArg,
    nodes: args.NodesOption = "local",
    full: Annotated[bool, typer.Option("--full-hash", help="Read and hash every byte: minutes for 100 GiB.")] = False,
    sets: args.SetOption = None,
    as_json: args.JsonOption = False,
) -> None:
    """Hold the weights here and on every node against index, headers, sizes and each other. Exit 5: they differ."""
    from exl3kit import weight_verify
    from exl3kit.timings import Run

    progress = output.progress(Run("weights verify", recipe, nodes), as_json=as_json)
    with opened(recipe, sets, nodes) as (loaded, image, there, facts):
        for node in there:
            if not node.is_local:
                require_image(node, image, loaded)
        with progress.stage("verify"):
            held = weight_verify.verify(loaded, there, facts, image, full=full)
    show_held(held, {}, as_json=as_json)


@app.command("sync")
def sync(
    recipe: args.RecipeArg,
    nodes: args.NodesOption = "local",
    sets: args.SetOption = None,
    as_json: args.JsonOption = False,
) -> None:
    """Make every node have the weights: linked where they are, else copied over the fabric; drop the page cache."""
    from exl3kit import weights as weight_files
    from exl3kit.timings import Run

    console = output.console(as_json=as_json)
    progress = output.progress(Run("weights sync", recipe, nodes), as_json=as_json)
    with opened(recipe, sets, nodes) as (loaded, image, there, facts):
        for node in there:
            require_image(node, image, loaded)
        with progress.stage("look at the weights"):
            found = weight_files.survey(loaded, there, facts, image)
        stopped = threading.Event()
        with progress.stage("weights", total=found.size * len(there)) as stage:

            def advance(count: int) -> None:
                if stopped.is_set():
                    raise OSError("interrupted")
                stage.advance(count)

            told = weight_files.spread(there, facts, found, image, advance, stopped, progress.tell)
        folders = {node.name: weight_files.directory_on(node, facts[node.name], found) for node in there}
        with progress.stage("drop the page cache"):
            weight_files.drop_cache(there, folders)
    progress.summary()
    if as_json:
        done = {name: {"folder": folders[name], "done": what} for name, what in told.items()}
        output.emit({"digest": found.digest, "bytes": found.size, "nodes": done, "seconds": progress.seconds})
        return
    for name, what in told.items():
        console.print(f"{name}: {what}: {folders[name]}", markup=False)


@contextmanager
def opened(
    recipe: str, sets: Sequence[str] | None, nodes: str
) -> Iterator[tuple[Recipe, str, list[Node], dict[str, NodeFacts]]]:
    """The recipe, the tag of its image, the nodes and their facts."""
    from exl3kit import facts, lock, recipes
    from exl3kit.nodes import open_nodes

    loaded = recipes.load(recipe, sets or ())
    tag = lock.make_lock(loaded).tag
    with open_nodes(nodes) as there:
        yield loaded, tag, there, facts.gather(there)


def require_image(node: Node, image: str, recipe: Recipe) -> None:
    """The image does the work on a node; refuse one that lacks it."""
    from exl3kit import recipes
    from exl3kit.errors import ExitCode

    if not node.engine.images.list(name=image):
        raise node.error(
            f"the image {image} is not there, and it does this work on a node",
            next_step=f"`kit build {recipes.said(recipe)}` with the same --nodes",
            code=ExitCode.PREFLIGHT,
        )


def show_held(held: Sequence[Any], more: dict[str, Any], *, as_json: bool) -> None:
    """Print what each machine holds and leave with the verdict's exit code."""
    from exl3kit import weight_verify
    from exl3kit.errors import ExitCode

    if as_json:
        told = [
            {
                "where": one.where,
                "folder": one.folder,
                "state": one.state,
                "bytes": one.size,
                "files": len(one.files or ()),
                "problems": one.problems,
                "seconds": round(one.seconds, 2),
            }
            for one in held
        ]
        output.emit({"state": weight_verify.code_of(held), "held": told, **more})
    else:
        console = output.console()
        for one in held:
            size = f"{one.size / 1e9:.3f} GB in {len(one.files or ())} files, {one.seconds:.1f} s"
            console.print(f"{one.state:<8} {one.where}: {one.folder} ({size})", markup=False)
            for problem in one.problems:
                console.print(f"         {problem}", markup=False)
    codes = {"whole": ExitCode.OK, "missing": ExitCode.PREFLIGHT, "differs": ExitCode.VERIFICATION}
    code = codes[weight_verify.code_of(held)]
    if code:
        raise typer.Exit(int(code))
