"""The doctor: looks at nodes, all at once, and says what speaks against serving on them; changes nothing.

`examine` is what `kit doctor` prints, `preflight` the same checks before `kit up` touches anything.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from exl3kit import admission, checks, containers, fabric, facts, reach
from exl3kit import deployment as plans
from exl3kit.checks import Finding, Need, Place
from exl3kit.errors import ExitCode, KitError

if TYPE_CHECKING:
    from exl3kit.deployment import Deployment, NodeFacts
    from exl3kit.fabric import Setting
    from exl3kit.nodes import Node
    from exl3kit.recipe import Recipe
    from exl3kit.weights import Weights


MEMORY = "memory plan"
MEMORY_SECONDS = 60.0
LOOK_SECONDS = 1.0
RISK = "--force: started all the same; a machine whose GPU shares its memory may lock up and need a power cycle"


@dataclass(frozen=True)
class Report:
    """All findings, and what each rank's network is told when a recipe was named."""

    findings: list[Finding]
    settings: Mapping[str, list[Setting]]  # rank N on NODE -> its variables

    @property
    def refused(self) -> list[Finding]:
        return [one for one in self.findings if one.level == "refuse"]


def examine(nodes: Sequence[Node], failures: Sequence[KitError], recipe: Recipe | None, *, bandwidth: bool) -> Report:
    """Look at every node that could be opened; one that could not is a finding with its sentence."""
    found = [unreachable(error) for error in failures]
    if not nodes:
        return Report(found, {})
    gathered = facts.gather(nodes)
    places = [place(node, gathered[node.name]) for node in nodes]
    need = Need(several=len(nodes) > 1)
    told: dict[str, list[Setting]] = {}
    if recipe is not None:
        placement: list[str] = []
        if not failures:
            try:
                placement = plans.place(recipe, list(gathered.values()))
            except KitError as error:
                found.append(Finding("all", "nodes", "refuse", error.what, error.next_step))
        need = need_of(recipe, placement)
        told = settings(recipe, placement, gathered)
        found += memory_of(recipe, places, placement)
    found += checks.examine(places, need)
    if bandwidth and len(nodes) > 1:
        by_name = {one.name: one for one in places}
        found += checks.reach(reach.measure(nodes, places), by_name, need)
    return Report(found, told)


def preflight(
    recipe: Recipe,
    weights: Weights,
    nodes: Sequence[Node],
    gathered: Mapping[str, NodeFacts],
    deployment: Deployment,
    *,
    force: bool = False,
) -> list[str]:
    """Refuse nodes on which the deployment cannot serve, before anything is copied, stopped or started.

    Parameters
    ----------
    force: start although the memory does not suffice by the kit's estimate.

    Returns the warnings, one sentence each.

    Raises `KitError` (preflight) that names everything which is refused.
    """
    places = [place(node, gathered[node.name]) for node in nodes]
    placement = [rank.node for rank in deployment.ranks]
    found = checks.examine(places, need_of(recipe, placement, deployment))
    found += memory(recipe, weights, places, placement)
    if not deployment.bridge:
        blocked = [one for one in reach.measure(nodes, places, seconds=0) if one.rate is None]
        found += checks.reach(blocked, {one.name: one for one in places}, Need(several=True))
    refused = [one for one in found if one.level == "refuse" and not (force and one.check == MEMORY)]
    refuse(refused)
    told = [sentence(one) for one in found if one.level == "warn"]
    return told + [f"{sentence(one)}; {RISK}" for one in found if one.level == "refuse"]


def memory(
    recipe: Recipe, weights: Weights, places: Sequence[Place], placement: Sequence[str], *, settled: bool = False
) -> list[Finding]:
    """Memory admission on every node that a rank is to run on.

    Parameters
    ----------
    settled: what stood before has been stopped. Until then its memory is not counted as taken: it makes way.
    """
    plan = admission.rank_plan(recipe, admission.Sizes.of(weights.sizes), weights.config)
    found = []
    for one in places:
        if one.name not in placement:
            continue
        machine = one.probe.machine  # two names may lead to one machine, and then share its memory
        sharing = {other.name for other in places if other.probe.machine == machine}
        ranks = sum(node in sharing for node in placement) * recipe.parallel.ranks_per_node
        room = admission.room_of(one.name, one.probe, ranks, on_cpu=recipe.image.on_cpu)
        if not settled and any(other.deployment == recipe.name and other.running for other in one.standing):
            room = replace(room, available=room.total)
        verdict = admission.admit(recipe, plan, room)
        found.append(one.find(MEMORY, "ok" if verdict.fits else "refuse", verdict.says, verdict.fix))
    return found


def await_memory(
    recipe: Recipe,
    weights: Weights,
    nodes: Sequence[Node],
    gathered: Mapping[str, NodeFacts],
    deployment: Deployment,
    *,
    patience: float = MEMORY_SECONDS,
) -> float:
    """Wait until the memory of what was just stopped has come back on every node; returns the seconds that it took.

    A driver gives memory back some seconds after its process has ended.

    Raises `KitError` (preflight) when it has not after `patience` seconds.
    """
    begun = time.monotonic()
    placement = [rank.node for rank in deployment.ranks]
    while True:
        with ThreadPoolExecutor(max_workers=len(nodes)) as pool:
            probes = list(pool.map(facts.look, nodes))
        places = [
            Place(node.name, gathered[node.name].address, found) for node, found in zip(nodes, probes, strict=True)
        ]
        missing = [one for one in memory(recipe, weights, places, placement, settled=True) if one.level == "refuse"]
        waited = time.monotonic() - begun
        if not missing:
            return waited
        if waited > patience:
            refuse([replace(one, says=f"{one.says}, {waited:.0f} s after what stood there ended") for one in missing])
        time.sleep(LOOK_SECONDS)


def refuse(found: Sequence[Finding]) -> None:
    """Raise one error for all refusals."""
    if not found:
        return
    first, rest = found[0], found[1:]
    steps = [one for one in (first.fix, *(sentence(other) for other in rest)) if one]
    raise KitError(
        first.says,
        where=f"node {first.node}",
        next_step="\n  also: ".join(steps) or None,
        code=ExitCode.PREFLIGHT,
    )


def sentence(one: Finding) -> str:
    """A finding as one line."""
    return f"node {one.node}: {one.check}: {one.says}" + (f"; next: {one.fix}" if one.fix else "")


def unreachable(error: KitError) -> Finding:
    """A node that could not be opened."""
    name = (error.where or "").removeprefix("node ")
    says = error.what + (f" ({error.why})" if error.why else "")
    return Finding(name, "ssh and engine", "refuse", says, error.next_step)


def memory_of(recipe: Recipe, places: Sequence[Place], placement: Sequence[str]) -> list[Finding]:
    """Memory admission of a recipe whose weights are on this machine; else a finding that says where they are not."""
    from exl3kit import weights as weight_files

    try:
        return memory(recipe, weight_files.survey(recipe), places, placement)
    except KitError as error:
        return [Finding(error.where or "local", "weights", "warn", error.what, error.next_step)]


def need_of(recipe: Recipe, placement: Sequence[str], deployment: Deployment | None = None) -> Need:
    """What a recipe asks of its nodes; `placement` is empty when they do not fit it."""
    from exl3kit import symbols

    several = len(set(placement)) > 1
    ports = [recipe.serve.port] + ([plans.rendezvous_port(recipe)] if several else [])
    return Need(
        deployment=recipe.name,
        gpu=not recipe.image.on_cpu,
        capabilities=tuple(recipe.image.arch),
        cuda=None if recipe.image.on_cpu else symbols.LOCK.stem.split("-")[1],
        several=several,
        rdma=recipe.fabric.require == "rdma" and several,
        ports={placement[0]: tuple(deployment.ports if deployment else ports)} if placement else {},
        env={name: value for name, value in recipe.serve.env.items() if name.startswith(fabric.NETWORK_NAMES)},
    )


def place(node: Node, found: NodeFacts) -> Place:
    """One node with all that the checks look at."""
    assert found.probe is not None
    standing = [
        checks.Standing(
            str(one.container.name),
            one.deployment,
            one.rank,
            int(one.label("ranks") or 1),
            one.label("generation"),
            one.state == "running",
            tuple(int(port) for port in one.label("ports").split(",") if port),
            one.health,
        )
        for one in containers.find([node])
    ]
    return Place(node.name, found.address, found.probe, tuple(standing))


def settings(recipe: Recipe, placement: Sequence[str], gathered: Mapping[str, NodeFacts]) -> dict[str, list[Setting]]:
    """What each rank's network is told, and by whom."""
    if len(set(placement)) < 2:
        return {}
    return {
        f"rank {rank} on {node}": fabric.settings(plans.network(recipe, rank, placement, gathered), recipe.serve.env)
        for rank, node in enumerate(placement)
    }
