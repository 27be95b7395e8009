"""`kit bench`: figures that can be trusted, or an exit code 8 that says why they cannot."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exl3kit.cli import args, bench_args, bench_kernels, bench_load, output, teaching
from exl3kit.cli.serve import stoppable

if TYPE_CHECKING:
    from rich.console import Console

    from exl3kit.bench.campaign import Outcome
    from exl3kit.bench.comparison import Comparison
    from exl3kit.bench.plans import Step
    from exl3kit.bench.targets import Target

app = teaching.App("Measure what is served, and refuse figures that mean nothing.")


app.command("kernels")(bench_kernels.kernels)
for verb in (bench_load.load, bench_load.mnbt, bench_load.profile):
    app.command(verb.__name__)(verb)


@app.command("prefill")
@args.spread
def prefill(
    server: bench_args.Server,
    counting: bench_args.Counting,
    recipe: bench_args.RecipeOption = None,
    rungs: bench_args.Rungs = None,
    as_json: args.JsonOption = False,
) -> None:
    """Cold prefill over a ladder of prompt lengths; a row counts only when no token of it came from a cache."""
    from exl3kit.bench import campaign

    with bench_args.opened_target(recipe, server) as target:
        steps = campaign.prefill(target, bench_args.numbers(rungs, "--rungs"), counting.count, counting.least)
        _measure("prefill", target, steps, counting, as_json=as_json)


@app.command("decode")
@args.spread
def decode(
    server: bench_args.Server,
    counting: bench_args.Counting,
    recipe: bench_args.RecipeOption = None,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Tokens of each answer.")] = 400,
    streams: Annotated[
        str, typer.Option("--streams", metavar="N,N", help="Answers at once; those that would queue are left out.")
    ] = "1,4,8",
    as_json: args.JsonOption = False,
) -> None:
    """Decode: structured and prose answers one at a time, then several at once; acceptance length when speculative."""
    from exl3kit.bench import campaign

    with bench_args.opened_target(recipe, server) as target:
        several = bench_args.numbers(streams, "--streams")
        steps = campaign.decode(target, counting.count, tokens, several, counting.least)
        _measure("decode", target, steps, counting, as_json=as_json)


@app.command("ab")
@args.spread
def ab(
    recipe: args.RecipeArg,
    arms: bench_args.Arms,
    counting: bench_args.Counting,
    rungs: bench_args.Rungs = None,
    boots: Annotated[int, typer.Option("--boots", help="How many; they alternate and begin and end with A.")] = 5,
    level: Annotated[float, typer.Option("--level", min=1e-6, max=0.5, help="Probability of a false claim.")] = 0.02,
    as_json: args.JsonOption = False,
) -> None:
    """Compare cold prefill of two arms over alternating boots; exit code 8 when the campaign proves nothing.

    The recipe is brought up and taken down for every boot. All of the environment but what the arms name must be equal,
    and a tier that an arm names must have done the rows.
    """
    from exl3kit.bench import ab as campaign
    from exl3kit.bench import differences, targets
    from exl3kit.bench.records import Recorder
    from exl3kit.nodes import open_nodes
    from exl3kit.timings import Run

    by_arm = dict(zip("AB", arms.load(recipe), strict=True))
    console = output.console(as_json=as_json)
    progress = output.progress(Run("bench ab", by_arm["A"].name, arms.nodes), as_json=as_json)
    recorder = Recorder(bench_args.folder(counting.out, "ab"))
    with stoppable(), open_nodes(arms.nodes) as opened, contextlib.closing(recorder):
        named = campaign.named_differences(by_arm["A"], by_arm["B"], opened)
        for line in differences.told(named):
            progress.tell(f"the arms differ in {line}")
        question = campaign.Question(
            rungs=bench_args.numbers(rungs, "--rungs"), count=counting.count, boots=boots,
            least=counting.least, max_cv=counting.max_cv, level=level, named=list(named),
            tiers={arm: loaded.exl3.tier for arm, loaded in by_arm.items()},
        )  # fmt: skip
        told = {name: targets.recorded(by_arm[arm]) for name, arm in (("a", "A"), ("b", "B"))}
        recorder.begin("ab", {**question.as_json(), **told})
        found = campaign.run(question, lambda arm: campaign.booted(by_arm[arm], opened, progress), recorder, progress)
    if as_json:
        output.emit({**found.as_json(), "named": differences.told(named), "receipts": str(recorder.folder)})
    else:
        show_comparison(found, console)
        console.print(f"receipts: {recorder.folder}", markup=False)
    if error := campaign.refusal(found, by_arm["A"].name, recorder.folder):
        raise typer.Exit(output.refuse(error, as_json=False))


@app.command("selftest")
@args.spread
def selftest(
    server: bench_args.Server, recipe: bench_args.RecipeOption = None, as_json: args.JsonOption = False
) -> None:
    """Put everything before the gate that it must refuse, recorded and live; 0 only when each is refused.

    With a recipe that is up, or --url, that server too gets a repeated prompt, and requests of somebody else.
    """
    from dataclasses import asdict

    from exl3kit.bench import selftest as tests

    console = output.console(as_json=as_json)
    progress = output.progress(as_json=as_json)
    with progress.stage("recorded"):
        cases = [*tests.of_recorded(), *tests.of_campaigns()]
    with progress.stage("live, on a server of known speed"):
        cases += tests.of_live()
    if recipe is not None or server.url is not None:
        with (
            bench_args.opened_target(recipe, server) as target,
            progress.stage(f"live, on {target.place.name}"),
        ):
            cases += tests.of_server(target)
    if as_json:
        output.emit({"cases": [{**asdict(case), "held": case.held} for case in cases]})
    else:
        for case in cases:
            word = "as it must" if case.held else "WRONG"
            said = f"refused: {case.reasons[0]}" if case.reasons else "counts"
            console.print(f"{word}  {case.name} ({case.how}): {said}", markup=False, style=None if case.held else "red")
        console.print(f"{sum(case.held for case in cases)} of {len(cases)} cases were judged as they must be")
    if error := tests.refusal(cases):
        raise typer.Exit(output.refuse(error, as_json=False))


@app.command("report")
def report(
    campaign: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with the receipts of a campaign.")],
    earlier: Annotated[Path | None, typer.Option("--beside", help="Receipts of another day, side by side.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Where the page goes; else beside the receipts.")] = None,
    as_json: args.JsonOption = False,
) -> None:
    """One self-contained HTML page of a campaign, drawn from its observations anew, and its plots as PNGs."""
    from exl3kit.bench import records
    from exl3kit.bench import report as pages

    found = records.read(campaign)
    beside = records.read(earlier) if earlier is not None else None
    view, files = pages.write(found, out or found.folder, beside)
    if as_json:
        output.emit({"verdict": view.verdict, "valid": view.valid, "files": [str(path) for path in files]})
        return
    console = output.console()
    console.print(f"{view.title}: {view.verdict}", markup=False)
    for path in files:
        console.print(str(path), markup=False)


@app.command("figures")
def figures(
    write: Annotated[bool, typer.Option("--write/--check", help="Draw them anew, or only say what differs.")] = False,
    as_json: args.JsonOption = False,
) -> None:
    """Hold the figures of README and docs against their receipts; exit code 8 when one differs."""
    from exl3kit.bench import figures as blocks

    files = blocks.documents()
    changed = blocks.write(files) if write else []
    found = list(blocks.stale(files))
    if as_json:
        told = [{"file": str(one.file), "line": one.line, "receipts": one.folder} for one in found]
        output.emit({"stale": told, "written": [str(path) for path in changed]})
    else:
        for path in changed:
            output.console().print(f"written: {path}", markup=False)
    if error := blocks.refusal(found):
        raise typer.Exit(output.refuse(error, as_json=False))


def show_comparison(found: Comparison, console: Console) -> None:
    """One line per rung, the one claim, and what is wrong."""
    from exl3kit.cli.sheets import Sheet

    figures = ("A", "B", "B/A", "interval", "CV A", "CV B", "all apart")
    table = Sheet("", *figures, right=figures)
    for rung in found.rungs:
        one = rung.effect
        interval = f"{one.low:.3f}-{one.high:.3f}"
        spread = (f"{rung.cv_a:.1%}", f"{rung.cv_b:.1%}", "yes" if rung.separated else "no")
        table.add_row(rung.name, f"{rung.a:,.0f}", f"{rung.b:,.0f}", f"{one.ratio:.3f}", interval, *spread)
    console.print(table)
    if found.effect:
        one = found.effect
        console.print(
            f"B/A over all rungs: {one.ratio:.3f}, {1 - one.level:.0%} interval {one.low:.3f} to {one.high:.3f}, "
            f"{one.boots[0]} + {one.boots[1]} boots; A drifted by {one.drift - 1:+.1%}"
        )
    for fault in found.faults:
        console.print(f"invalid: {fault}", markup=False, style="red")
    console.print(f"verdict: {found.verdict} ({found.why})", markup=False)


def _measure(verb: str, target: Target, steps: Sequence[Step], counting: bench_args.Counting, *, as_json: bool) -> None:
    """Carry a plan out on one boot, show what came of it, and leave with 8 when it proves nothing."""
    from exl3kit.bench import campaign, targets
    from exl3kit.bench.records import Recorder

    console = output.console(as_json=as_json)
    recorder = Recorder(bench_args.folder(counting.out, verb))
    with contextlib.closing(recorder):
        recorder.begin(verb, {**targets.described(target), "max_cv": counting.max_cv})
        outcome = campaign.run(target, steps, recorder, output.progress(as_json=as_json), max_cv=counting.max_cv)
    if as_json:
        output.emit(outcome.as_json())
    else:
        show(outcome, console)
    if error := campaign.refusal(outcome, target.place.name):
        raise typer.Exit(output.refuse(error, as_json=False))


def show(outcome: Outcome, console: Console) -> None:
    """One line per rung, then what is wrong."""
    from exl3kit.cli.sheets import Sheet

    figures = ("n", "tokens/s", "slowest", "fastest", "CV", "TTFT", "of it client", "acceptance")
    table = Sheet("", *figures, right=figures)
    for row in outcome.rows:
        accepted = f"{row.acceptance:.2f}" if row.acceptance else "-"
        rates = (f"{rate:,.0f}" for rate in (row.rate, row.low, row.high))
        cost = f"{row.overhead / row.ttft:.1%}"
        table.add_row(row.name, str(row.count), *rates, f"{row.cv:.1%}", f"{row.ttft * 1e3:,.1f} ms", cost, accepted)
    console.print(table)
    for fault in outcome.faults:
        console.print(f"invalid: {fault}", markup=False, style="red")
    console.print(f"receipts: {outcome.folder}", markup=False)
