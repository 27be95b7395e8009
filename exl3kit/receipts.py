"""Receipts: what every rank counted of itself while it runs, and whether that is what the checkpoint holds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from exl3kit import asking, recipes
from exl3kit.errors import ExitCode, KitError

if TYPE_CHECKING:
    from exl3kit.containers import Standing
    from exl3kit.recipe import Recipe
    from exl3kit.transport import Transport
    from exl3kit.weights import Weights


def collect(standing: Sequence[Standing]) -> list[dict[str, Any]]:
    """The receipts of all running ranks, each with the `node` it runs on and its `container`, by rank."""
    with ThreadPoolExecutor(max_workers=max(1, len(standing))) as pool:
        reports = list(pool.map(asking.report, standing))
    found = [
        {**receipt, "node": one.node.name, "container": str(one.container.name)}
        for one, report in zip(standing, reports, strict=True)
        for receipt in report["receipts"]
    ]
    return sorted(found, key=lambda receipt: int(receipt["rank"]))


def with_transports(
    receipts: Sequence[dict[str, Any]], standing: Sequence[Standing], ways: Sequence[Transport]
) -> list[dict[str, Any]]:
    """The receipts, each with the `transport` that its container really uses."""
    told = {str(one.container.name): way.as_json() for one, way in zip(standing, ways, strict=True)}
    return [{**receipt, "transport": told.get(str(receipt["container"]))} for receipt in receipts]


def verify(receipts: Sequence[Mapping[str, Any]], recipe: Recipe, weights: Weights) -> None:
    """Refuse receipts that do not add up to the recipe's gang and the checkpoint.

    Every rank has written one, all read the same checkpoint, none is without EXL3 tensors when the checkpoint has some,
    and together they hold every trellis byte (a replicated tensor may be there more than once, none may be missing).

    Raises `KitError` (verification).
    """
    problem = find_problem(receipts, recipe.parallel.world, weights.trellis_bytes)
    if problem is not None:
        raise KitError(
            problem,
            where=recipe.name,
            why="the receipts are counted inside the ranks, after loading",
            next_step=f"`kit logs {recipes.said(recipe)}` shows what each rank loaded",
            code=ExitCode.VERIFICATION,
        )


def find_problem(receipts: Sequence[Mapping[str, Any]], world: int, trellis_bytes: int) -> str | None:
    """What is wrong with the receipts of a gang of `world` ranks, as a sentence without a full stop, or None."""
    ranks = [int(receipt["rank"]) for receipt in receipts]
    absent = sorted(set(range(world)) - set(ranks))
    if absent or len(ranks) != world:
        return f"receipts of {world} ranks were expected and those of {ranks or 'none'} came"
    fingerprints = {str(receipt["fingerprint"]) for receipt in receipts}
    if len(fingerprints) > 1:
        held = ", ".join(f"rank {r['rank']} on {r['node']}: {str(r['fingerprint'])[:12]}" for r in receipts)
        return f"the ranks loaded different checkpoints ({held})"
    if trellis_bytes:
        empty = [int(receipt["rank"]) for receipt in receipts if not receipt["trellis_tensors"]]
        if empty:
            return f"rank {empty[0]} loaded no EXL3 tensor"
        held_bytes = sum(int(receipt["trellis_bytes"]) for receipt in receipts)
        if held_bytes < trellis_bytes:
            return f"the ranks hold {held_bytes} bytes of trellis together, and the checkpoint has {trellis_bytes}"
    return None


# ---- comparing ranks -------------------------------------------------------------------------------------------------

ALIKE = (
    "schema", "fingerprint", "stamp", "generation", "demo", "configured_tier", "effective_tier", "tier_reason",
    "tp_size", "backend", "kernel_targets", "cap_major", "cap_minor", "sym_exl3_moe", "sym_fat_gemm",
    "sym_fat_gemm_scatter", "sym_fat_moe", "grouped_eligible",
)  # fmt: skip
"""What every rank of a gang must say alike."""

ALIKE_IN_A_STAGE = ("layers", "rates", "codebooks", "moe_layers_loaded", "shared_suh", "shared_suh_layers")
"""What ranks of one pipeline stage must say alike too, unless each holds experts of its own."""


def find_faults(receipts: Sequence[Mapping[str, Any]], recipe: Recipe) -> list[str]:
    """What is wrong with the receipts of a recipe's gang, as sentences without a full stop; empty when nothing is.

    All ranks have written one, they agree (see `ALIKE`), the tier is the one that the recipe names, and each rank's
    experts handled as many rows as they were given.
    """
    problem = find_problem(receipts, recipe.parallel.world, 0)
    faults = [problem] if problem is not None else []
    one_stage = recipe.parallel.pipeline == 1 and not recipe.parallel.expert
    keys = (*ALIKE, *(ALIKE_IN_A_STAGE if one_stage else ()))
    faults += disagreements(receipts, [key for key in keys if key != "fingerprint"])  # that one has its sentence above
    for receipt in receipts:
        faults += _faults_of(receipt, recipe.exl3.tier)
    return faults


def disagreements(receipts: Sequence[Mapping[str, Any]], keys: Sequence[str] = ALIKE) -> list[str]:
    """One sentence for every key that the ranks do not say alike, with what each of them says."""
    found = []
    for key in keys:
        if len({json.dumps(receipt.get(key), sort_keys=True) for receipt in receipts}) > 1:
            said = ", ".join(f"rank {one['rank']} on {one['node']}: {json.dumps(one.get(key))}" for one in receipts)
            found.append(f"the ranks disagree about {key} ({said})")
    return found


def _faults_of(receipt: Mapping[str, Any], tier: str) -> list[str]:
    where, faults = f"rank {receipt['rank']} on {receipt['node']}", []
    effective = receipt.get("effective_tier")
    if tier not in ("auto", effective):
        reason = receipt.get("tier_reason")
        faults.append(f"{where} runs the tier {effective} ({reason}), and the recipe names {tier}")
    handled, expected = sum((receipt.get("rows_handled") or {}).values()), receipt.get("rows_expected", 0)
    if handled != expected:
        faults.append(f"{where} handled {handled} rows of experts, and {expected} were given to it")
    return faults
