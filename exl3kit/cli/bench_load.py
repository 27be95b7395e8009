"""`kit bench load` and `kit bench mnbt`: what a deployment bears, and with which chunk size."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exl3kit.cli import args, bench_args, output
from exl3kit.cli.serve import stoppable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

    from exl3kit.bench.mnbt import Setting


def load(
    recipe: args.RecipeArg,
    nodes: args.NodesOption = "local",
    sets: args.SetOption = None,
    levels: Annotated[str, typer.Option("--levels", help="Requests at once.")] = "1,2,4,8",
    prompt: Annotated[int, typer.Option("--prompt", min=1, help="Tokens of each prompt.")] = 512,
    answer: Annotated[int, typer.Option("--answer", min=1, help="Tokens of each answer.")] = 128,
    out: bench_args.Out = None,
    as_json: args.JsonOption = False,
) -> None:
    """Throughput and latency by requests at once, from vLLM's own load generator inside the image."""
    from exl3kit.bench import load as loads
    from exl3kit.bench import targets
    from exl3kit.bench.records import Recorder

    console = output.console(as_json=as_json)
    asked = loads.Load(bench_args.numbers(levels, "--levels"), prompt, answer)
    with bench_args.opened_target(recipe, bench_args.Server(nodes, sets)) as target:
        recorder = Recorder(bench_args.folder(out, "load"))
        with contextlib.closing(recorder):
            recorder.begin("load", {**targets.described(target), "prompt": prompt, "answer": answer})
            with target.boot(0, "A") as boot:
                rows, faults = loads.run(target, asked, recorder, output.progress(as_json=as_json))
            recorder.write("boot", boot)
            recorder.write("result", {"faults": faults, "valid": not faults})
    if as_json:
        output.emit({"levels": rows, "faults": faults, "valid": not faults, "receipts": str(recorder.folder)})
    else:
        show_levels(rows, console)
        console.print(f"receipts: {recorder.folder}", markup=False)
    if error := loads.refusal(faults, recorder.folder, recipe):
        raise typer.Exit(output.refuse(error, as_json=False))


def show_levels(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    from exl3kit.bench.load import HEADS, cells
    from exl3kit.cli.sheets import Sheet

    table = Sheet(*HEADS, right=HEADS)
    for row in rows:
        table.add_row(*cells(row))
    console.print(table)


@args.spread
def mnbt(
    recipe: args.RecipeArg,
    counting: bench_args.Counting,
    nodes: args.NodesOption = "local",
    sets: args.SetOption = None,
    values: Annotated[str, typer.Option("--values", help="Values of max_num_batched_tokens.")] = "1K,2K,4K,8K",
    rungs: Annotated[
        str | None, typer.Option("--rungs", metavar="N,N", help="Prompt lengths; the ends decide.")
    ] = None,
    as_json: args.JsonOption = False,
) -> None:
    """Boot a recipe with each value, and recommend the smallest that gives nearly the most throughput."""
    from exl3kit import recipes
    from exl3kit.bench import ab, campaign, plans, summaries, targets
    from exl3kit.bench import mnbt as sweep
    from exl3kit.bench.records import Recorder
    from exl3kit.nodes import open_nodes
    from exl3kit.timings import Run

    loaded = recipes.load(recipe, sets or ())
    console = output.console(as_json=as_json)
    progress = output.progress(Run("bench mnbt", loaded.name, nodes), as_json=as_json)
    recorder = Recorder(bench_args.folder(counting.out, "mnbt"))
    found: list[Setting] = []
    faults: list[str] = []
    with stoppable(), open_nodes(nodes) as opened, contextlib.closing(recorder):
        recorder.begin("mnbt", {**targets.recorded(loaded), "max_cv": counting.max_cv})
        for number, value in enumerate(bench_args.numbers(values, "--values")):
            with (
                ab.booted(sweep.with_value(loaded, value), opened, progress) as target,
                target.boot(number, "A") as boot,
            ):
                ladder = plans.ladder(target.max_model_len, bench_args.numbers(rungs, "--rungs"))
                steps = sweep.steps(ladder, counting.count, counting.least)
                seen = campaign.observe(target, steps, recorder, progress, number, f"observe {value}")
                beside = sweep.beside_long(target, ladder[0], ladder[-1], counting.count)
                faults += [
                    f"{value}: {fault}" for fault in summaries.faults(summaries.judged(seen), max_cv=counting.max_cv)
                ]
                if not faults:
                    found.append(sweep.setting(value, seen, beside, sweep.pool_of(target)))
            recorder.write("boot", {**boot, "value": value, "beside": beside, "pool": sweep.pool_of(target)})
        chosen, why = sweep.recommend(found) if found and not faults else (None, "")
        result = {"settings": [one.as_json() for one in found], "faults": faults, "valid": not faults,
                  "recommended": chosen.value if chosen else None, "why": why}  # fmt: skip
        recorder.write("result", result)
    if as_json:
        output.emit({**result, "receipts": str(recorder.folder)})
    else:
        show_settings(found, console)
        console.print(f"recommended: {why}" if chosen else "nothing can be recommended", markup=False)
        console.print(f"receipts: {recorder.folder}", markup=False)
    if error := campaign.refusal(campaign.Outcome([], faults, recorder.folder), loaded.name):
        raise typer.Exit(output.refuse(error, as_json=False))


def show_settings(found: Sequence[Setting], console: Console) -> None:
    from exl3kit.cli.sheets import Sheet

    heads = ("MNBT", "tokens/s", "TTFT short", "beside long", "KV tokens")
    table = Sheet(*heads, right=heads)
    for one in found:
        beside = f"{one.beside * 1e3:,.1f} ms" if one.beside is not None else "-"
        table.add_row(f"{one.value:,}", f"{one.rate:,.0f}", f"{one.short * 1e3:,.1f} ms", beside, f"{one.pool or 0:,}")
    console.print(table)


def profile(
    recipe: args.RecipeArg,
    nodes: args.NodesOption = "local",
    sets: args.SetOption = None,
    tokens: Annotated[int, typer.Option("--tokens", min=16, help="Tokens of the prefill that is profiled.")] = 8192,
    as_json: args.JsonOption = False,
) -> None:
    """Where the GPU's time goes, by part of the model, and what each part would give if it cost nothing."""
    from dataclasses import asdict

    from exl3kit import recipes
    from exl3kit.bench import ab
    from exl3kit.bench import profile as profiles
    from exl3kit.nodes import open_nodes
    from exl3kit.timings import Run

    loaded = recipes.load(recipe, sets or ())
    profiles.refuse_without_gpu(loaded)
    console = output.console(as_json=as_json)
    progress = output.progress(Run("bench profile", loaded.name, nodes), as_json=as_json)
    found: dict[str, list[dict[str, Any]]] = {}
    with stoppable(), open_nodes(nodes) as opened:
        for name in ("prefill", "decode"):  # a boot each: the traces of one run stay apart from the other's
            with ab.booted(profiles.profiling(loaded), opened, progress) as target:
                steps = profiles.steps(target.max_model_len, tokens)[name]
                found[name] = [asdict(share) for share in profiles.shares(*profiles.profiled(target, steps))]
    if as_json:
        output.emit({"profile": found})
        return
    for name, shares in found.items():
        console.print(f"{name}:")
        for one in shares:
            ceiling = f"{one['ceiling']:,.0f} tokens/s if it cost nothing"
            console.print(f"  {one['share']:6.1%}  {one['part']}, {one['seconds'] * 1e3:,.2f} ms, {ceiling}")
