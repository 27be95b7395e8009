"""`kit report`: parse, call, print."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exl3kit.cli import args, output

if TYPE_CHECKING:
    from exl3kit.errors import KitError
    from exl3kit.report import Report


def report(
    recipe: Annotated[str | None, args.recipe("The recipe that it is about: its values and lock go in.")] = None,
    nodes: args.NodesOption = "local",
    sets: args.SetOption = None,
    tail: Annotated[int, typer.Option("--tail", min=0, max=100_000, help="Lines of each rank's log.")] = 500,
    hide_home: Annotated[bool, typer.Option("--hide-home", help="Also mask your home folder and user name.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Where to put it; kit-report-TIME.tar.gz if left out.")
    ] = None,
    as_json: args.JsonOption = False,
) -> None:
    """Gather what others need to help you into one archive without secrets: doctor, status, receipts, logs, locks."""
    from exl3kit import redaction
    from exl3kit import report as reports
    from exl3kit.nodes import open_nodes

    redactor = redaction.Redactor(reports.known_secrets(key_file(recipe, sets)), reports.home() if hide_home else None)
    made = reports.Report(redactor)
    missing: dict[str, KitError] = {}
    with open_nodes(nodes, missing=missing) as opened:
        reports.gather(made, recipe, sets or (), opened, missing, tail)
    file = out or Path(time.strftime("kit-report-%Y%m%dT%H%M%SZ.tar.gz", time.gmtime()))
    size = reports.write(made, file)
    if as_json:
        output.emit({"file": str(file), "bytes": size, "files": sorted(made.members), "left_out": made.left_out,
                     "masked": redactor.count})  # fmt: skip
    else:
        show(made, file, size)


def key_file(recipe: str | None, sets: list[str] | None) -> Path | None:
    """The file with the API key that the recipe names; None without one, or while the recipe is invalid."""
    from exl3kit import recipes
    from exl3kit.errors import KitError

    try:
        return recipes.load(recipe, sets or ()).serve.api_key_file if recipe else None
    except KitError:
        return None  # why it is invalid goes into the report


def show(made: Report, file: Path, size: int) -> None:
    """What is in the archive, what was left out and why, and what to do before it is sent."""
    console = output.console()
    for name in sorted(made.members):
        console.print(f"{name:<40}  {made.says[name]}", markup=False)
    for one in made.left_out:
        console.print(f"left out: {one['what']}: {one['why']}", markup=False, style="dim")
    masked = made.redactor.count
    console.print(f"{file}: {len(made.members)} files, {size / 1000:.0f} kB, {masked} secrets masked", markup=False)
    console.print("look through it before you send it: host names, addresses and log lines are in it", style="bold")
