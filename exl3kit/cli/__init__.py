"""The command line: parse, call, print. A verb lives in the module of its noun and imports what it needs when it runs.

`kit --help` must answer in under 0.3 s, so nothing heavier than typer is imported here.
"""

from __future__ import annotations

import io
import sys

import typer

from exl3kit.cli import build, demo, lock, output, recipe, serve, verify
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
app.command("lock")(lock.lock)
app.add_typer(recipe.app, name="recipe")
app.add_typer(verify.app, name="verify")
for verb in (serve.up, serve.down, serve.status, serve.logs, serve.render, demo.demo):
    app.command(verb.__name__)(verb)


def main() -> None:
    """Run one verb and leave with its exit code; whatever goes wrong becomes a sentence, never a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without UTF-8 must not end a verb
    raise SystemExit(_run(as_json="--json" in sys.argv))


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
    except Exception as error:
        from exl3kit.cli import crash

        return output.refuse(crash.report(error), as_json=as_json)
    if status == ExitCode.INTERRUPTED:
        return output.refuse(KitError("interrupted", code=ExitCode.INTERRUPTED), as_json=as_json)
    return status if isinstance(status, int) else 0


def _misused(error: typer.TyperException, *, as_json: bool) -> int:
    """A verb, option or argument that does not exist; typer's own words say which, and what was meant."""
    if as_json:
        output.emit(KitError(error.format_message(), next_step="kit --help").as_json())
    getattr(error, "show", lambda: print(error.format_message(), file=sys.stderr))()
    return int(ExitCode.USAGE)
