"""Waiting for a deployment that starts by itself, as after a reboot of its nodes, until it answers for real."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from exl3kit import asking, containers
from exl3kit import status as statuses
from exl3kit.errors import ExitCode, KitError
from exl3kit.nodes import open_nodes

if TYPE_CHECKING:
    from exl3kit.asking import Answer
    from exl3kit.progress import Progress, Stage
    from exl3kit.recipe import Probe

LOOK_SECONDS = 2.0
PROBE_WAIT_S = 20.0  # every rank says that it serves, so the API is up; a first completion after it may still be slow


class NothingStands(KitError):
    """Waiting would have no end."""


def until_served(nodes: str, deployment: str, probe: Probe, progress: Progress, *, timeout_s: float) -> Answer:
    """The first real completion of a deployment, which may be on nodes that do not answer yet.

    Nothing is changed. Raises `KitError` (serving) that says what every rank waited for at the end, or that all nodes
    answer and nothing of the deployment stands on them.
    """
    deadline = time.monotonic() + timeout_s
    said = "nothing was seen"
    with progress.stage(f"wait for {deployment}") as stage:
        while time.monotonic() < deadline:
            answer, said = look(nodes, deployment, probe, stage, deadline)
            if answer is not None:
                stage.conclude(said)
                return answer
            time.sleep(LOOK_SECONDS)
        raise KitError(
            f"{deployment} has not answered within {timeout_s:.0f} s",
            where=f"--nodes {nodes}",
            why=said,
            next_step=f"`kit status {deployment} --nodes {nodes}`, `kit logs {deployment} --nodes {nodes}`",
            code=ExitCode.SERVING,
        )


def look(nodes: str, deployment: str, probe: Probe, stage: Stage, deadline: float) -> tuple[Answer | None, str]:
    """Look until it answers or the deadline passes, or the nodes have to be opened anew because one is lost."""
    missing: dict[str, KitError] = {}
    said = "the nodes do not answer"
    try:
        with open_nodes(nodes, missing=missing) as opened:
            while time.monotonic() < deadline:
                found = statuses.status(opened, missing, deployment)
                if not found and not missing:
                    raise NothingStands(
                        f"nothing of {deployment} stands there, so nothing will serve",
                        where=f"--nodes {nodes}",
                        next_step=f"`kit up {deployment} --nodes {nodes}`",
                        code=ExitCode.SERVING,
                    )
                said = describe(found, missing)
                stage.say(said)
                if found and found[0]["state"] == statuses.SERVING:
                    head = containers.find(opened, deployment)[0]
                    answer = asking.complete(
                        head, head.label("model"), probe.prompt, probe.max_tokens, wait_s=PROBE_WAIT_S
                    )
                    if answer.refusal() is None:
                        return answer, f"it answers, {answer.tokens} tokens in {answer.seconds:.1f} s"
                    said = f"it serves and does not answer: {answer.refusal()}"
                if missing:
                    break  # to try those again
                time.sleep(LOOK_SECONDS)
    except NothingStands:
        raise
    except KitError as lost:
        said = str(lost)
    return None, said


def describe(found: Sequence[Mapping[str, Any]], missing: Mapping[str, KitError]) -> str:
    """What stands in one line: nodes that do not answer, and of every rank its state and what it waits for."""
    said = [f"{name}: {error.what}" for name, error in missing.items()]
    for rank in found[0]["ranks"] if found else []:
        more = statuses.waits(rank) or rank["why"] or ""
        said.append(f"rank {rank['rank']} on {rank['node']} {rank['state']}" + (f": {more}" if more else ""))
    return "; ".join(said)
