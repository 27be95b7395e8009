"""`kit models`: checkpoints to try the kit with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from exl3kit.cli import args, output, teaching

app = teaching.App("Checkpoints to try the kit with.")


@app.command("synth")
def synth(
    out: Annotated[Path, typer.Option("--out", help="Folder to write; new or empty.")],
    like: Annotated[
        str, typer.Option("--like", help="Whose shapes: a config.json, or llama, qwen3 or qwen3-moe.")
    ] = "llama",
    layers: Annotated[
        int | None, typer.Option("--layers", min=1, help="Layers; else the file's own, or 2 of a named model.")
    ] = None,
    rates: Annotated[str, typer.Option("--rates", help="Bits per weight, taken in turn, such as 2.5,4.")] = "4",
    codebooks: Annotated[str, typer.Option("--codebooks", help="Taken in turn: 3inst, mcg, mul1.")] = "mcg",
    shared_suh: Annotated[
        bool, typer.Option("--shared-suh", help="Gate and up share their input scales, as the higher tiers need.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", help="The same seed gives the same files.")] = 0,
    as_json: args.JsonOption = False,
) -> None:
    """Write a checkpoint of random bits in a model's true shapes: to see whether it fits, and how fast it runs."""
    from exl3kit import synthetic

    progress = output.progress(as_json=as_json)
    options = ["--rates", rates, "--codebooks", codebooks, "--seed", str(seed)]
    options += ["--shared-suh"] if shared_suh else []
    where = synthetic.make(synthetic.geometry(like, layers), out, options, progress)
    if as_json:
        output.emit({"path": str(out), "made_in": where, "seconds": progress.seconds})
    else:
        output.console().print(f"{out} holds random bits: its text is noise")
