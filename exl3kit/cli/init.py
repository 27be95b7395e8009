"""`kit init`: parse, call, print."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exl3kit.cli import args, output

if TYPE_CHECKING:
    from exl3kit.cluster import Host
    from exl3kit.starting import Candidate


def init(
    nodes: args.NodesOption,
    model: Annotated[str | None, typer.Option("--model", help="Part of a shipped recipe's name; else asked.")] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for cluster.yaml and recipe.yaml.")] = Path(),
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing: the largest model that fits.")] = False,
    as_json: args.JsonOption = False,
) -> None:
    """Ask the nodes for their facts, and write a cluster file and a recipe that fit them; starts nothing."""
    from exl3kit import cluster, facts, starting
    from exl3kit.errors import KitError
    from exl3kit.nodes import open_nodes

    targets = {"cluster": out / "cluster.yaml", "recipe": out / "recipe.yaml"}
    for path in targets.values():
        if path.exists():
            raise KitError("this file is there already, and is not replaced", where=str(path), next_step="--out FOLDER")
    hosts = cluster.hosts(nodes)
    with open_nodes(nodes) as opened:
        found = facts.gather(opened)
    every = starting.candidates(found, [host.name for host in hosts])
    if model is None and not yes and not as_json and sys.stdin.isatty():
        model = ask([one for one in every if one.fits] or every)
    chosen = starting.choose(every, model)
    texts = {
        "cluster": starting.cluster_file(hosts, found),
        "recipe": starting.recipe_file(chosen, f"my-{chosen.name}"[:63]),
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        for key, path in targets.items():
            path.write_text(texts[key], encoding="utf-8")
    except OSError as error:
        raise KitError("the files cannot be written", where=str(out), why=error.strerror) from error
    others = [{"name": one.name, "fits": one.fits, "why_not": one.why_not} for one in every]
    if as_json:
        output.emit({key: str(path) for key, path in targets.items()} | {"chosen": chosen.name, "candidates": others})
        return
    for one in every:
        print(f"{'fits' if one.fits else 'no  '}  {one.name}" + (f": {one.why_not}" if one.why_not else ""))
    print(f"\nwritten: {targets['cluster']}, and {targets['recipe']} on top of {chosen.name}")
    print(f"next: {following(targets['recipe'], targets['cluster'], hosts)}")


def following(recipe: Path, cluster: Path, hosts: list[Host]) -> str:
    """The command that comes after `kit init`, as it is typed where that ran; this machine alone needs no file."""
    from exl3kit.cluster import LOCAL

    alone = [host.name for host in hosts] == [LOCAL]
    return shlex.join(["kit", "plan", str(recipe), "--nodes", LOCAL if alone else str(cluster)])


def ask(choices: list[Candidate]) -> str:
    """The recipe that the operator chooses from a list."""
    for number, one in enumerate(choices, 1):
        print(f"{number:>3}  {one.name}  {one.purpose}")
    answer = int(typer.prompt("which", default=1, type=int))
    return choices[max(1, min(answer, len(choices))) - 1].name
