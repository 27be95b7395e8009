"""`kit parity`: whether two ways of computing a model give the same distributions."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated

import typer

from exl3kit.cli import args, bench_args, output
from exl3kit.cli.serve import stoppable

if TYPE_CHECKING:
    from rich.console import Console

    from exl3kit.bench.parity import Parity


@args.spread
def parity(
    recipe: args.RecipeArg,
    arms: bench_args.Arms,
    tokens: Annotated[int, typer.Option("--tokens", min=16, help="Tokens of the given text.")] = 1024,
    window: Annotated[int, typer.Option("--window", min=8, help="Tokens of one prompt.")] = 200,
    decode: Annotated[int, typer.Option("--decode", min=2, help="Decode steps after each of two prompts.")] = 64,
    limit: Annotated[
        float | None, typer.Option("--limit", min=0, help="Mean KLD in nats that still counts as the same.")
    ] = None,
    out: bench_args.Out = None,
    as_json: args.JsonOption = False,
) -> None:
    """Compare two arms' whole next-token distributions, in prefill and in decode, beside an unchanged control.

    Boots A, A again (the control) and B. Exit code 5 when B is another model than A, 8 when nothing can be said: also
    when a tier that an arm names did no rows.
    """
    from exl3kit.bench import ab, engagement, targets
    from exl3kit.bench import parity as compared
    from exl3kit.bench.records import Recorder
    from exl3kit.nodes import open_nodes
    from exl3kit.timings import Run

    first, second = (compared.scoring(one) for one in arms.load(recipe))
    question = compared.Question(tokens, window, decode, compared.limit_for(first, second) if limit is None else limit)
    console = output.console(as_json=as_json)
    progress = output.progress(Run("parity", first.name, arms.nodes), as_json=as_json)
    recorder = Recorder(bench_args.folder(out, "parity"))
    scores: list[compared.Scores] = []
    faults: list[str] = []
    with stoppable(), open_nodes(arms.nodes) as opened, contextlib.closing(recorder):
        named = ab.named_differences(first, second, opened)
        recorder.begin("parity", {"a": targets.recorded(first), "b": targets.recorded(second), "named": list(named),
                                  "question": question.settings()})  # fmt: skip
        for number, (arm, loaded) in enumerate((("A", first), ("A", first), ("B", second))):
            with ab.booted(loaded, opened, progress) as target, target.boot(number, arm) as boot:
                scores.append(compared.score(target, question, progress, f"score {arm}", scores[0] if scores else None))
            recorder.write("boot", boot)
            idle = engagement.faults(boot["before"], boot["after"], loaded.exl3.tier)
            faults += [f"boot {number} ({arm}): {fault}" for fault in idle]
        reference, control, other = scores
        found = compared.judge(reference, control, other, question, faults)
        for position in compared.positions(reference, control, other):
            recorder.write("position", position)
        recorder.write("result", found.as_json())
    if as_json:
        output.emit({**found.as_json(), "receipts": str(recorder.folder)})
    else:
        show(found, console)
        console.print(f"receipts: {recorder.folder}", markup=False)
    if error := compared.refusal(found, first.name):
        raise typer.Exit(output.refuse(error, as_json=False))


def show(found: Parity, console: Console) -> None:
    """The control's line above the other arm's, kind by kind; then the verdict."""
    from exl3kit.cli.sheets import Sheet

    heads = ("positions", "mean KLD", "largest", "at", "top-1 alike", "log-likelihood per token")
    table = Sheet("", *heads, right=heads)
    for name, differences in (("A again", found.control), ("B", found.other)):
        for one in differences:
            said = " / ".join(f"{value:.6f}" for value in one.likelihood) if one.likelihood else "-"
            figures = (f"{one.mean:.3e}", f"{one.largest:.3e}", str(one.at), f"{one.agreement:.2%}")
            table.add_row(f"{name}, {one.kind}", str(one.positions), *figures, said)
    console.print(table)
    for sentence in found.sentences:
        console.print(sentence, markup=False)
    console.print(f"verdict: {found.verdict}", markup=False)
