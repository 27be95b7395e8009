"""Down: a deployment taken from every node that answers, and what may be left on those that do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from exl3kit import cluster, containers, deploy_lock, post_mortem
from exl3kit.errors import ExitCode, KitError

if TYPE_CHECKING:
    from exl3kit.containers import Standing
    from exl3kit.nodes import Node
    from exl3kit.progress import Progress


@dataclass(frozen=True)
class Down:
    """What was removed, and what may still run: nodes that did not answer, with their errors."""

    deployment: str
    removed: list[str]
    left: Mapping[str, KitError]
    absent: list[int]  # ranks that were on none of the nodes that answered

    def failure(self, named: str) -> KitError | None:
        """None when every node was cleared; else the error (unreachable) to end with. `named` is `--nodes`."""
        if not self.left:
            return None
        nodes = ", ".join(self.left)
        listed = ", ".join(f"rank {rank}" for rank in self.absent)
        what = f"{self.deployment} may still run on {nodes}" + (f" ({listed} of it)" if listed else "")
        why = "; ".join(
            f"{name}: {error.what}" + (f", {error.why}" if error.why else "") for name, error in self.left.items()
        )
        rest = named if cluster.is_file(named) else ",".join(self.left)
        return KitError(
            what,
            where=f"--nodes {named}",
            why=why,
            next_step=f"when it answers again: `kit down {self.deployment} --nodes {rest}`; until then a rank there "
            "has no peers, serves nothing, and when its engine starts it, waits for them",
            code=ExitCode.UNREACHABLE,
        )


def down(
    nodes: Sequence[Node],
    missing: Mapping[str, KitError],
    deployment: str,
    progress: Progress,
    *,
    volumes: bool = False,
    break_lock: bool = False,
) -> Down:
    """Stop a deployment on the nodes and remove its containers and network, verified on each.

    Parameters
    ----------
    nodes: those that answer.
    missing: those that do not, with the error of each.
    volumes: also remove what the ranks kept for their next start.

    Raises `KitError`: preflight when another operator is at work, unreachable for a node that is lost meanwhile,
    serving when something is still there afterwards.
    """
    with deploy_lock.hold(nodes, f"down {deployment}", break_lock=break_lock) as locks:
        for sentence in locks.broken:
            progress.tell(sentence)
        standing = containers.find(nodes, deployment)
        with progress.stage("stop the ranks") as stage:
            kept = post_mortem.keep(standing)
            removed = containers.take_down(nodes, deployment, volumes=volumes)
            stage.conclude(", ".join(removed) or f"no rank of {deployment} was there")
    if kept:
        progress.tell(f"the last post-mortem is kept: `kit logs {deployment} --post-mortem`")
    return Down(deployment, removed, missing, absent_ranks(standing) if missing else [])


def absent_ranks(standing: Sequence[Standing]) -> list[int]:
    """Ranks of a deployment that are not among its containers at hand, told by their labels."""
    expected = max((int(one.label("ranks") or 0) for one in standing), default=0)
    return sorted(set(range(expected)) - {one.rank for one in standing})
