"""`kit init`: a cluster file, and a recipe that fits what the nodes say of themselves. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from exl3kit import plan as planning
from exl3kit import published, recipe_view, recipes
from exl3kit.cluster import ENGINE_SOCKET, Host
from exl3kit.errors import ExitCode, KitError
from exl3kit.words import counted

if TYPE_CHECKING:
    from exl3kit.deployment import NodeFacts
    from exl3kit.plan import Plan

ON_CPU = "demo"  # what a machine without a GPU can serve


@dataclass(frozen=True)
class Candidate:
    """A shipped recipe against the nodes: its plan, or why there is none."""

    name: str
    purpose: str
    plan: Plan | None
    why_not: str | None = None

    @property
    def fits(self) -> bool:
        return self.plan is not None and self.plan.fits


def candidates(facts: Mapping[str, NodeFacts], names: Sequence[str]) -> list[Candidate]:
    """Every shipped recipe for this number of nodes and these GPUs; those that fit come first, the largest before."""
    found = [candidate(path.stem, facts, names) for path in recipes.shipped()]
    return sorted(found, key=lambda one: (not one.fits, -(one.plan.rank.weights if one.plan else 0), one.name))


def candidate(ref: str, facts: Mapping[str, NodeFacts], names: Sequence[str]) -> Candidate:
    """One shipped recipe against the nodes."""
    from exl3kit.cli.plan import source_of

    recipe = recipes.load(ref)
    purpose = recipe.purpose or ""

    def no(why: str) -> Candidate:
        return Candidate(ref, purpose, None, why)

    if recipe.parallel.nodes != len(names):
        return no(f"it runs on {counted(recipe.parallel.nodes, 'node')}")
    for name in names:
        probe = facts[name].probe
        gpus = probe.gpus if probe else ()
        if recipe.image.on_cpu != (not gpus):
            return no(f"{name} has {'a GPU' if gpus else 'no GPU'}")
        missing = [gpu.capability for gpu in gpus if gpu.capability not in recipe.image.arch]
        if missing and not recipe.image.on_cpu:
            return no(f"{name} has compute capability {missing[0]}, and the recipe compiles for others")
    try:
        made = planning.make(recipe, source_of(recipe), facts, list(names), ",".join(names))
    except KitError as error:
        return no(error.what)
    short = [one.says for one in made.verdicts if not one.fits]
    return Candidate(ref, purpose, made, made.refusals[0] if made.refusals else short[0] if short else None)


def choose(found: Sequence[Candidate], model: str | None) -> Candidate:
    """The recipe to write: of the model that was named, or the largest that fits.

    Raises `KitError`: usage for a model that no recipe is of, preflight when nothing fits.
    """
    fitting = [one for one in found if model is None or model.lower() in one.name.lower()]
    if not fitting:
        raise KitError(
            f"no shipped recipe is of a model called {model!r}",
            where="--model",
            next_step=f"one of: {', '.join(sorted(one.name for one in found))}; known shapes: "
            + ", ".join(published.models()),
        )
    for one in fitting:
        if one.fits:
            return one
    reasons = "; ".join(f"{one.name}: {one.why_not}" for one in fitting[:6])
    raise KitError(
        "no shipped recipe fits these nodes",
        why=reasons,
        next_step="`kit plan RECIPE --nodes ...` shows the sums; `kit recipe show demo` is a recipe to begin with",
        code=ExitCode.PREFLIGHT,
    )


def cluster_file(hosts: Sequence[Host], facts: Mapping[str, NodeFacts]) -> str:
    """A cluster file with the address of each node on the fabric, as it was found."""
    lines = ["# Written by `kit init`: the machines, with their addresses on the fabric.", "cluster: 1", "nodes:"]
    for host in hosts:
        fields: dict[str, str] = {"name": host.name}
        if host.ssh is not None:
            fields |= {"ssh": host.ssh, "address": facts[host.name].address}
        if host.engine != ENGINE_SOCKET:
            fields["engine"] = host.engine
        lines.append(f"  - {recipe_view.write(fields)}")
    return "\n".join(lines) + "\n"


def recipe_file(chosen: Candidate, name: str) -> str:
    """A recipe of one's own on top of a shipped one; what the nodes' memory asks for stands in it."""
    lines = [f"# Written by `kit init`: {chosen.name} on these machines.", "recipe: 1", f"extends: {chosen.name}"]
    return "\n".join([*lines, f"name: {recipe_view.write(name)}"]) + "\n"
