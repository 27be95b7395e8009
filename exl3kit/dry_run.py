"""What the ranks of a recipe would get on these nodes, also where `up` would still refuse: pins unset, weights away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from exl3kit import deployment as plans
from exl3kit import facts, kernel_table, lock, rank_env
from exl3kit import weights as weight_files
from exl3kit.errors import KitError

if TYPE_CHECKING:
    from exl3kit.deployment import Deployment, NodeFacts
    from exl3kit.nodes import Node
    from exl3kit.rank_env import Variable
    from exl3kit.recipe import Recipe

UNKNOWN = "unknown"  # stands for a stamp, and for the folder of weights, that nothing can be said of yet
GENERATION = "at-the-start"  # `up` names one when it starts


@dataclass(frozen=True)
class DryRun:
    """The deployment and its ranks' environment; `refusals` are what `up` would stop at before it looks any further."""

    deployment: Deployment
    environment: dict[int, list[Variable]]
    refusals: tuple[KitError, ...]


def look(recipe: Recipe, nodes: Sequence[Node]) -> DryRun:
    """What each rank would get; changes nothing.

    Raises `KitError`: unreachable, usage when the nodes' number does not fit, preflight for a node off the fabric.
    """
    asked = facts.gather(nodes)
    placement = plans.place(recipe, [asked[node.name] for node in nodes])
    used = [node for node in nodes if node.name in placement]
    refusals = []
    stamp, tag = UNKNOWN, None
    try:
        locked = lock.make_lock(recipe)
        stamp, tag = locked.stamp, locked.tag
    except KitError as unpinned:
        refusals.append(unpinned)
    try:
        folders = folders_of(recipe, used, asked, tag)
    except KitError as away:
        refusals.append(away)
        folders = {node.name: f"{asked[node.name].cache}/weights/{UNKNOWN}" for node in used}
    table = None
    try:
        table = kernel_table.of(recipe, [asked[node.name] for node in used])
    except KitError as unfit:
        refusals.append(unfit)
    key = recipe.serve.api_key_file is not None
    deployment = plans.plan(recipe, stamp, placement, asked, folders, GENERATION, api_key=key, kernel_table=table)
    environment = rank_env.of_deployment(recipe, used, placement, asked, deployment)
    return DryRun(deployment, environment, tuple(refusals))


def folders_of(
    recipe: Recipe, nodes: Sequence[Node], asked: Mapping[str, NodeFacts], tag: str | None
) -> dict[str, str]:
    """The folder of the weights on each node; raises `KitError` (preflight) when they are nowhere, or not whole."""
    found = weight_files.survey(recipe, nodes, asked, tag)
    return {node.name: weight_files.directory_on(node, asked[node.name], found) for node in nodes}
