"""`kit dash`: parse, serve the page until Ctrl-C."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from exl3kit.cli import args, output
from exl3kit.cli.serve import deployment_name, stoppable
from exl3kit.cli.watch import DeploymentName


def dash(
    recipe: DeploymentName = None,
    nodes: args.NodesOption = "local",
    port: Annotated[
        int | None, typer.Option("--port", min=1, max=65535, help="On 127.0.0.1; 8787 or a free one when left out.")
    ] = None,
    bench: Annotated[Path, typer.Option("--bench", help="Folder that holds the campaigns of `kit bench`.")] = Path(
        "bench"
    ),
    as_json: args.JsonOption = False,
) -> None:
    """A read-only page of what runs, for a browser on this machine: live until Ctrl-C.

    Nodes, ranks, speed, memory, network, tiers and receipts, the last post-mortem and the last bench. Nodes are asked
    only while somebody looks.
    """
    from exl3kit.dash.asker import opened
    from exl3kit.dash.gather import Gatherer
    from exl3kit.dash.last_bench import LastBench
    from exl3kit.dash.server import Server

    name = deployment_name(recipe) if recipe else None
    gatherer = Gatherer(nodes, name, opened, LastBench(bench, name))
    try:
        with stoppable(), Server(gatherer, port) as server:
            if as_json:
                output.emit({"address": server.address, "nodes": list(gatherer.nodes)})
            else:
                print(f"kit dash: {server.address} (read-only, from this machine alone; Ctrl-C ends it)")
            sys.stdout.flush()  # whoever reads it through a pipe waits for the address
            gatherer.start()
            server.serve_forever()
    except KeyboardInterrupt:  # looking changes nothing, so leaving it is its normal end
        return
    finally:
        gatherer.stop()
