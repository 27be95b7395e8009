"""`kit up`, `down`, `restart`, `wait`, `render`: parse, call, print."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exl3kit.cli import args, output

if TYPE_CHECKING:
    from exl3kit.dry_run import DryRun
    from exl3kit.recipe import Probe
    from exl3kit.serve import Serving

BreakLock = Annotated[
    bool, typer.Option("--break-lock", help="Take the deployment lock from another operator, whose command then fails.")
]


SHOWN = 120  # characters of the probe and of its answer that are shown


@dataclass(frozen=True)
class Start:
    """Options of a verb that starts ranks."""

    nodes: args.NodesOption = "local"
    sets: args.SetOption = None
    ready: Annotated[
        float, typer.Option("--ready", metavar="SECONDS", help="Until the first answer must have come.")
    ] = 1800.0
    break_lock: BreakLock = False
    force: Annotated[
        bool, typer.Option("--force", help="Start though the memory does not suffice; the machine may lock up.")
    ] = False
    stamp: Annotated[
        str | None,
        typer.Option("--stamp", metavar="OLD", help="Serve with an earlier image: `kit image status` shows them."),
    ] = None
    no_build: Annotated[
        bool, typer.Option("--no-build", help="Refuse unless every node has the image; build and copy nothing.")
    ] = False


@contextmanager
def stoppable() -> Iterator[None]:
    """Let SIGTERM end the verb as Ctrl-C does: what was started is taken away again."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@args.spread
def up(
    recipe: args.RecipeArg,
    start: Start,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what each rank would get; start nothing.")] = False,
    as_json: args.JsonOption = False,
) -> None:
    """Serve a recipe: image and weights to the nodes, ranks started, a real completion and every receipt checked."""
    from exl3kit import serve

    if dry_run:
        render(recipe, nodes=start.nodes, sets=start.sets, env=True, as_json=as_json)
    else:
        bring_up(serve.up, recipe, start, as_json=as_json)


@args.spread
def restart(recipe: args.RecipeArg, start: Start, as_json: args.JsonOption = False) -> None:
    """Replace what serves as a gang: everything that may refuse first, then stopped, then as `up`."""
    from exl3kit import serve

    bring_up(serve.restart, recipe, start, as_json=as_json)


def bring_up(way: Callable[..., Serving], recipe: str, start: Start, *, as_json: bool) -> None:
    """Bring a recipe up in a `way` of `exl3kit.serve` and print what serves."""
    from exl3kit import recipes
    from exl3kit.faults import printable
    from exl3kit.nodes import open_nodes
    from exl3kit.serve import Terms
    from exl3kit.timings import Run

    loaded = recipes.load(recipe, start.sets or ())
    console = output.console(as_json=as_json)
    progress = output.progress(Run(way.__name__, loaded.name, start.nodes), as_json=as_json)
    terms = Terms(start.ready, start.break_lock, start.force, start.stamp, not start.no_build)
    with stoppable(), open_nodes(start.nodes) as opened:
        serving = way(loaded, opened, progress, terms)
    progress.summary()
    if as_json:
        output.emit({**as_fields(serving), "seconds": progress.seconds, "wall_clock": round(progress.total_seconds, 2)})
        return
    word = "serves" if serving.started else "was serving already, and nothing was restarted,"
    console.print(f"{serving.deployment.served_name} {word} on {serving.head.node.name}: {serving.url}", markup=False)
    asked, said = (printable(text.strip(), SHOWN) for text in (loaded.probe.prompt, serving.answer.text))
    console.print(f"  asked: {asked}  answered: {said}", markup=False, soft_wrap=True)


def as_fields(serving: Serving) -> dict[str, Any]:
    """A serving deployment as the object that `--json` prints."""
    deployment = serving.deployment
    return {
        "deployment": deployment.name,
        "model": deployment.served_name,
        "stamp": deployment.stamp,
        "image": deployment.image,
        "generation": serving.head.label("generation"),
        "url": serving.url,
        "node": serving.head.node.name,
        "started": serving.started,
        "probe": {"answer": serving.answer.text, "tokens": serving.answer.tokens, "seconds": serving.answer.seconds},
        "ranks": serving.receipts,
    }


def down(
    recipe: args.RecipeArg,
    nodes: args.NodesOption = "local",
    volumes: Annotated[
        bool, typer.Option("--volumes", help="Also remove what the ranks kept for their next start: compile caches.")
    ] = False,
    break_lock: BreakLock = False,
    as_json: args.JsonOption = False,
) -> None:
    """Stop a deployment on every node and remove its containers and network; a node that is gone is said (exit 6)."""
    from exl3kit import takedown
    from exl3kit.errors import KitError
    from exl3kit.nodes import open_nodes

    progress = output.progress(as_json=as_json)
    name = deployment_name(recipe)
    missing: dict[str, KitError] = {}
    with open_nodes(nodes, missing=missing) as opened:
        done = takedown.down(opened, missing, name, progress, volumes=volumes, break_lock=break_lock)
    failure = done.failure(nodes)
    if as_json:
        told = {"deployment": name, "removed": done.removed, "unreachable": sorted(done.left), "absent": done.absent}
        output.emit({**told, "seconds": progress.seconds, **(failure.as_json() if failure else {})})
    if failure:
        raise typer.Exit(output.refuse(failure, as_json=False))


def wait(
    recipe: args.RecipeArg,
    nodes: args.NodesOption = "local",
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds to wait at most.")] = 1800.0,
    as_json: args.JsonOption = False,
) -> None:
    """Wait until a deployment answers a real completion, as after a reboot; says what each rank waits for."""
    from exl3kit import waiting

    progress = output.progress(as_json=as_json)
    name, question = deployment_name(recipe), probe_of(recipe)
    with stoppable():
        answer = waiting.until_served(nodes, name, question, progress, timeout_s=timeout)
    if as_json:
        output.emit({"deployment": name, "seconds": progress.seconds, "answer": answer.text, "tokens": answer.tokens})


def probe_of(recipe: str) -> Probe:
    """The probe of a recipe, or the default one of what no recipe here describes."""
    from exl3kit import recipe as schema
    from exl3kit import recipes
    from exl3kit.errors import KitError

    try:
        return recipes.load(recipe).probe
    except KitError:
        return schema.Probe()


def deployment_name(recipe: str) -> str:
    """The deployment that a recipe's reference means: the recipe's name, or the reference when no recipe is called so.

    What runs may come from a recipe that is no longer here, and must still be stopped.
    """
    from exl3kit import recipes
    from exl3kit.errors import KitError

    try:
        return recipes.load(recipe).name
    except KitError:
        if "/" in recipe or recipe.endswith((".yaml", ".yml")):
            raise
        return recipe


def render(
    recipe: args.RecipeArg,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder to write to; one folder per node in it.", show_default=False)
    ] = None,
    nodes: args.NodesOption = "local",
    env: Annotated[
        bool, typer.Option("--env", help="Show every rank's environment instead, with the source of each value.")
    ] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Show only what differs between the ranks.")] = False,
    sets: args.SetOption = None,
    as_json: args.JsonOption = False,
) -> None:
    """Write the files that `kit up` would start, or show what the ranks would get; starts nothing."""
    from exl3kit import dry_run, recipes, serve
    from exl3kit import render as files
    from exl3kit.errors import KitError
    from exl3kit.nodes import open_nodes

    if (out is None) != (env or diff):
        raise KitError("give either --out, or --env or --diff", where="kit render", next_step="kit render --help")
    loaded = recipes.load(recipe, sets or ())
    with open_nodes(nodes) as opened:
        if out is None:
            seen = dry_run.look(loaded, opened)
        else:
            deployment = serve.survey(loaded, opened).plan(serve.new_generation())
    if out is None:
        show_environment(seen, only_differing=diff, as_json=as_json)
        return
    written = files.write(deployment, out)
    if as_json:
        ranks = [
            {
                "rank": rank.rank,
                "node": rank.node,
                "container": rank.container,
                "argv": rank.argv,
                "model_dir": rank.model_dir,
            }
            for rank in deployment.ranks
        ]
        fields = {"deployment": deployment.name, "stamp": deployment.stamp, "spec": deployment.spec}
        output.emit({**fields, "files": [str(path) for path in written], "ranks": ranks})
        return
    for path in written:
        print(path)


def show_environment(seen: DryRun, *, only_differing: bool, as_json: bool) -> None:
    """Variables, values and sources of all ranks; a value that is the same everywhere is shown once.

    What `up` would refuse comes last, and its exit code is the process's.
    """
    from dataclasses import asdict

    from exl3kit import rank_env

    told, deployment = seen.environment, seen.deployment
    differing = rank_env.differing(told)
    arguments = rank_env.differing_arguments(deployment)
    if as_json:
        ranks = [
            {"rank": rank, "env": [asdict(one) for one in env if not only_differing or one.name in differing]}
            for rank, env in told.items()
        ]
        refusals = [one.as_json()["error"] for one in seen.refusals]
        fields = {"deployment": deployment.name, "ranks": ranks, "differing": differing, "arguments": arguments}
        output.emit({**fields, "refusals": refusals})
    else:
        for line in rank_env.as_lines(told, only_differing=only_differing):
            print(line)
        for rank, words in arguments.items() if only_differing else ():
            print(f"rank {rank}: vllm arguments  {' '.join(words)}")
    for refusal in seen.refusals:
        print(f"kit: `up` would refuse: {refusal}", file=sys.stderr)
    if seen.refusals:
        raise typer.Exit(int(seen.refusals[0].code))
