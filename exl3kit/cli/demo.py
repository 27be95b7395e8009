"""`kit demo`: the README's first command."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from exl3kit.cli import args, output
from exl3kit.cli.serve import stoppable

if TYPE_CHECKING:
    from rich.console import Console

    from exl3kit.cluster import Host
    from exl3kit.demo import Outcome


def demo(
    install_engine: Annotated[
        bool, typer.Option("--install-engine", help="Install the distribution's Docker engine when there is none.")
    ] = False,
    nodes: Annotated[
        str, args.nodes("Run on this node's engine (an ssh name) instead of here.", metavar="NAME")
    ] = "local",
    keep: Annotated[bool, typer.Option("--keep", help="Leave both models serving.")] = False,
    as_json: args.JsonOption = False,
) -> None:
    """Build the demo image, serve a dense and a MoE model on two ranks each, check every answer, clean up; no GPU."""
    from exl3kit import demo as demos
    from exl3kit import engine_setup
    from exl3kit.nodes import open_nodes
    from exl3kit.timings import Run

    console = output.console(as_json=as_json)
    progress = output.progress(Run("demo", "demo", nodes), as_json=as_json)
    host = one_host(nodes)
    here = engine_setup.ensured(install=install_engine, keep=keep, progress=progress)
    with stoppable(), here if host.is_local else nullcontext(), open_nodes([host]) as (opened,):
        outcome = demos.run(opened, progress, keep=keep)
    show(outcome, nodes, console)
    progress.summary()
    failure = demos.failure(outcome)
    if as_json:
        output.emit({
            "answers": [asdict(told) for told in outcome.answers],
            "ranks": outcome.ranks,
            "stamp": outcome.stamp,
            "tokens_per_second": round(outcome.tokens_per_second, 1),
            "urls": outcome.urls,
            "seconds": progress.seconds,
            "wall_clock": round(progress.total_seconds, 2),
            **(failure.as_json() if failure else {}),
        })  # fmt: skip
    if failure:
        raise typer.Exit(output.refuse(failure, as_json=False))


def one_host(named: str) -> Host:
    """The one node that `--nodes` names."""
    from exl3kit.cluster import hosts
    from exl3kit.errors import KitError

    named_hosts = hosts(named)
    if len(named_hosts) != 1:
        raise KitError(f"the demo runs on one node, and --nodes names {len(named_hosts)}", next_step="name one of them")
    return named_hosts[0]


def show(outcome: Outcome, nodes: str, console: Console) -> None:
    """Answers, ranks and what they prove, for people."""
    from rich.markup import escape

    from exl3kit.demo import MODELS

    for told in outcome.answers:
        mark = "[green]exact[/]" if told.exact else "[red]WRONG[/]"
        console.print(f"{told.model:<6} {mark}  {escape(told.question)}  [bold]{escape(told.answer)}[/]")
    for rank in outcome.ranks:
        held = f"{rank['trellis_tensors']} trellis matrices, {rank['trellis_bytes']} bytes"
        console.print(f"{rank['model']:<6} rank {rank['rank']} of {rank['tp_size']} on {rank['node']} holds {held}")
    console.print(
        f"proved: image {outcome.stamp[:12]} serves on {len(outcome.ranks)} ranks, which hold both checkpoints' "
        f"trellis bytes by their own count; {outcome.exact} of {len(outcome.answers)} answers are exact, at "
        f"{outcome.tokens_per_second:.0f} tokens/s one request at a time"
    )
    for model, url in outcome.urls.items():
        down = f"kit down {MODELS[model][0]}" + ("" if nodes == "local" else f" --nodes {nodes}")
        console.print(f"{model} still serves at {url}; `{escape(down)}` ends it")
