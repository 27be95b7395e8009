"""`kit recipe import`: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exl3kit.cli import args, output

if TYPE_CHECKING:
    from exl3kit.imported import Imported

MAX_BYTES = 1 << 20


def import_recipes(
    sources: Annotated[list[Path], typer.Argument(metavar="FILE|DIR...", help="Recipes of eugr v1 or sparkrun v2.")],
    out: Annotated[Path, typer.Option("--out", help="Folder to write to; files that are there are not replaced.")],
    as_json: args.JsonOption = False,
) -> None:
    """Turn other launchers' recipes into the kit's; exit 2 when a file is no recipe, the others are written."""
    from exl3kit import imported
    from exl3kit.errors import ExitCode

    results: list[dict[str, Any]] = []
    for path in files(sources):
        entry: dict[str, Any] = {"source": str(path)}
        results.append(entry)
        try:
            original = read(path)
            made = imported.translate(original, path.stem)
            entry |= write(made, original, path, out)
        except imported.ImportFault as fault:
            entry["error"] = str(fault)
            if not as_json:
                print(f"{path}: no recipe: {fault}\n")
            continue
        if not as_json:
            show(entry)
    if as_json:
        output.emit({"recipes": results})
    if any("error" in entry for entry in results) or not results:
        raise typer.Exit(int(ExitCode.USAGE))


def files(sources: list[Path]) -> list[Path]:
    """The named files, and of folders every .yaml and .yml below."""
    found: list[Path] = []
    for source in sources:
        if source.is_dir():
            found += sorted(path for path in source.rglob("*") if path.suffix in (".yaml", ".yml") and path.is_file())
        else:
            found.append(source)
    return found


def read(path: Path) -> dict[Any, Any]:
    """One foreign file as data."""
    import yaml

    from exl3kit.imported import ImportFault

    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ImportFault(f"it is larger than {MAX_BYTES >> 20} MiB")
        told = yaml.safe_load(data)
    except OSError as error:
        raise ImportFault(error.strerror or str(error)) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ImportFault(" ".join(str(error).split())[:200]) from error
    if not isinstance(told, dict):
        raise ImportFault("it is no mapping")
    return told


def write(made: Imported, original: dict[Any, Any], source: Path, out: Path) -> dict[str, Any]:
    """Write the recipe and, beside it, the original with the report."""
    from exl3kit import imported
    from exl3kit.errors import KitError

    name = made.data["name"]
    recipe, foreign = out / f"{name}.yaml", out / f"{name}.foreign.json"
    try:
        out.mkdir(parents=True, exist_ok=True)
        with foreign.open("x", encoding="utf-8") as file:
            foreign.chmod(0o600)  # the original may hold what a recipe may not
            file.write(imported.foreign_file(made, original))
        with recipe.open("x", encoding="utf-8") as file:
            file.write(imported.as_yaml(made, source.name))
    except FileExistsError as error:
        raise imported.ImportFault(f"{error.filename} is there already") from error
    except OSError as error:
        raise KitError("the recipe cannot be written", where=str(out), why=error.strerror) from error
    report = [{"key": key, "outcome": outcome, "why": why} for key, outcome, why in made.report]
    return {"recipe": str(recipe), "foreign": str(foreign), "report": report, "missing": made.missing}


def show(entry: dict[str, Any]) -> None:
    """One line for every key of the file, then what is still to be filled in."""
    from exl3kit.faults import printable

    print(f"{entry['source']} -> {entry['recipe']}")
    for one in sorted(entry["report"], key=lambda one: ("mapped", "kept", "refused").index(one["outcome"])):
        print(f"  {one['outcome']:<8} {printable(one['key'])}: {printable(one['why'])}")
    for sentence in entry["missing"]:
        print(f"  to fill in  {sentence}")
    print()
