"""`kit receipts`: what every rank counted of itself, and whether the ranks agree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from exl3kit.cli import args, output
from exl3kit.errors import ExitCode, KitError

if TYPE_CHECKING:
    from rich.console import Console

ROWS = (
    "node", "container", "transport", "configured_tier", "effective_tier", "tier_reason", "layers", "trellis_tensors",
    "trellis_bytes", "rates", "codebooks", "fingerprint", "shared_suh", "moe_layers_loaded", "backend",
    "kernel_targets", "prefill_layer_calls", "rows_expected", "rows_handled", "fallback_reasons", "max_rows",
    "arena_bytes", "stamp", "generation", "schema",
)  # fmt: skip


def receipts(
    recipe: args.RecipeArg,
    nodes: args.NodesOption = "local",
    sets: args.SetOption = None,
    as_json: args.JsonOption = False,
) -> None:
    """Receipts of all ranks side by side; exit code 5 when ranks disagree or the recipe's tier is not what runs."""
    from exl3kit import containers, recipes, transport
    from exl3kit import receipts as counted
    from exl3kit.nodes import open_nodes

    loaded = recipes.load(recipe, sets or ())
    with open_nodes(nodes) as opened:
        standing = containers.find(opened, loaded.name)
        running = [one for one in standing if one.state == "running"]
        if not running:
            next_step = f"`kit up {recipe} --nodes {nodes}`"
            raise KitError(
                f"no rank of {loaded.name} runs", where=nodes, next_step=next_step, code=ExitCode.VERIFICATION
            )
        found = counted.with_transports(counted.collect(running), running, transport.look(running))
    idle = [one for one in standing if one.state != "running"]
    faults = [f"the container of rank {one.rank} on {one.node.name} is {one.state}" for one in idle]
    faults += counted.find_faults(found, loaded)
    if as_json:
        output.emit({"deployment": loaded.name, "receipts": found, "faults": faults, "ok": not faults})
    else:
        show(found, faults, output.console())
    if faults:
        raise typer.Exit(int(ExitCode.VERIFICATION))


def show(found: list[dict[str, Any]], faults: list[str], console: Console) -> None:
    """One column per rank, one row per figure; what differs is marked, then what is wrong is said."""
    from exl3kit.cli.sheets import Sheet

    table = Sheet("", *(f"rank {receipt['rank']}" for receipt in found))
    marked = False
    for key in ROWS:
        told = [_short(receipt.get(key)) for receipt in found]
        differs = len(set(told)) > 1 and key not in ("node", "container", "transport")
        marked |= differs
        table.add_row(f"{key} *" if differs else key, *told)
    console.print(table)
    if marked:
        console.print("* differs between the ranks", style="dim")
    for fault in faults:
        console.print(f"wrong: {fault}", markup=False, style="red")
    if not faults:
        console.print("the rank agrees with itself" if len(found) == 1 else f"{len(found)} ranks agree")


def _short(value: Any) -> str:
    if isinstance(value, dict) and "says" in value:
        return str(value["says"])
    if isinstance(value, dict):
        return ", ".join(f"{name}: {count}" for name, count in value.items()) or "-"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    text = "-" if value is None else str(value)
    return text[:12] if len(text) == 64 else text
