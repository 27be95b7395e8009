"""The command line: parse, call, print. A verb lives in the module of its noun and imports what it needs when it runs.

`kit --help` must answer in under 0.3 s, so nothing heavier than typer is imported here.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

import typer

from exl3kit.cli import (
    bench,
    build,
    bundle,
    demo,
    doctor,
    export,
    image,
    init,
    lock,
    models,
    output,
    overlay,
    parity,
    plan,
    receipts,
    recipe,
    report,
    serve,
    verify,
    watch,
    weights,
)
from exl3kit.errors import ExitCode, KitError

app = typer.Typer(
    name="kit",
    help="Build, prove and serve EXL3-quantised models with vLLM, on one machine or several.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("build")(build.build)
app.command("fetch")(build.fetch)
app.command("lock")(lock.lock)
app.command("doctor")(doctor.doctor)
app.command("plan")(plan.plan)
app.command("init")(init.init)
app.add_typer(bundle.app, name="bundle")
app.add_typer(image.app, name="image")
app.add_typer(recipe.app, name="recipe")
app.add_typer(verify.app, name="verify")
app.add_typer(overlay.app, name="overlay")
app.add_typer(models.app, name="models")
app.add_typer(weights.app, name="weights")
app.add_typer(bench.app, name="bench")
app.add_typer(export.app, name="export")
VERBS: tuple[Callable[..., None], ...] = (
    *(serve.up, serve.down, serve.restart, serve.wait, serve.render, watch.status, watch.logs),
    *(receipts.receipts, parity.parity, demo.demo, image.rollback, report.report),
)
for verb in VERBS:
    app.command(verb.__name__)(verb)


def main() -> None:
    """Run one verb and leave with its exit code; whatever goes wrong becomes a sentence, never a traceback."""
    output.prepare()
    raise SystemExit(output.settle(_run(as_json="--json" in sys.argv)))


def _run(*, as_json: bool) -> int:
    try:
        # Not standalone: there typer prints usage faults itself, past --json.
        status = app(prog_name="kit", standalone_mode=False)
    except KitError as error:
        return output.refuse(error, as_json=as_json)
    except typer.TyperException as error:
        return _misused(error, as_json=as_json)
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


def _misused(error: typer.TyperException, *, as_json: bool) -> int:
    """A verb, option or argument that does not exist; typer's own words say which, and what was meant."""
    if as_json:
        output.emit(KitError(error.format_message(), next_step="kit --help").as_json())
    with contextlib.suppress(OSError):  # a stderr that takes nothing changes no verdict
        getattr(error, "show", lambda: print(error.format_message(), file=sys.stderr))()
    return int(ExitCode.USAGE)
