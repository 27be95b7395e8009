"""The command line: parse, call, print. A verb lives in the module of its noun and imports what it needs when it runs.

`kit --help` must answer in under 0.3 s, so nothing heavier than typer is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from exl3kit import run_log
from exl3kit.cli import (
    bench,
    build,
    bundle,
    completion,
    dash,
    demo,
    doctor,
    export,
    image,
    init,
    lock,
    misuse,
    models,
    output,
    overlay,
    parity,
    plan,
    receipts,
    recipe,
    report,
    serve,
    teaching,
    verify,
    watch,
    weights,
)
from exl3kit.errors import ExitCode, KitError

# Panel of `kit --help` -> verb -> what runs it, and what it is for; in the order in which a newcomer needs them.
PANELS: dict[str, dict[str, tuple[Callable[..., None] | typer.Typer, str]]] = {
    "Start here": {
        "demo": (demo.demo, "build, serve and check two tiny models; needs no GPU"),
        "init": (init.init, "a cluster file and a recipe that fit your machines"),
        "doctor": (doctor.doctor, "what speaks against serving on the nodes, with the fix"),
        "plan": (plan.plan, "bytes per rank, what fits, and what will run"),
    },
    "Serve": {
        "build": (build.build, "make a recipe's image, the same on every node"),
        "up": (serve.up, "serve a recipe: image, weights, ranks, a checked answer"),
        "wait": (serve.wait, "wait until a deployment answers, as after a reboot"),
        "status": (watch.status, "what stands on the nodes, rank by rank"),
        "dash": (dash.dash, "a live page of all that, for a browser"),
        "logs": (watch.logs, "the logs of all ranks, merged by time"),
        "restart": (serve.restart, "replace what serves, once everything that may refuse did not"),
        "down": (serve.down, "stop a deployment on every node"),
        "rollback": (image.rollback, "bring a recipe's earlier image back"),
    },
    "Recipes": {
        "recipe": (recipe.app, "list, show, check and import recipes"),
        "lock": (lock.lock, "every input of a recipe's image, and its stamp"),
        "render": (serve.render, "the files and settings that each rank would get"),
        "export": (export.app, "a deployment for compose, docker run, systemd or Kubernetes"),
    },
    "Images and weights": {
        "fetch": (build.fetch, "get what images are built from, to build without a network"),
        "image": (image.app, "which image is on which node; remove old ones"),
        "weights": (weights.app, "fetch, verify and copy a recipe's weights"),
        "bundle": (bundle.app, "everything for a site without a network, in one file"),
        "models": (models.app, "checkpoints of random bits, to try the kit with"),
    },
    "Prove and measure": {
        "receipts": (receipts.receipts, "what every rank loaded and ran, and whether they agree"),
        "verify": (verify.app, "hold compiled kernels against what is needed"),
        "overlay": (overlay.app, "the patches of vLLM, and whether a vLLM fits them"),
        "bench": (bench.app, "figures that can be trusted, or why they cannot"),
        "parity": (parity.parity, "whether two ways to compute a model agree"),
    },
    "This program": {
        "report": (report.report, "one archive for whoever helps you, without secrets"),
        "completion": (completion.app, "completion of verbs, recipes and nodes for your shell"),
    },
}


class Kit(teaching.Group):
    """The program itself."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        teaching.with_epilogs(self)

    def list_commands(self, ctx: object) -> list[str]:
        """Every verb, in the order of its panels."""
        return [name for verbs in PANELS.values() for name in verbs]


app = teaching.App("Build, prove and serve EXL3-quantised models with vLLM, on one machine or several.", Kit)
for panel, verbs in PANELS.items():
    for name, (verb, purpose) in verbs.items():
        if isinstance(verb, typer.Typer):
            app.add_typer(verb, name=name, rich_help_panel=panel, short_help=purpose)
        else:
            app.command(name, rich_help_panel=panel, short_help=purpose)(verb)


@app.callback()
def kit(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=output.version, help="Print the kit's version.")
    ] = False,
) -> None:
    """Build, prove and serve EXL3-quantised models with vLLM, on one machine or several."""


def main() -> None:
    """Run one verb and leave with its exit code; whatever goes wrong becomes a sentence, never a traceback."""
    output.prepare()
    status = output.verdict(output.settle(_run(as_json="--json" in sys.argv)))
    run_log.end(status)
    raise SystemExit(status)


def _run(*, as_json: bool) -> int:
    try:
        if sys.argv[1:3] == ["completion", "words"]:
            completion.answer(sys.argv[3:])
            return 0
        # Not standalone: there typer prints usage faults itself, past --json.
        status = app(prog_name="kit", standalone_mode=False)
    except KitError as error:
        return output.refuse(error, as_json=as_json)
    except typer.TyperException as error:
        return misuse.refuse(error, as_json=as_json)
    except (KeyboardInterrupt, typer.Abort):
        status = int(ExitCode.INTERRUPTED)
    except SystemExit as ended:  # typer's way out when the reader of stdout left
        status = ended.code
    except Exception as error:
        if output.is_lost():
            return int(ExitCode.FAULT)  # nothing was wrong with the verb; `settle` says what was
        from exl3kit.cli import crash

        return output.refuse(crash.report(error), as_json=as_json)
    if status == ExitCode.INTERRUPTED:
        return output.refuse(KitError("interrupted", code=ExitCode.INTERRUPTED), as_json=as_json)
    return status if isinstance(status, int) else 0
