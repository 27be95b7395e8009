"""`kit overlay`: the patches of vLLM, and whether a vLLM is as the overlay needs it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exl3kit.cli import args, output, teaching
from exl3kit.errors import ExitCode, KitError

if TYPE_CHECKING:
    from rich.console import Console

app = teaching.App("The patches of vLLM, and the contract that the overlay rests on.")


@app.command("render")
def render(
    recipe: Annotated[str | None, args.recipe("Whose vLLM it is about.")] = None,
    vllm: Annotated[str | None, typer.Option("--vllm", help="A version, in place of a recipe.")] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder to write the diffs to.")] = Path("patches"),
    as_json: args.JsonOption = False,
) -> None:
    """Write the diffs that an image's build applies to its vLLM; `patch -p1 -F0` understands them too."""
    from exl3kit import overlay, recipes

    if (recipe is None) == (vllm is None):
        raise KitError(
            "a recipe or --vllm says which vLLM is meant, and not both", next_step="kit overlay render --help"
        )
    version = vllm or overlay.version_of(recipes.load(str(recipe)))
    written = overlay.render(version, out)
    if as_json:
        output.emit({"vllm": version, "files": [str(path) for path in written]})
    elif not written:
        output.console().print(f"vLLM {version} is used as it is: no patches")
    for path in () if as_json else written:
        print(path)


@app.command("check")
def check(
    wheel: Annotated[
        Path | None, typer.Option("--wheel", help="A wheel of vLLM, or a folder that holds one; else the pinned ones.")
    ] = None,
    as_json: args.JsonOption = False,
) -> None:
    """Whether a vLLM still is what the overlay imports, overrides, wraps and patches; exit code 5 names what is not."""
    from exl3kit import overlay

    reports = [overlay.check(path) for path in ([wheel] if wheel else overlay.pinned_wheels())]
    ok = all(report["ok"] for report in reports)
    if as_json:
        output.emit({"checks": reports, "ok": ok})
    else:
        for report in reports:
            show(report, output.console())
    if not ok:
        raise typer.Exit(int(ExitCode.VERIFICATION))


def show(report: dict[str, Any], console: Console) -> None:
    """One vLLM for people: a line for each patch and each symbol that is not the same, why it matters, and the sums."""
    verdicts = report["verdicts"]
    for one in verdicts:
        if one["status"] == "same" and one["kind"] == "symbol":
            continue
        colour = "green" if one["status"] == "same" else "red"
        console.print(f"[{colour}]{one['status']:<8}[/]{one['kind']:<7} ", end="")
        console.print(one["subject"], markup=False)
        if one["detail"]:
            console.print(f"{'':<16}{one['detail']}", markup=False)
        if one["status"] != "same":
            console.print(f"{'':<16}needed: {one['why']}", markup=False, style="dim")
    against = "its own record" if report["set"] == report["vllm"] else f"the record of {report['set']}"
    console.print(f"vLLM {report['vllm']} against {against}: {sums(verdicts)}")


def sums(verdicts: list[dict[str, Any]]) -> str:
    """Such as `59 symbols: 57 same, 2 changed; 4 patches: 4 same`."""
    parts = []
    for kind in ("symbol", "patch"):
        counts = Counter(one["status"] for one in verdicts if one["kind"] == kind)
        told = ", ".join(
            f"{counts[status]} {status}" for status in ("same", "moved", "changed", "missing") if counts[status]
        )
        plural = {"symbol": "symbols", "patch": "patches"}[kind]
        parts.append(f"{counts.total()} {plural}{': ' if told else ''}{told}")
    return "; ".join(parts)
