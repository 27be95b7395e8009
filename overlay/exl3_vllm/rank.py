"""The entry point of every container: one rank of a deployment. Standard library only.

    python -m exl3_vllm.rank -- vllm serve ...    guard and supervise vLLM until the gang ends (docs/gang.md)
    python -m exl3_vllm.rank --health             exit 0 when this rank is what its role promises
    python -m exl3_vllm.rank --report             status, post-mortem and receipts of this rank, one JSON object
    python -m exl3_vllm.rank --ask REQUEST        wait for the API, send one request, print the answer as JSON

vLLM's rank 0 ends with status 0 after a peer has died, and its `/health` stays green meanwhile, so neither is trusted
here: an end that nobody asked for is a failure, and health means that the head gave a token in this incarnation.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata, util
from pathlib import Path
from typing import Any

from exl3_vllm import api_gate, api_guard, guard, post_mortem
from exl3_vllm.own_cache import use_own_cache
from exl3_vllm.rank_api import ask, get
from exl3_vllm.rank_settings import (
    EXIT_PREFLIGHT,
    EXIT_USAGE,
    EXIT_VERIFICATION,
    RankError,
    Settings,
    say,
)
from exl3_vllm.supervisor import Supervisor

PLUGIN = "exl3"  # its name in the entry point group below
PLUGIN_GROUP = "vllm.general_plugins"
BUILT_CACHE = Path("/opt/exl3/vllm-cache")
STALE_S = 15.0  # a status older than this belongs to a supervisor that no longer runs

USAGE = "usage: python -m exl3_vllm.rank (-- COMMAND... | --health | --report | --ask REQUEST)"

# Before vLLM starts ---------------------------------------------------------------------------------------------------


def check_plugin(environ: Mapping[str, str]) -> None:
    """Refuse when vLLM could start without the EXL3 plugin: vLLM logs and skips a plugin that it cannot load.

    That it did load, with every tensor, is what the receipt says later; this catches the plain cases in milliseconds.
    """
    allowed = environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in [name.strip() for name in allowed.split(",")]:
        raise RankError(f"VLLM_PLUGINS={allowed!r} leaves out {PLUGIN!r}; unset it or add the name", EXIT_PREFLIGHT)
    found = [entry for entry in metadata.entry_points(group=PLUGIN_GROUP) if entry.name == PLUGIN]
    if not found:
        raise RankError(
            f"this image has no {PLUGIN!r} in the entry points {PLUGIN_GROUP}; build it again with `kit build`",
            EXIT_VERIFICATION,
        )
    try:
        present = util.find_spec(found[0].module) is not None
    except ImportError:
        present = False
    if not present:
        raise RankError(
            f"the plugin's module {found[0].module} is missing; build again with `kit build`", EXIT_VERIFICATION
        )


def check_model(model_dir: Path) -> None:
    """Refuse when the rank's user cannot read the model; vLLM would say so after 20 s, and only on this rank."""
    if not model_dir.is_dir():
        raise RankError(f"no model directory at {model_dir}; is it mounted?", EXIT_PREFLIGHT)
    if not os.access(model_dir, os.R_OK | os.X_OK):
        raise RankError(
            f"user {os.getuid()} cannot list {model_dir}; make it world-readable (chmod -R a+rX)", EXIT_PREFLIGHT
        )
    for path in sorted(model_dir.iterdir()):
        if not path.exists():
            raise RankError(f"{path} is a link to nothing; copy the weights again", EXIT_PREFLIGHT)
        if not os.access(path, os.R_OK):
            raise RankError(
                f"user {os.getuid()} cannot read {path}; make it world-readable (chmod a+r)", EXIT_PREFLIGHT
            )
    if not (model_dir / "config.json").is_file():
        raise RankError(f"{model_dir} has no config.json, so it is not a model directory", EXIT_PREFLIGHT)


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Check what can be checked in milliseconds, then be the guard of a supervisor."""
    settings = Settings.from_environ(environ)
    check_plugin(environ)
    check_model(settings.model_dir)
    for folder in (settings.receipt_dir, settings.state_dir):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RankError(f"cannot make {folder}: {error.strerror}", EXIT_PREFLIGHT) from error
    child = use_own_cache({**environ, "EXL3_RECEIPT_DIR": str(settings.receipt_dir)}, settings, BUILT_CACHE)
    if settings.role == "head":
        argv = api_gate.gated(argv)
        key = settings.api_key()
        if key is not None:
            child[api_guard.VARIABLE] = key
            argv = api_guard.guarded(argv)

    def supervise(alive: guard.SignOfLife) -> int:
        try:
            return Supervisor(argv, settings, child, alive).run()
        except RankError as error:
            say(settings, str(error))
            return error.code

    return guard.guard(supervise, lambda kind, why: report_failed(settings, kind, why))


def report_failed(settings: Settings, kind: str, why: str) -> None:
    """The death report of a rank whose supervisor can no longer write one."""
    status = read_status(settings) or {}
    death = post_mortem.record(settings.rank, kind, "supervisor", why, time.monotonic(), lines=[])
    report = post_mortem.compose(
        {settings.rank: death},
        world=settings.world,
        generation=settings.generation,
        incarnation=int(status.get("incarnation", 0)),
        offset=lambda rank: 0.0,
        last_heard={},
    )
    problem = post_mortem.save(report, settings.state_dir)
    say(settings, problem or why)
    say(settings, post_mortem.line(report))


# Questions to a running rank ------------------------------------------------------------------------------------------


def read_status(settings: Settings) -> dict[str, Any] | None:
    """What the supervisor last told of itself; None before it told anything."""
    try:
        return dict(json.loads(settings.status_file.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def read_receipts(receipt_dir: Path) -> list[dict[str, Any]]:
    """Every receipt that the plugin has written in this container, by file name."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(receipt_dir.glob("*.json"))]


def health(settings: Settings) -> str | None:
    """Why this rank is not healthy, or None.

    Head: it gave a token in this incarnation, every peer is heard, requests get on, and the API answers. Headless: it
    has loaded its share of the model, its processes run, and the head serves.
    """
    status = read_status(settings)
    if status is None:
        return "the supervisor has not started yet"
    if time.time() - status["beat"] > STALE_S:
        return f"the supervisor's last sign of life is {time.time() - status['beat']:.0f} s old"
    if status["state"] != "serving":
        missing = ", ".join(f"rank {one['rank']} (it {one['why']})" for one in status["waiting_for"])
        return f"waits for {missing}" if missing else str(status["why"] or status["state"])
    if not any(settings.receipt_dir.glob("*.json")):
        return "the model is not loaded (no receipt)"
    for peer in status["peers"]:
        if peer["silent_s"] is None or peer["silent_s"] > status["limits"]["lost_s"]:
            return f"rank {peer['rank']} is silent"
    stopped = [one["process"] for one in status["processes"] if one["state"] == "T"]
    if stopped:
        return f"{stopped[0]} was stopped by a signal"
    progress = status["progress"]
    if progress is not None and progress["last_progress_s"] > status["limits"]["stall_s"]:
        return f"requests wait, and nothing has moved for {progress['last_progress_s']:.0f} s"
    if settings.role == "head":
        code, words = get(settings.api + "/health", timeout=5)
        return None if code == 200 else f"the API answers {code or words}"
    return None


def report(settings: Settings) -> dict[str, Any]:
    """What this rank says about itself: its supervisor's status, its health, its receipts, the newest post-mortem."""
    status = read_status(settings) or {"rank": settings.rank, "role": settings.role, "state": "waiting"}
    return {
        **status,
        "unhealthy": health(settings),
        "receipts": read_receipts(settings.receipt_dir),
        "post_mortem": post_mortem.newest(settings.state_dir),
    }


def main(argv: Sequence[str]) -> int:
    try:
        match list(argv):
            case ["--", _, *_]:
                return run(argv[1:], os.environ)
            case ["--health"]:
                why = health(Settings.from_environ(os.environ))
                print(why or "healthy")
                return 0 if why is None else 1
            case ["--report"]:
                print(json.dumps(report(Settings.from_environ(os.environ))))
                return 0
            case ["--ask", request]:
                print(json.dumps(ask(Settings.from_environ(os.environ), json.loads(request))))
                return 0
        raise RankError(USAGE, EXIT_USAGE)
    except RankError as error:
        print(f"exl3 rank {os.environ.get('EXL3_RANK', '?')}: {error}", file=sys.stderr, flush=True)
        return error.code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
