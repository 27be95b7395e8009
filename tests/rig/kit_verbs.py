"""The kit as an operator runs it against the rig, and what is on the hosts' engines afterwards."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rig_hosts import REPOSITORY, Completed, Rig, call

VERB_SECONDS = 300  # TP2 is ready after 22-25 s on two idle cores; a busy machine may take its time


def kit_argv(*argv: str | Path) -> list[str]:
    return [sys.executable, "-m", "exl3kit.cli", *map(str, argv)]


def kit(rig: Rig, *argv: str | Path, timeout: float = VERB_SECONDS) -> Completed:
    """Run a verb of the kit as an operator on this machine."""
    return call(*kit_argv(*argv), check=False, timeout=timeout, env=rig.env, cwd=REPOSITORY)


def told(done: Completed, code: int = 0) -> dict[str, Any]:
    """The JSON object of a verb that ended with `code`."""
    assert done.returncode == code, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def everything(rig: Rig, node: str) -> list[str]:
    """Containers (also stopped ones) and networks on a host's engine that are not its own."""
    containers = rig.docker(node, "ps", "--all", "--format", "container {{.Names}}").stdout.splitlines()
    networks = rig.docker(node, "network", "ls", "--format", "network {{.Name}}").stdout.splitlines()
    return containers + [name for name in networks if name not in ("network bridge", "network host", "network none")]


def assert_empty(rig: Rig) -> None:
    assert {node: everything(rig, node) for node in ("node1", "node2")} == {"node1": [], "node2": []}


def refusal(done: Completed, code: int) -> str:
    """The sentence of a verb that refused with `code`, without a traceback."""
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr
