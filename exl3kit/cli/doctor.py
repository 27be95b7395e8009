"""`kit doctor`: parse, call, print."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from exl3kit.cli import args, output

if TYPE_CHECKING:
    from exl3kit.cli.sheets import Sheet
    from exl3kit.doctor import Report

COLOURS = {"ok": "green", "warn": "yellow", "refuse": "red"}


def doctor(
    recipe: Annotated[str | None, args.recipe("Also check what this recipe needs of the nodes.")] = None,
    nodes: args.NodesOption = "local",
    sets: args.SetOption = None,
    no_bandwidth: Annotated[
        bool, typer.Option("--no-bandwidth", help="Send nothing between the nodes (else for a second each way).")
    ] = False,
    as_json: args.JsonOption = False,
) -> None:
    """Look at nodes and say what speaks against serving on them, with the fix; changes nothing. Exit 3 when refused."""
    from exl3kit import doctor as doctors
    from exl3kit import recipes
    from exl3kit.errors import ExitCode, KitError
    from exl3kit.nodes import open_nodes

    loaded = recipes.load(recipe, sets or ()) if recipe else None
    missing: dict[str, KitError] = {}
    with open_nodes(nodes, missing=missing) as opened:
        report = doctors.examine(opened, list(missing.values()), loaded, bandwidth=not no_bandwidth)
    if as_json:
        output.emit(fields(report))
    else:
        show(report)
    if missing:
        raise typer.Exit(int(ExitCode.UNREACHABLE))
    if report.refused:
        raise typer.Exit(int(ExitCode.PREFLIGHT))


def fields(report: Report) -> dict[str, Any]:
    """The report as one JSON object."""
    found = [
        {"node": one.node, "check": one.check, "level": one.level, "says": one.says, "fix": one.fix}
        for one in report.findings
    ]
    environment = {
        rank: [
            {"name": one.name, "value": one.value, "source": one.source, "instead_of": one.instead_of} for one in told
        ]
        for rank, told in report.settings.items()
    }
    return {"ok": not report.refused, "findings": found, "environment": environment}


def show(report: Report) -> None:
    """The report: findings by node, a table on a terminal and plain lines else; each rank's network; the verdict."""
    from rich.markup import escape

    console = output.console()
    if console.is_terminal:
        console.print(table(report))
    else:
        for one in report.findings:
            fix = f"; next: {one.fix}" if one.fix and one.level != "ok" else ""
            console.print(escape(f"{one.level:<6} {one.node}: {one.check}: {one.says}{fix}"))
    for rank, told in report.settings.items():
        for setting in told:
            instead = f", the facts say {setting.instead_of}" if setting.instead_of else ""
            console.print(escape(f"{rank}: {setting.name}={setting.value} ({setting.source}{instead})"))
    console.print(verdict(report))


def verdict(report: Report) -> str:
    """What all findings come to, in a line."""
    warned = sum(one.level == "warn" for one in report.findings)
    warnings = f"{warned} warning{'s' if warned != 1 else ''}" if warned else ""
    if refused := len(report.refused):
        return f"refused: {refused} of {len(report.findings)} checks" + (f", {warnings}" if warned else "")
    return f"nothing is refused, {warnings}" if warned else "nothing speaks against serving"


def table(report: Report) -> Sheet:
    """The findings as a table."""
    from rich.text import Text

    from exl3kit.cli.sheets import Sheet

    shown = Sheet("node", "check", "", "found")
    for one in report.findings:
        found = Text(one.says)
        if one.fix and one.level != "ok":
            found.append("\nnext: ", "dim").append(one.fix)
        shown.add_row(one.node, one.check, Text(one.level, COLOURS[one.level]), found)
    return shown
