"""The table of tile and crossover choices that `kit bench kernels` measured on a GPU, for the ranks of a recipe.

It is small, so its content goes to every rank in the environment: it is part of the deployment's spec, and nothing has
to lie on the nodes. The ranks hold it against their GPU once more, its number of SMs too, which no node tells.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from exl3kit.errors import ExitCode, KitError

if TYPE_CHECKING:
    from exl3kit.deployment import NodeFacts
    from exl3kit.recipe import Recipe

LARGEST = 1 << 16  # bytes of a file; one that the bench writes has 600
WHERE = "exl3.kernel_table"


def of(recipe: Recipe, nodes: Iterable[NodeFacts]) -> str | None:
    """The recipe's table as JSON on one line, None when it names none.

    Raises `KitError` (preflight): the file is missing or no such table, or a node has another GPU.
    """
    path = recipe.exl3.kernel_table
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
    except OSError as error:
        raise refusal(path, error.strerror or str(error)) from error
    try:
        told = json.loads(data[:LARGEST])
        capability = ".".join(str(int(part)) for part in told["capability"])
        if not isinstance(told["table"], dict) or not isinstance(told["sms"], int):
            raise TypeError("table and sms are of other types")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise refusal(path, f"no table that `kit bench kernels` writes: {error}") from error
    for node in nodes:
        for gpu in node.probe.gpus if node.probe else ():
            if gpu.capability != capability:
                raise refusal(path, f"it was measured on capability {capability}, and {node.name} has {gpu.capability}")
    return json.dumps(told, sort_keys=True)


def refusal(path: Path, why: str) -> KitError:
    return KitError(
        "the kernel table cannot be used",
        where=f"{WHERE}, {path}",
        why=why,
        next_step="`kit bench kernels RECIPE --nodes NAME` measures one; without the key the built-in table is used",
        code=ExitCode.PREFLIGHT,
    )
