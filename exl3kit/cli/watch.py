"""`kit status`, `logs`: parse, call, print. They change nothing on any node."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exl3kit.cli import args, output
from exl3kit.cli.serve import deployment_name

if TYPE_CHECKING:
    from rich.console import RenderableType

    from exl3kit.logs import Line

DeploymentName = Annotated[str | None, args.recipe("A recipe's name; all deployments when left out.")]
WATCH_SECONDS = 2.0
COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "bright_red", "bright_cyan", "bright_yellow")


# ---- status ----------------------------------------------------------------------------------------------------------


def status(
    recipe: DeploymentName = None,
    nodes: args.NodesOption = "local",
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Look again every 2 s, until Ctrl-C.")] = False,
    as_json: args.JsonOption = False,
) -> None:
    """What stands on the nodes: state, progress, memory and network of each rank; exit 6 when a node is silent."""
    from exl3kit import status as statuses
    from exl3kit.errors import ExitCode, KitError
    from exl3kit.nodes import open_nodes

    if watch and as_json:
        raise KitError("--watch has no end, and --json prints one object at the end", next_step="leave one of them out")
    name = deployment_name(recipe) if recipe else None
    if watch:
        watch_status(name, nodes)
        return
    missing: dict[str, KitError] = {}
    speeds = statuses.Speeds()
    with open_nodes(nodes, missing=missing) as opened:
        told = statuses.status(opened, missing, name)
        speeds.add(told)
        if statuses.busy(told):
            time.sleep(statuses.SAMPLE_SECONDS)
            told = statuses.status(opened, missing, name)
            speeds.add(told)
    if as_json:
        failed = {node: error.as_json()["error"] for node, error in missing.items()}
        output.emit({"deployments": told, "unreachable": failed})
    else:
        show(told, missing, recipe, [node.name for node in opened])
    if mixed := [one["deployment"] for one in told if one["state"] == "mismatch"]:
        error = KitError(
            "its ranks loaded different checkpoints, so no answer of it means anything",
            where=mixed[0],
            next_step=f"`kit down {mixed[0]}`, then `kit up`, which compares the weights first",
            code=ExitCode.VERIFICATION,
        )
        raise typer.Exit(output.refuse(error, as_json=False))
    if missing:
        raise typer.Exit(int(ExitCode.UNREACHABLE))


def watch_status(name: str | None, nodes: str) -> None:
    """The table, renewed until Ctrl-C; nodes that do not answer are tried again each time."""
    from rich.console import Group
    from rich.live import Live

    from exl3kit import status as statuses
    from exl3kit.errors import KitError
    from exl3kit.nodes import open_nodes
    from exl3kit.progress import is_live

    console = output.console()
    console.soft_wrap = not is_live(console)  # what is renewed in place must be wrapped here, not by the terminal
    speeds = statuses.Speeds()
    try:
        with Live(console=console, auto_refresh=False) if is_live(console) else nullcontext() as live:
            while True:
                missing: dict[str, KitError] = {}
                with open_nodes(nodes, missing=missing) as opened:
                    try:
                        while True:
                            told = statuses.status(opened, missing, name)
                            speeds.add(told)
                            answering = [node.name for node in opened]
                            now = Group(*page(told, missing, name, answering), time.strftime("%H:%M:%S"))
                            live.update(now, refresh=True) if live is not None else console.print(now)
                            time.sleep(WATCH_SECONDS)
                            if missing:
                                break
                    except KitError:  # a node was lost meanwhile: opening them all says which
                        continue
    except KeyboardInterrupt:  # watching changes nothing, so leaving it is its normal end
        return


def show(told: list[dict[str, Any]], missing: dict[str, Any], recipe: str | None, answering: list[str]) -> None:
    console = output.console()
    for part in page(told, missing, recipe, answering):
        console.print(part)


def page(
    told: list[dict[str, Any]], missing: dict[str, Any], recipe: str | None, answering: list[str]
) -> list[RenderableType]:
    """Deployments one below the other, then the nodes that do not answer, each with the reason and the next step."""
    from rich.text import Text

    parts: list[RenderableType] = []
    for one in told:
        parts += [headline(one), table(one)]
        if one["note"]:
            parts.append(Text(one["note"], style="yellow"))
        if (death := last_death(one)) is not None:
            parts.append(Text(death, style="dim"))
    if not answering:
        parts.append(Text(f"what stands on {', '.join(missing)} is not known: no node can be asked"))
    elif not told:
        parts.append(Text(f"nothing of {recipe or 'the kit'} stands on {', '.join(answering)}"))
    for node, error in missing.items():
        why = f" ({error.why})" if error.why else ""
        fix = f"; next: {error.next_step}" if error.next_step else ""
        parts.append(Text(f"node {node} cannot be asked: {error.what}{why}{fix}", style="red"))
    return parts


def headline(one: dict[str, Any]) -> Any:
    from rich.text import Text

    style = {"serving": "green", "starting": "yellow", "waiting": "yellow", "stopping": "yellow"}.get(
        one["state"], "red"
    )
    speed = one.get("tokens_per_s")
    words = f"  {one['model']} on port {one['port']}, image {one['stamp'][:12]}, generation {one['generation']}"
    rate = f", {speed:.1f} tokens/s" if speed is not None else ""
    incarnation = f" incarnation {one['incarnation']}" if one["incarnation"] else ""
    return Text.assemble((one["deployment"], "bold"), "  ", (one["state"], style), words + incarnation + rate)


def table(one: dict[str, Any]) -> Any:
    """The ranks of a deployment, one row each."""
    from exl3kit import status_words as words
    from exl3kit.cli.sheets import Sheet

    shown = Sheet("rank", "node", "state", "for", "requests", "KV", "memory", "network", "receipts", "note")
    for rank in one["ranks"]:
        network = (rank["transport"] or {}).get("says", "-")
        cells = (
            rank["state"],
            words.since(rank),
            words.requests(rank),
            words.kv(rank),
            words.memory(rank),
            network,
            words.receipts(rank),
            words.remark(rank),
        )
        shown.add_row(str(rank["rank"]), rank["node"], *cells)
    return shown


def last_death(one: dict[str, Any]) -> str | None:
    """When and of what the gang died last, if it has."""
    reports = [rank["post_mortem"] for rank in one["ranks"] if rank["post_mortem"]]
    if not reports:
        return None
    newest = max(reports, key=lambda report: float(report["written"]))
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(newest["written"]))
    first = newest["first"]
    return f"last death {when}: rank {first['rank']}, {first['sentence']} (kit logs {one['deployment']} --post-mortem)"


# ---- logs ------------------------------------------------------------------------------------------------------------


def logs(
    recipe: args.RecipeArg,
    nodes: args.NodesOption = "local",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the ranks end; Ctrl-C detaches.")] = False,
    tail: Annotated[
        int | None, typer.Option("--tail", min=0, help="Lines of each rank to begin with; 100, with --since all.")
    ] = None,
    since: Annotated[
        str | None, typer.Option("--since", metavar="TIME", help="Only lines since 90s, 10m, 2h, or 2026-01-31T12:00.")
    ] = None,
    post_mortem: Annotated[
        bool, typer.Option("--post-mortem", help="What the ranks wrote of the gang's last death, also after `down`.")
    ] = False,
    as_json: args.JsonOption = False,
) -> None:
    """The logs of all ranks, merged by time, a colour for each rank."""
    from exl3kit import containers
    from exl3kit import logs as merged
    from exl3kit.errors import KitError
    from exl3kit.nodes import open_nodes

    name = deployment_name(recipe)
    if follow and as_json:
        raise KitError(
            "--follow has no end, and --json prints one object at the end", next_step="leave one of them out"
        )
    after = merged.since(since, datetime.now(UTC)) if since else None
    lines = tail if tail is not None else None if since else 100
    missing: dict[str, KitError] = {}
    with open_nodes(nodes, missing=missing) as opened:
        if not opened:  # then nobody knows whether there are ranks
            raise next(iter(missing.values()))
        for node, error in missing.items():
            print(f"kit: node {node} cannot be asked, its ranks are left out ({error.what})", file=sys.stderr)
        if post_mortem:
            show_post_mortem(opened, name, as_json)
            return
        standing = containers.find(opened, name)
        if not standing:
            raise KitError(f"no rank of {name} is there", where=nodes, next_step=f"`kit up {recipe} --nodes {nodes}`")
        if as_json:
            told = [as_fields(line) for line in merged.lines(standing, tail=lines, after=after)]
            output.emit({"deployment": name, "lines": told})
            return
        came = (
            merged.follow(standing, tail=lines, after=after)
            if follow
            else merged.lines(standing, tail=lines, after=after)
        )
        console = output.console()
        try:
            for line in came:
                print_line(line, console)
        except KeyboardInterrupt:  # following changes nothing on the nodes, so leaving it is its normal end
            return


def as_fields(line: Line) -> dict[str, Any]:
    return {"rank": line.one.rank, "node": line.one.node.name, "time": line.stamp, "line": line.text}


def print_line(line: Line, console: Any) -> None:
    """One line with its rank and node, as it is; on a terminal the rank has its colour."""
    from exl3kit import post_mortem
    from exl3kit.faults import printable

    prefix, text = f"rank{line.one.rank}@{line.one.node.name} | ", line.text
    if post_mortem.is_whole(text):
        text = f"-- a post-mortem: `kit logs {line.one.deployment} --post-mortem` --"
    if console.is_terminal:
        console.print(prefix, style=COLOURS[line.one.rank % len(COLOURS)], end="", markup=False)
        print(printable(text, most=100_000), flush=True)  # a terminal must not obey what a log may hold
    else:
        print(prefix + text, flush=True)


def show_post_mortem(opened: list[Any], name: str, as_json: bool) -> None:
    """The newest post-mortem of every rank, or what `kit down` kept of it."""
    from exl3kit import post_mortem
    from exl3kit.errors import KitError

    found = post_mortem.newest(opened, name)
    if as_json:
        output.emit({"deployment": name, "post_mortem": found})
        return
    if found is None:
        raise KitError(
            f"no death of {name} is on record there", next_step=f"`kit logs {name}` shows what the ranks said"
        )
    print("\n".join(post_mortem.as_lines(found)))
