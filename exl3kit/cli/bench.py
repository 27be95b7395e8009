"""`kit bench`: figures that can be trusted, or an exit code 8 that says why they cannot."""

from __future__ import annotations

import typer

app = typer.Typer(help="Measure what is served, and refuse figures that mean nothing.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure what is served, and refuse figures that mean nothing."""
