"""The environment that each rank really gets: every variable with its value and where that comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from exl3kit import deployment as plans
from exl3kit import recipe_rules

if TYPE_CHECKING:
    from exl3kit.deployment import Deployment, NodeFacts
    from exl3kit.nodes import Node
    from exl3kit.recipe import Recipe

MASK = "********"
OF_THE_RECIPE = (  # keys outside env
    *("EXL3_TIER", "EXL3_KERNEL_TABLE", "EXL3_STALL_S"),
    *recipe_rules.EXL3_FLAGS,
    *recipe_rules.EXL3_NUMBERS,
)


@dataclass(frozen=True)
class Variable:
    """One variable of a rank. `source`: kit, facts (of the node), recipe, or image; `instead_of`: what it replaced."""

    name: str
    value: str
    source: str
    instead_of: str | None = None


def of_deployment(
    recipe: Recipe,
    nodes: Sequence[Node],
    placement: Sequence[str],
    facts: Mapping[str, NodeFacts],
    deployment: Deployment,
) -> dict[int, list[Variable]]:
    """Every rank's variables by name, with those of the image below them where the image is on its node."""
    images = {node.name: of_image(node, deployment.image) for node in nodes}
    own = plans.own_environment(recipe)
    told = {}
    for rank in deployment.ranks:
        demanded = plans.facts_environment(recipe, rank.rank, placement, facts, bridge=deployment.bridge)
        told[rank.rank] = of_rank(rank.env, own, demanded, recipe.serve.env, images[rank.node])
    return told


def of_rank(
    env: Mapping[str, str],
    own: Mapping[str, str],
    facts: Mapping[str, str],
    users: Mapping[str, str],
    image: Mapping[str, str],
) -> list[Variable]:
    """The variables of one rank by name.

    Parameters
    ----------
    env: what its container is given.
    own, facts, users: what the kit, the node's facts and the recipe's `serve.env` say; later ones win.
    image: what the image sets where nothing else does.
    """
    found = []
    for name in sorted({*env, *image}):
        if name in users:
            source, below = "recipe", facts.get(name, own.get(name, image.get(name)))
        elif name in facts:
            source, below = "facts", own.get(name, image.get(name))
        elif name in env:
            source, below = "recipe" if name in OF_THE_RECIPE else "kit", image.get(name)
        else:
            source, below = "image", None
        value = env.get(name, image.get(name, ""))
        instead_of = below if below != value else None
        found.append(Variable(name, masked(name, value), source, instead_of and masked(name, instead_of)))
    return found


def masked(name: str, value: str) -> str:
    """The value, unless its name says that it is a secret."""
    return MASK if value and recipe_rules.is_secret(name) else value


def of_image(node: Node, tag: str) -> dict[str, str]:
    """What the image sets; empty while it is not on the node."""
    from docker.errors import ImageNotFound

    try:
        set_there = node.engine.images.get(tag).attrs["Config"].get("Env") or []
    except ImageNotFound:
        return {}
    return dict(entry.split("=", 1) for entry in set_there)


def differing(told: Mapping[int, Sequence[Variable]]) -> list[str]:
    """Names whose value is not the same on every rank."""
    values: dict[str, set[str | None]] = {}
    for variables in told.values():
        for name in {one.name for others in told.values() for one in others}:
            values.setdefault(name, set()).add(next((one.value for one in variables if one.name == name), None))
    return sorted(name for name, seen in values.items() if len(seen) > 1)


def differing_arguments(deployment: Deployment) -> dict[int, list[str]]:
    """Of each rank the options of vLLM, with their values, that some other rank does not have."""
    options = {rank.rank: set(options_of(rank.argv)) for rank in deployment.ranks}
    common = set.intersection(*options.values())
    return {rank.rank: [one for one in options_of(rank.argv) if one not in common] for rank in deployment.ranks}


def options_of(argv: Sequence[str]) -> list[str]:
    """Every option together with the words behind it."""
    found: list[str] = []
    for word in argv:
        if word.startswith("--") or not found:
            found.append(word)
        else:
            found[-1] += f" {word}"
    return found


def as_lines(told: Mapping[int, Sequence[Variable]], *, only_differing: bool) -> list[str]:
    """`NAME=value  source` for every variable; one that differs has a line for each rank."""
    names = differing(told)
    lines = []
    by_name: dict[str, list[tuple[int, Variable]]] = {}
    for rank, variables in told.items():
        for one in variables:
            by_name.setdefault(one.name, []).append((rank, one))
    for name in sorted(by_name):
        if only_differing and name not in names:
            continue
        for rank, one in by_name[name] if name in names else by_name[name][:1]:
            where = f"rank {rank}: " if name in names and len(told) > 1 else ""
            over = "" if one.instead_of is None else f", instead of {one.instead_of}"
            lines.append(f"{where}{name}={one.value}  ({one.source}{over})")
    return lines
