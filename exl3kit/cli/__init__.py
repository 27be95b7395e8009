"""The command line: parse, call, print. A verb lives in the module of its noun and imports what it needs when it runs.

`kit --help` must answer in under 0.3 s, so nothing heavier than typer is imported here.
"""

from __future__ import annotations

import sys

import typer

from exl3kit.cli import build, lock, output, recipe, verify
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


def main() -> None:
    """Run one verb and leave with its exit code; a `KitError` becomes a sentence, never a traceback."""
    try:
        app()
    except KitError as error:
        output.refuse(error, as_json="--json" in sys.argv)
        raise SystemExit(int(error.code)) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(int(ExitCode.INTERRUPTED)) from None
