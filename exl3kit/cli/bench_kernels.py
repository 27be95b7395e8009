"""`kit bench kernels`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exl3kit.cli import args, output
from exl3kit.errors import ExitCode, KitError

if TYPE_CHECKING:
    from exl3kit.progress import Progress


def kernels(
    recipe: Annotated[str | None, args.recipe("In whose image to measure.")] = None,
    nodes: Annotated[str, args.nodes("Where; each is measured, one after the other.")] = "local",
    library: Annotated[
        Path | None, typer.Option("--library", help="Measure this library on this machine, without a container.")
    ] = None,
    only: Annotated[str | None, typer.Option("--only", help="Bars, such as K1,K4 (docs/kernels.md).")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="New folder for the files; else bench/TIME-kernels.")
    ] = None,
    as_json: args.JsonOption = False,
) -> None:
    """The kernels on a GPU: bars K1 to K9, roofline, and the tile and crossover table of that GPU.

    Exit code 3 where there is no GPU, 8 when results were wrong or differed from run to run.
    """
    from exl3kit.cli.bench_args import folder

    progress = output.progress(as_json=True)
    into = folder(out, "kernels")
    if (recipe is None) == (library is None):
        raise KitError("name a recipe, or a file with --library", next_step="kit bench kernels RECIPE --nodes NAME")
    if library is not None:
        found = {"local": _here(library, only, into, progress)}
    else:
        assert recipe is not None
        found = _on_nodes(recipe, nodes, only, into, progress)
    if as_json:
        output.emit({"nodes": found, "out": str(into), "seconds": progress.seconds})
    else:
        console = output.console()
        for name, report in found.items():
            console.print(f"{name}: {report['about']['gpu']}", markup=False)
            console.print(report["text"].rstrip(), markup=False, soft_wrap=True)
        console.print(f"files: {into}", markup=False)
    if not all(report["valid"] for report in found.values()):
        raise typer.Exit(int(ExitCode.BENCHMARK))


def _here(library: Path, only: str | None, out: Path, progress: Progress) -> dict[str, Any]:
    from exl3kit import kernel_bench

    if not library.is_file():
        raise KitError(
            "there is no such library", where=str(library), next_step="kit verify symbols --build --out FILE"
        )
    return kernel_bench.here(library, only, out, progress)


def _on_nodes(recipe: str, nodes: str, only: str | None, out: Path, progress: Progress) -> dict[str, Any]:
    from exl3kit import kernel_bench, lock, recipes
    from exl3kit import symbols as kernels
    from exl3kit.nodes import open_nodes

    loaded = recipes.load(recipe)
    kernels.need_of(loaded)  # refuses a recipe without GPU code
    image = lock.make_lock(loaded).tag
    with open_nodes(nodes) as opened:
        return {node.name: kernel_bench.on_node(node, image, only, out / node.name, progress) for node in opened}
