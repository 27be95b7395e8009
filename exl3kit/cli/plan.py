"""`kit plan`: parse, call, print."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from exl3kit.cli import args, output
from exl3kit.words import counted

if TYPE_CHECKING:
    from exl3kit.plan import Plan, Source
    from exl3kit.recipe import Recipe


def plan(
    recipe: args.RecipeArg,
    nodes: Annotated[str | None, args.nodes("Hold the plan against these nodes; machines as sold if left out.")] = None,
    sets: args.SetOption = None,
    as_json: args.JsonOption = False,
) -> None:
    """What each rank will take, whether it fits, what will run and why, and the commands; exit 3 when it cannot."""
    from exl3kit import deployment, facts, recipes
    from exl3kit import plan as planning
    from exl3kit.errors import ExitCode
    from exl3kit.nodes import open_nodes

    loaded = recipes.load(recipe, sets or ())
    source = source_of(loaded)
    if nodes is None:
        made = planning.make(loaded, source, ref=recipe)
    else:
        with open_nodes(nodes) as opened:
            asked = facts.gather(opened)
            placement = deployment.place(loaded, [asked[node.name] for node in opened])
        made = planning.make(loaded, source, asked, placement, nodes, recipe)
    if as_json:
        output.emit(made.as_json())
    else:
        show(made)
    if not made.fits:
        raise typer.Exit(int(ExitCode.PREFLIGHT))


def source_of(recipe: Recipe) -> Source:
    """The weights' headers when they are on this machine, else their published shape."""
    from exl3kit import admission, published, recipes, weights
    from exl3kit import plan as planning
    from exl3kit.errors import ExitCode, KitError

    try:
        found = weights.survey(recipe)
    except KitError as missing:
        model = published.find(recipe)
        if model is None:
            raise KitError(
                "the size of these weights is not known: they are not here, and no published shape bears their name",
                where=recipe.name,
                why=missing.what,
                next_step=f"`kit weights fetch {recipes.said(recipe)}`; known shapes: {', '.join(published.models())}",
                code=ExitCode.PREFLIGHT,
            ) from missing
        return planning.of_published(recipe, model)
    return planning.Source(f"headers in {found.source}", admission.Sizes.of(found.sizes), found.config, {})


def show(made: Plan) -> None:
    """The plan for people: plain lines, aligned."""
    from exl3kit import plan as planning

    rows = planning.table(made)
    width = max(len(what) for what, _, _ in rows)
    parallel = made.recipe.parallel
    ranks, nodes = counted(parallel.world, "rank"), counted(parallel.nodes, "node")
    tell(f"{made.recipe.name}: {ranks} on {nodes}, bytes per rank")
    print()
    for what, size, why in rows:
        tell(f"  {what:<{width}}  {size:>10}  {why}".rstrip(), width + 16)
    print("\nruns")
    for what, why in made.runs:
        tell(f"  {what}: {why}")
    print("\nfits" + (" (machines as sold; --nodes asks real ones)" if made.nominal else ""))
    for refusal in made.refusals:
        tell(f"  refused: {refusal}")
    for one in made.verdicts:
        fix = f"; next: {one.fix}" if one.fix and not one.fits else ""
        tell(f"  {'yes' if one.fits else 'no '}  {one.node}: {one.says}{fix}", 7)
    if not made.verdicts and not made.refusals:
        tell("  not known: it is for no machine as sold; `--nodes local` asks this one")
    print()
    tell("network of the ranks" + ("" if made.networks else ": from each node's facts at every start"))
    for rank, env in made.networks.items():
        tell(f"  {rank}: {' '.join(f'{name}={env[name]}' for name in sorted(env)) or 'TCP, nothing to set'}")
    print("\ncommands")
    for command in made.commands:
        print(f"  {command}")


def tell(line: str, hang: int = 4) -> None:
    print(output.hung(line, hang))
