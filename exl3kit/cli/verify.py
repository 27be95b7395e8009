"""`kit verify`: hold what was built against what is needed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exl3kit.cli import args, output, teaching
from exl3kit.errors import ExitCode, KitError

if TYPE_CHECKING:
    from rich.console import Console

    from exl3kit.progress import Progress
    from exl3kit.symbols import Need

app = teaching.App("Hold what was built against what is needed.")


@app.command("symbols")
def symbols(
    subject: Annotated[
        str | None, args.recipe("What holds the kernels; with --build a recipe or nothing.", "IMAGE|FILE|RECIPE")
    ] = None,
    build: Annotated[
        bool, typer.Option("--build", help="Build the kernel library alone first; needs no engine and no GPU.")
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", help="With --build: where to put the library.")] = None,
    nodes: Annotated[
        str | None, args.nodes("Also hold it against these nodes' GPUs; an image is called there.")
    ] = None,
    as_json: args.JsonOption = False,
) -> None:
    """Which fat symbols a kernel library has for which GPU; exit code 5 names what is missing."""
    if out is not None and not build:
        raise KitError("--out says where to put a library, so it needs --build")
    progress = output.progress(as_json=True)
    if build:
        report = _built(subject, out, progress)
    elif subject is None:
        raise KitError("nothing to verify", next_step="name an image, a file or a recipe, or pass --build")
    else:
        report = _found(subject, nodes, progress)
    if nodes is not None:
        report = _on_nodes(report, nodes, progress)
    if as_json:
        output.emit({**report, "seconds": progress.seconds})
    else:
        show(report, output.console())
    if not report["ok"]:
        raise typer.Exit(int(ExitCode.VERIFICATION))


def _built(recipe: str | None, out: Path | None, progress: Progress) -> dict[str, Any]:
    from exl3kit import symbols as kernels

    need = _need_of_recipe(recipe) if recipe else kernels.HEADLINE
    return kernels.verify(kernels.build(need, progress, out), need, progress)


def _found(subject: str, nodes: str | None, progress: Progress) -> dict[str, Any]:
    from exl3kit import lock, recipes
    from exl3kit import symbols as kernels
    from exl3kit.nodes import open_nodes

    path = Path(subject)
    if path.is_file() and path.suffix not in (".yaml", ".yml"):
        return kernels.verify(path, kernels.Need(), progress)
    need, reference = kernels.Need(), subject
    if path.is_file() or subject in {shipped.stem for shipped in recipes.shipped()}:
        need = _need_of_recipe(subject)
        reference = lock.make_lock(recipes.load(subject)).tag
    with open_nodes(nodes or "local") as opened, kernels.from_image(opened[0].engine, reference) as library:
        return {**kernels.verify(library, need, progress), "file": reference, "image": reference}


def _on_nodes(report: dict[str, Any], named: str, progress: Progress) -> dict[str, Any]:
    """Hold the library against the GPUs that the nodes' drivers list; one of an image is imported and called there."""
    from exl3kit import gpus
    from exl3kit import symbols as kernels
    from exl3kit.nodes import open_nodes

    found: dict[str, list[str]] = {}
    called: dict[str, Any] = {}
    errors = list(report["errors"])
    with open_nodes(named) as opened:
        for node in opened:
            there = gpus.ask(node)
            found[node.name] = [f"{gpu.name} ({gpu.capability})" for gpu in there]
            faults = gpus.unserved(there, report)
            if "image" in report and not faults:
                with progress.stage(f"kernels called on {node.name}"):
                    called[node.name] = kernels.call_on(node, report["image"])
                faults = called[node.name]["errors"]
            errors += [f"node {node.name}: {what}" for what in faults]
    return {**report, "nodes": found, "called": called, "errors": errors, "ok": not errors}


def _need_of_recipe(reference: str) -> Need:
    from exl3kit import recipes
    from exl3kit import symbols as kernels

    return kernels.need_of(recipes.load(reference))


def show(report: dict[str, Any], console: Console) -> None:
    """The report for people: symbol x target, figures per target, then what is wrong."""
    from rich.text import Text

    from exl3kit.cli.sheets import Sheet

    targets = report["asked"]["targets"]
    table = Sheet("symbol", "exported", *targets)
    marks = {"no": Text("no", "red"), "ptx": Text("ptx", "yellow"), "host": Text("-", "dim")}
    for row in report["symbols"]:
        table.add_row(row["symbol"], *(marks.get(row[key], row[key]) for key in ("exported", *targets)))
    console.print(f"{report['file']} ({report['host']})", markup=False)
    console.print(table)
    for target, use in report["resources"].items():
        figures = f"at most {use['max_registers']} registers, {use['spilled']} bytes spilled"
        console.print(f"{target}: {use['kernels']} kernels, {figures}")
    needs = ", ".join(f"{name} {number}" for name, number in report["needs"].items())
    console.print(f"PTX: {', '.join(report['ptx']) or 'none'}; ABI {report['abi']}; needs {needs}")
    for node, gpus in report.get("nodes", {}).items():
        console.print(f"node {node}: {', '.join(gpus)}")
    for node, answer in report.get("called", {}).items():
        for gpu in answer["gpus"]:
            worst = max(gpu.get("error", {"": 0.0}).values())
            console.print(f"called on {node}, {gpu['name']}: {len(answer['instances'])} kernels, error {worst:.1e}")
    for warning in report["warnings"]:
        console.print(f"[yellow]warning:[/] {warning}")
    for error in report["errors"]:
        console.print(f"[red]missing or wrong:[/] {error}")
