"""From pydantic's errors to sentences: where, what was expected, what was found, what to write instead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from exl3kit import recipe, yaml_source
from exl3kit.faults import Fault, Key, LocatedFault, did_you_mean
from exl3kit.recipe_rules import EXL3_FLAGS
from exl3kit.yaml_source import Fields, Items, Node, Scalar

_TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a mapping (key: value)",
    "model_type": "a mapping (key: value)",
    "model_attributes_type": "a mapping (key: value)",
    "is_instance_of": "a path",
}
_MOST_SHOWN = 40  # characters of a found value that a message repeats


def describe(node: Node) -> str:
    """What was found, in a reader's words: 'the text "x"', 'the number 12.0', 'a list'."""
    if isinstance(node, Fields):
        return "a mapping"
    if isinstance(node, Items):
        return "a list"
    shown = node.text if len(node.text) <= _MOST_SHOWN else node.text[: _MOST_SHOWN - 1] + "…"
    if node.value is None:
        return "nothing" if node.text == "" else shown
    if isinstance(node.value, bool):
        return f"the boolean {shown}"
    if isinstance(node.value, int | float):
        return f"the number {shown}"
    return "the empty text" if node.value == "" else "the text " + yaml_source.quoted(shown)


def dotted(path: Iterable[Key]) -> str:
    """A path as people write it: serve.args[2]."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")


def translate(error: ValidationError, tree: Node) -> list[LocatedFault]:
    """Every fault of a failed validation, located in `tree`."""
    return [fault for details in error.errors() for fault in _located(details, tree)]


def _located(details: Any, tree: Node) -> Iterator[LocatedFault]:
    kind, context = details["type"], details.get("ctx", {})
    path, node, key_place = _walk(tree, details["loc"])
    name = dotted(path)
    if kind == "rules":
        for fault in context["faults"]:
            yield _locate_rule(fault, path, tree)
        return
    if kind == "extra_forbidden":
        yield LocatedFault(key_place or node.place, f"unknown key {name}", _nearest_key(path))
        return
    if kind == "missing":
        missing = str(details["loc"][-1])
        whole = dotted((*path, missing))
        yield LocatedFault(key_place or node.place, f"the key {whole} is missing", _meaning(path, missing))
        return
    expected, hint = _expectation(kind, context, node)
    if path[:2] == ("serve", "env") and path[-1] in EXL3_FLAGS:
        hint = 'write "0" or "1"'  # quoting `off` as it stands would only lead to the next fault
    yield LocatedFault(node.place, f"{name or 'recipe'}: expected {expected}, found {describe(node)}", hint)


def _locate_rule(fault: Fault, above: tuple[Key, ...], tree: Node) -> LocatedFault:
    path, node, key_place = _walk(tree, (*above, *fault.path))
    name = dotted(path)
    place = node.place if fault.path and path == (*above, *fault.path) else key_place or node.place
    return LocatedFault(place, f"{name}: {fault.what}" if name else fault.what, fault.hint)


def _walk(tree: Node, loc: Iterable[Key]) -> tuple[tuple[Key, ...], Node, Any]:
    """The deepest node under `loc`, its path, and the place of its key; parts that only pydantic knows are skipped."""
    path: tuple[Key, ...] = ()
    node, key_place = tree, None
    for part in loc:
        below = yaml_source.find(node, (part,))
        if below is None:
            continue
        key_place = node.entries[str(part)].place if isinstance(node, Fields) else below.place
        path, node = (*path, part), below
    return path, node, key_place


def _expectation(kind: str, context: dict[str, Any], node: Node) -> tuple[str, str | None]:
    if kind == "literal_error":
        choices = [choice.strip(" '") for choice in str(context["expected"]).replace(" or ", ", ").split(",")]
        return ("one of " if len(choices) > 1 else "") + ", ".join(choices), _choice_hint(choices, node)
    if kind in ("greater_than_equal", "greater_than", "less_than_equal", "less_than"):
        word = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
        return next(f"{word[bound]} {context[bound]:g}" for bound in word if bound in context), None
    if kind == "expected":
        return context["expected"], context["hint"]
    if kind == "string_type":
        return "text", _quote_hint(node)
    return _TYPES.get(kind, kind), None


def _quote_hint(node: Node) -> str | None:
    if isinstance(node, Scalar) and node.value is not None and not isinstance(node.value, str):
        return f'put it in quotes: "{node.text}"'
    return None


def _choice_hint(choices: list[str], node: Node) -> str | None:
    if not isinstance(node, Scalar):
        return None
    if node.value is False and "none" in choices:
        return f"{node.text} is a boolean in YAML: write none"
    if isinstance(node.value, bool):
        return f"{node.text} is a boolean in YAML"
    near = did_you_mean(node.text, choices)
    return f"did you mean {near}?" if near else None


def _section(path: tuple[Key, ...]) -> type[BaseModel] | None:
    """The model that describes the mapping under `path`."""
    model: type[BaseModel] = recipe.Recipe
    for key in path:
        field = model.model_fields.get(str(key))
        below = _model_of(field) if field else None
        if below is None:
            return None
        model = below
    return model


def _model_of(field: FieldInfo) -> type[BaseModel] | None:
    candidates = [field.annotation, *get_args(field.annotation)]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def _nearest_key(path: tuple[Key, ...]) -> str | None:
    """A suggestion for an unknown key: a near one of its section, or the section where that key lives."""
    section = _section(path[:-1])
    if section is None:
        return None
    word = str(path[-1])
    near = did_you_mean(word, section.model_fields)
    if near:
        return f"did you mean {near}?"
    homes = {name: field for name, field in recipe.Recipe.model_fields.items() if _model_of(field)}
    for name, field in homes.items():
        model = _model_of(field)
        if model is not None and word in model.model_fields:
            return f"it belongs under {name}:"
    return "known keys: " + ", ".join(section.model_fields)


def _meaning(path: tuple[Key, ...], key: str) -> str | None:
    section = _section(path)
    field = section.model_fields.get(key) if section else None
    return field.description if field else None
