"""Arguments that several verbs share, so that they read, complete and explain alike."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer

from exl3kit.cli import candidates


def recipe(help: str, metavar: str = "RECIPE") -> Any:
    """An argument that names a recipe."""
    return typer.Argument(metavar=metavar, help=help, autocompletion=candidates.recipes, show_default=False)


def nodes(help: str, *names: str, metavar: str = "NAMES") -> Any:
    """An option that names nodes."""
    return typer.Option("--nodes", *names, metavar=metavar, help=help, autocompletion=candidates.nodes)


def spread(verb: Callable[..., None]) -> Callable[..., None]:
    """Let a verb take options that it shares with others as one dataclass: each field becomes an option."""
    hints = get_type_hints(verb, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(verb).parameters.values():
        group = groups.get(parameter.name)
        if group is None:
            parameters.append(parameter.replace(annotation=hints[parameter.name]))
            continue
        types = get_type_hints(group, include_extras=True)
        for one in fields(group):
            default = inspect.Parameter.empty if one.default is MISSING else one.default
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(one.name, kind, default=default, annotation=types[one.name]))

    defaults = {one.name: one.default for one in parameters if one.default is not inspect.Parameter.empty}

    def spreading(*words: Any, **named: Any) -> None:
        given = {**defaults, **dict(zip(hints, words, strict=False)), **named}
        for name, group in groups.items():
            given[name] = group(**{one.name: given.pop(one.name) for one in fields(group)})
        verb(**given)

    keyword = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    spreading.__name__, spreading.__doc__, spreading.__module__ = verb.__name__, verb.__doc__, verb.__module__
    spreading.__signature__ = inspect.Signature(keyword)  # type: ignore[attr-defined]
    spreading.__annotations__ = {parameter.name: parameter.annotation for parameter in keyword}
    return spreading


NAMED = "ssh names separated by commas, a cluster file, or local."

RecipeArg = Annotated[str, recipe("A shipped recipe's name (`kit recipe list`), or the path of a .yaml file.")]
RecipesArg = Annotated[list[str], recipe("Shipped recipes' names, or paths of .yaml files.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, such as serve.port=9000; may be repeated."),
]
NodesOption = Annotated[str, nodes(NAMED)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
