"""Options and first steps that the verbs of `kit bench` and `kit parity` share."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exl3kit.cli import args
from exl3kit.cli.serve import stoppable

if TYPE_CHECKING:
    from exl3kit.bench.targets import Target
    from exl3kit.recipe import Recipe

RecipeOption = Annotated[str | None, args.recipe("A recipe that is up, on --nodes.")]
Out = Annotated[Path | None, typer.Option("--out", help="New folder for the receipts; else bench/TIME-VERB.")]
Rungs = Annotated[str | None, typer.Option("--rungs", metavar="N,N", help="Prompt lengths, such as 8K,64K.")]

LEAST = 5  # as in `exl3kit.bench.plans`, which is not imported before a verb runs


@dataclass(frozen=True)
class Server:
    """Options that say what is measured: a recipe that is up on nodes, or any server."""

    nodes: args.NodesOption = "local"
    sets: args.SetOption = None
    url: Annotated[str | None, typer.Option("--url", help="Measure this server, from here, in place of a recipe.")] = (
        None
    )
    key_file: Annotated[Path | None, typer.Option("--key-file", help="File with the API key of --url.")] = None


@dataclass(frozen=True)
class Counting:
    """Options that say how many observations are made, and which count."""

    count: Annotated[
        int, typer.Option("--count", min=1, help="Observations of each rung; fewer than 5 are not valid.")
    ] = LEAST
    max_cv: Annotated[
        float, typer.Option("--max-cv", min=0, help="Largest coefficient of variation within a boot.")
    ] = 0.15
    quick: Annotated[
        bool, typer.Option("--quick", help="Accept fewer than 5 observations: for trying, not for figures.")
    ] = False
    out: Out = None

    @property
    def least(self) -> int:
        """How many observations of a rung must count."""
        return 1 if self.quick else LEAST


@dataclass(frozen=True)
class Arms:
    """Options that say which two arms are compared, and where."""

    against: Annotated[str | None, args.recipe("Recipe of the second arm; else as the first.", "B")] = None
    nodes: args.NodesOption = "local"
    sets: args.SetOption = None
    a_sets: Annotated[
        list[str] | None, typer.Option("--a", metavar="KEY=VALUE", help="Override a key in the first arm.")
    ] = None
    b_sets: Annotated[
        list[str] | None, typer.Option("--b", metavar="KEY=VALUE", help="Override a key in the second arm.")
    ] = None

    def load(self, recipe: str) -> tuple[Recipe, Recipe]:
        """The recipes of the two arms: `--set` holds for both, `--a` and `--b` for one."""
        from exl3kit import recipes

        both = list(self.sets or ())
        first = recipes.load(recipe, both + (self.a_sets or []))
        return first, recipes.load(self.against or recipe, both + (self.b_sets or []))


def folder(out: Path | None, verb: str) -> Path:
    """The folder for the receipts of a campaign that begins now."""
    return out or Path("bench") / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{verb}"


def numbers(text: str | None, option: str) -> list[int]:
    """`8192,16384` as numbers; 8K is 8192."""
    from exl3kit.errors import KitError

    try:
        words = [word.strip().upper() for word in (text or "").split(",") if word.strip()]
        return [int(word[:-1]) * 1024 if word.endswith("K") else int(word) for word in words]
    except ValueError as error:
        raise KitError(
            f"{text!r} is no list of numbers", where=option, next_step=f"such as {option} 8K,65536"
        ) from error


@contextmanager
def opened_target(recipe: str | None, server: Server) -> Iterator[Target]:
    """What the options name, while the verb may be stopped."""
    from exl3kit.bench import targets

    key_file = str(server.key_file) if server.key_file else None
    with stoppable(), targets.opened(recipe, server.sets or (), server.nodes, server.url, key_file) as target:
        yield target
