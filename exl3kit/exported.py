"""A recipe of the kit in the formats of other launchers: eugr's version 1 and sparkrun's version 2.

Pure. What a format has a word for is said in it; the rest stands under `exl3kit:`, which these launchers pass over and
`kit recipe import` reads back, so that nothing is lost on the way there and back.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import yaml

from exl3kit import deployment, imported

if TYPE_CHECKING:
    from exl3kit.recipe import Recipe

Format = Literal["v1", "v2"]
# Options that stand in `defaults:`, for launchers whose operators override them.
OVERRIDABLE = {
    "--port": "port",
    "--host": "host",
    "--tensor-parallel-size": "tensor_parallel",
    "--gpu-memory-utilization": "gpu_memory_utilization",
    "--max-model-len": "max_model_len",
}
LITERAL_BRACES = re.compile(r"\{\{|\{[A-Za-z_][\w-]*\}")
SHELL = re.compile(r"[\"'$`\\{}\n\r]")  # in a value of env, which one launcher writes between quotes of a shell


@dataclass(frozen=True)
class Exported:
    """The foreign recipe, and the keys of ours that it has no word for, such as `image.arch`."""

    data: dict[str, Any]
    beside: tuple[str, ...]


def translate(recipe: Recipe, to: Format, container: str) -> Exported:
    """The recipe in a format.

    Parameters
    ----------
    container: the image that the other launcher is to start.
    """
    doubled = to == "v1" or any(LITERAL_BRACES.search(word) for word in recipe.serve.args)
    defaults: dict[str, Any] = {}
    data: dict[str, Any] = {"recipe_version": to[1:]}
    if to == "v1":
        data["name"] = recipe.name
    data |= {"description": recipe.purpose or recipe.name, "container": container, **weights(recipe, to)}
    data |= placement(recipe, to)
    command = " \\\n  ".join(lines(recipe, to, defaults, doubled=doubled))
    env = {name: value for name, value in environment(recipe).items() if not SHELL.search(value)}
    data |= {"defaults": defaults, "env": env, "command": command}
    beside = lost(recipe, data)
    return Exported(
        data | ({"exl3kit": beside} if beside else {}),
        tuple(f"{key}.{name}" for key, section in beside.items() for name in section),
    )


def weights(recipe: Recipe, to: Format) -> dict[str, Any]:
    model = recipe.model
    named: dict[str, Any] = {"model": model.repo or str(model.path)} if model.repo or to == "v2" else {}
    if to == "v2" and model.revision is not None:
        named["model_revision"] = model.revision
    return named


def placement(recipe: Recipe, to: Format) -> dict[str, Any]:
    """How many nodes, as the format can say it; version 1 knows one and several, and gives one node one rank."""
    nodes = recipe.parallel.nodes
    if to == "v2":
        return {"runtime": "vllm-distributed", "min_nodes": nodes, "max_nodes": nodes}
    if nodes > 1:
        return {"cluster_only": True}
    return {"solo_only": True} if recipe.parallel.world == 1 else {}


def lines(recipe: Recipe, to: Format, defaults: dict[str, Any], *, doubled: bool) -> Iterator[str]:
    """The command, an option on each line; fills `defaults` with what its placeholders stand for."""

    def literal(word: str) -> str:
        return shlex.quote(word.replace("{", "{{").replace("}", "}}") if doubled else word)

    model = recipe.model
    yield "vllm serve " + ("{model}" if to == "v2" else literal(model.repo or str(model.path)))
    options = [["--served-model-name", recipe.served_name]]
    if to == "v1" and model.revision is not None:
        options.append(["--revision", model.revision])
    options += grouped([*deployment.parallel_options(recipe), *deployment.engine_options(recipe)])
    # Never an open API: its key would have to stand in the file.
    options += [["--host", "127.0.0.1"], ["--port", str(recipe.serve.port)], *grouped(recipe.serve.args)]
    for option, *values in options:
        key = OVERRIDABLE.get(option)
        if key is not None and len(values) == 1 and key not in defaults:
            defaults[key] = number(values[0])
            yield f"{option} {{{key}}}"
        else:
            yield " ".join(literal(word) for word in (option, *values))


def grouped(words: list[str]) -> list[list[str]]:
    """Each option together with the words behind it."""
    found: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not found:
            found.append([word])
        else:
            found[-1].append(word)
    return found


def number(text: str) -> int | float | str:
    """A number where the text is one and is written as it stands."""
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        if str(value) == text:
            return value
    return text


def environment(recipe: Recipe) -> dict[str, str]:
    """The recipe's own environment, and the variables that stand for its `exl3` section."""
    exl3 = recipe.exl3
    env: dict[str, str] = {"EXL3_TIER": exl3.tier}
    if exl3.prefill_reconstruct_m != "auto":
        env["VLLM_EXL3_PREFILL_RECONSTRUCT_M"] = str(exl3.prefill_reconstruct_m)
    if exl3.graph_decode:
        env["VLLM_EXL3_GRAPH_DECODE"] = "1"
    return env | recipe.serve.env


class _Dumper(yaml.SafeDumper):
    """Text of several lines as a block, the way people write commands."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def as_yaml(made: Exported, name: str) -> str:
    """The file."""
    head = f"# {name}, written by `kit recipe export`.\n"
    return head + yaml.dump(made.data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def lost(recipe: Recipe, data: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What an import of `data` would not give back, by section."""
    back = imported.validated(imported.translate(data, recipe.name).data)
    ours, theirs = recipe.model_dump(mode="json"), back.model_dump(mode="json")
    beside: dict[str, dict[str, Any]] = {}
    for key, section in ours.items():
        if not isinstance(section, dict):
            section, other = {key: section}, {key: theirs[key]}
            found, place = different(section, other), imported.TOP
        else:
            found, place = different(section, theirs[key]), key
        if found:
            beside.setdefault(place, {}).update(found)
    return beside


def different(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in ours.items() if theirs.get(name) != value}
