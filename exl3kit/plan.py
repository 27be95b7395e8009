"""`kit plan`: what each rank of a recipe will take, whether that fits, what will run and by which commands.

Pure: the recipe, its weights (from headers, or as published) and the nodes' facts in, one `Plan` out.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from exl3kit import admission, geometry, published
from exl3kit import deployment as plans
from exl3kit.admission import GIB, RankPlan, Room, Sizes, Verdict

if TYPE_CHECKING:
    from exl3kit.deployment import NodeFacts
    from exl3kit.recipe import Recipe

MILLION = 1 << 20  # tokens, as context lengths are counted
# Memory of machines that recipes name, where none was asked; a node's own facts replace it.
NOMINAL = {
    "12.1": (("one DGX Spark", 127_601_452 << 10, 118_000_000 << 10),),  # MemTotal, and what an idle one has free
    "12.0": (("RTX PRO 6000, 96 GB", 95 * GIB, 94 * GIB), ("RTX 5090, 32 GB", 31 * GIB, 30 * GIB)),
    "8.9": (("RTX 4090, 24 GB", 23 * GIB + GIB // 2, 23 * GIB),),
}


@dataclass(frozen=True)
class Source:
    """Where the sizes come from, in words, and the sizes; `parts` and `moe_layer` only where the shape is counted."""

    says: str
    sizes: Sizes
    config: Mapping[str, Any]
    parts: Mapping[str, int]
    moe_layer: int = 0


@dataclass(frozen=True)
class Plan:
    """All that `kit plan` shows."""

    recipe: Recipe
    source: Source
    rank: RankPlan
    refusals: tuple[str, ...]
    verdicts: tuple[Verdict, ...]
    runs: tuple[tuple[str, str], ...]  # what, and why
    networks: Mapping[str, Mapping[str, str]]
    commands: tuple[str, ...]
    nominal: bool  # the verdicts are about machines as sold, no node was asked

    @property
    def fits(self) -> bool:
        """Nothing is refused, and some machine has room (every node, where nodes were asked)."""
        room = any if self.nominal else all
        return not self.refusals and (not self.verdicts or room(one.fits for one in self.verdicts))

    def as_json(self) -> dict[str, Any]:
        rank = self.rank.as_fields()
        return {
            "recipe": self.recipe.name,
            "ranks": self.recipe.parallel.world,
            "weights_from": self.source.says,
            "rank": {**rank, "kv_million_tokens": self.rank.kv_token * MILLION},
            "parts": dict(self.source.parts),
            "moe_layer_packed": self.source.moe_layer,
            "refusals": list(self.refusals),
            "fits": self.fits,
            "machines": [{**one.__dict__, "nominal": self.nominal} for one in self.verdicts],
            "runs": [{"what": what, "why": why} for what, why in self.runs],
            "network": {rank: dict(env) for rank, env in self.networks.items()},
            "commands": list(self.commands),
        }


def of_published(recipe: Recipe, model: published.Published) -> Source:
    """Sizes counted from a published shape."""
    parallel = recipe.parallel
    guess = f"; {model.assumed}" if model.assumed else ""
    says = f"published shape of {model.name} ({model.source}{guess})"
    parts = model.parts(parallel.tensor, expert=parallel.expert)
    return Source(says, model.sizes, model.config, parts, model.moe_layer(parallel.tensor))


def make(
    recipe: Recipe,
    source: Source,
    facts: Mapping[str, NodeFacts] | None = None,
    placement: Sequence[str] = (),
    named: str = "",
    ref: str | None = None,
) -> Plan:
    """The plan of a recipe.

    Parameters
    ----------
    facts, placement: of nodes that were asked, and the node of each rank; without them, machines as sold.
    named, ref: how the operator named the nodes and the recipe, for the commands.
    """
    rank = admission.rank_plan(recipe, source.sizes, source.config)
    if source.parts and not recipe.image.on_cpu:
        rank = replace(rank, weights=-(-sum(source.parts.values()) // recipe.parallel.pipeline))
    parallel = recipe.parallel
    refusals = [
        *geometry.cut_faults(
            source.config, tensor=parallel.tensor, expert=parallel.expert, exl3=recipe.exl3.tier != "none"
        ),
        *geometry.pipeline_faults(source.config, pipeline=parallel.pipeline),
        *geometry.expert_faults(source.config, expert=parallel.expert),
    ]
    networks = {}
    if facts and len(set(placement)) > 1:
        for number, node in enumerate(placement):
            told = plans.network(recipe, number, placement, facts)
            own = {name: value for name, value in recipe.serve.env.items() if name in told or name.startswith("NCCL_")}
            networks[f"rank {number} on {node}"] = told | own
    return Plan(
        recipe,
        source,
        rank,
        tuple(refusals),
        tuple(admission.admit(recipe, rank, room) for room in rooms(recipe, facts, placement)),
        tuple(runs(recipe, source.config)),
        networks,
        tuple(commands(recipe, named, ref or recipe.name)),
        not facts,
    )


def rooms(recipe: Recipe, facts: Mapping[str, NodeFacts] | None, placement: Sequence[str]) -> list[Room]:
    """The memory that the plan is held against."""
    ranks = recipe.parallel.ranks_per_node
    if not facts:
        sold_with = {"linux/arm64": ("12.1",), "linux/amd64": ("8.9", "12.0")}.get(recipe.image.platform or "", NOMINAL)
        found = [one for arch in recipe.image.arch if arch in sold_with for one in NOMINAL.get(arch, ())]
        unified = admission.RESERVE_UNIFIED
        return [Room(name, total, free, unified if "Spark" in name else 0, 1) for name, total, free in found]
    return [
        admission.room_of(node, probe, placement.count(node) * ranks, on_cpu=recipe.image.on_cpu)
        for node in dict.fromkeys(placement)
        if (probe := facts[node].probe) is not None
    ]


def runs(recipe: Recipe, config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What will run of EXL3, and why that; what only the loaded tensors can decide is said to be open."""
    image, exl3 = recipe.image, recipe.exl3
    if exl3.tier == "none":
        return [("no EXL3 layers", "exl3.tier is none: the unquantised control arm")]
    if image.on_cpu:
        return [("the reference decoder", "a +cpu image has no kernels; tiers run as reference loops")]
    shape = admission.shape_of(config)
    built = f"rates {', '.join(map(str, image.rates))}, {', '.join(image.codebooks)}, sm_{', sm_'.join(image.arch)}"
    told = [("fat symbols", f"compiled for {built.replace('.', '')}" if image.arch else "none: image.arch is empty")]
    if admission.number(shape, *geometry.EXPERTS):
        why = {
            "auto": "auto: the highest that resolves when the weights are loaded; gate and up must share suh above "
            "sorted, and the tensors say whether they do",
            "grouped": "all experts of a layer in three launches; delivered, or refused at load (exit 5)",
        }.get(exl3.tier, "as named; delivered, or refused at load (exit 5)")
        told.append((f"experts: tier {exl3.tier}", why))
        told += uneven(recipe, shape)
    rows = exl3.prefill_reconstruct_m
    dense = {
        "auto": ("fused below the crossover, decoded once and cuBLAS above", "the crossover is the kernel table's"),
        0: ("fused at every number of rows", "exl3.prefill_reconstruct_m is 0"),
    }.get(rows, (f"decoded once and cuBLAS from {rows} rows", "exl3.prefill_reconstruct_m"))
    told.append((f"dense layers: {dense[0]}", dense[1]))
    if exl3.kernel_table is not None:
        told.append(("tiles as measured", f"exl3.kernel_table, {exl3.kernel_table}; refused on another GPU"))
    if recipe.serve.enforce_eager:
        told.append(("no graphs", "serve.enforce_eager"))
    else:
        graphs = "decode of packed layers inside captured graphs" if exl3.graph_decode else "vLLM's graphs"
        told.append((graphs, "exl3.graph_decode" if exl3.graph_decode else "exl3.graph_decode is off"))
    return told


def uneven(recipe: Recipe, shape: Mapping[str, Any]) -> list[tuple[str, str]]:
    """How the experts' width is cut where the blocks do not divide."""
    inner, tensor = admission.number(shape, "moe_intermediate_size") or 0, recipe.parallel.tensor
    if recipe.parallel.expert:
        return [("whole experts on each rank", "parallel.expert")]
    blocks = -(-inner // geometry.BLOCK)
    if not inner or blocks % tensor == 0:
        return []
    low, more = divmod(blocks, tensor)
    split = "/".join(str(low + 1) for _ in range(more)) + "/" + "/".join(str(low) for _ in range(tensor - more))
    return [(f"experts cut unevenly, {split} blocks", f"{inner} is {blocks} blocks of 128, which no rank may cut")]


def commands(recipe: Recipe, named: str, ref: str) -> list[str]:
    """The way to a serving gang; unnamed nodes are this machine where it can be all of them, else stand-ins."""
    alone = recipe.image.on_cpu or recipe.parallel.nodes == 1
    nodes = named or ("local" if alone else ",".join(f"node{number + 1}" for number in range(recipe.parallel.nodes)))
    verbs = ["doctor", *(["weights fetch"] if recipe.model.repo is not None else []), "build", "up", "receipts"]
    return [f"kit {verb} {shlex.quote(ref)} --nodes {shlex.quote(nodes)}" for verb in verbs]


def table(plan: Plan) -> list[tuple[str, str, str]]:
    """Rows of bytes: what, how many, how that comes about."""
    rank, recipe = plan.rank, plan.recipe
    gib = admission.gib
    rows = [("weights", gib(rank.weights), plan.source.says)]
    rows += [(f"  {part}", gib(size), "") for part, size in sorted(plan.source.parts.items(), key=lambda one: -one[1])]
    if plan.source.moe_layer:
        rows.append(("  one MoE layer", gib(plan.source.moe_layer), "packed weights alone"))
    million = f"{rank.kv_token} bytes a token, {gib(rank.kv_token * MILLION)} for 1M tokens"
    named = "serve.kv_cache_memory; " if rank.kv_cache > rank.kv else ""
    rows.append(("KV cache", gib(rank.kv_cache), f"{named}{admission.one_request(rank)}; {million}"))
    batched = recipe.serve.max_num_batched_tokens or admission.BATCHED_TOKENS
    rows += [
        ("activation", gib(rank.activation), f"estimate for {batched} rows (MNBT)"),
        ("scratch", gib(rank.scratch), "of the EXL3 kernels"),
        ("graphs", gib(rank.graphs), "estimate" if rank.graphs else "none"),
        ("context", gib(rank.context), "estimate: CUDA, NCCL, cuBLAS" if not recipe.image.on_cpu else "the process"),
        ("in all", gib(rank.fixed + rank.kv_cache), f"on each of {recipe.parallel.world} ranks"),
    ]
    return rows
