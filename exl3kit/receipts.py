"""Receipts: what every rank counted of itself while it runs, and whether that is what the checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from exl3kit import asking
from exl3kit.errors import ExitCode, KitError

if TYPE_CHECKING:
    from exl3kit.containers import Standing
    from exl3kit.recipe import Recipe
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
            next_step=f"`kit logs {recipe.name}` shows what each rank loaded",
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
