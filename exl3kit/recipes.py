"""Finding, reading, extending and overriding recipes; every fault comes back with file, line and column."""

from __future__ import annotations

import json
import os
import shlex
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from exl3kit import geometry, paths, recipe_faults, yaml_source
from exl3kit.errors import KitError
from exl3kit.faults import LocatedFault, Place, RecipeError, did_you_mean, printable
from exl3kit.recipe import Recipe
from exl3kit.yaml_source import Entry, Fields, Node, Scalar

MAX_CHAIN = 8  # files in a chain of extends; a longer one is a mistake or a loop
PATIENCE_S = 10  # for the writer of a recipe that comes through a pipe
OWN_KEYS = ("recipe", "name", "purpose")  # what a file says of itself is never inherited
PATHS = (("model", "path"), ("serve", "api_key_file"), ("exl3", "kernel_table"))  # relative to the file that names them


@dataclass(frozen=True)
class Effective:
    """A recipe after `extends` and `--set`, the tree that knows each value's place, and the files, base first."""

    recipe: Recipe
    tree: Node
    files: tuple[Path, ...]


def shipped() -> list[Path]:
    """The recipes that come with the kit, by name."""
    return sorted(paths.RECIPES.glob("*.yaml"), key=lambda path: path.stem)


def load(ref: str, sets: Sequence[str] = ()) -> Recipe:
    """The recipe `ref` (a shipped name or a path) with `--set` overrides; RecipeError names every fault."""
    recipe = load_effective(ref, sets).recipe
    _said[recipe.name] = ref
    return recipe


_said: dict[str, str] = {}  # how the operator named each recipe of this run, by its own name


def said(recipe: Recipe) -> str:
    """The recipe in a command that the operator can run: as it was named here, quoted for a shell."""
    return shlex.quote(_said.get(recipe.name, recipe.name))


def load_effective(ref: str, sets: Sequence[str] = ()) -> Effective:
    """As `load`, with the place of each value."""
    path = locate(ref)
    return load_text(_bytes_of(path), path, sets)


def load_text(data: bytes, path: Path, sets: Sequence[str] = ()) -> Effective:
    """As `load_effective` for a recipe whose text is at hand; `path` is what it is called and where it would lie."""
    tree, files, faults = _chain(data, path)
    for text in sets:
        override, more = _read_override(text)
        faults += more
        tree = yaml_source.merge_fields(tree, override)
    try:
        recipe = Recipe.model_validate(yaml_source.plain(tree))
    except ValidationError as error:
        known = {fault.place for fault in faults}  # an alias, say, also has the wrong type: one sentence is enough
        more = [fault for fault in recipe_faults.translate(error, tree) if fault.place not in known]
        raise RecipeError([*faults, *more]) from None
    faults += _geometry_faults(recipe, tree)
    if faults:
        raise RecipeError(faults)
    return Effective(recipe, tree, files)


def _geometry_faults(recipe: Recipe, tree: Node) -> list[LocatedFault]:
    """What a local checkpoint's config.json says against the recipe; nothing when it is not here (yet)."""
    directory = recipe.model.path
    if directory is None or not _is_file(directory / "config.json"):
        return []
    path = yaml_source.find(tree, ("model", "path")) or tree
    try:
        config = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        return [LocatedFault(path.place, f"model.path: its config.json cannot be read: {error}")]
    if not isinstance(config, dict):
        return [LocatedFault(path.place, "model.path: expected its config.json to hold a JSON object")]
    parallel = recipe.parallel
    quantised = geometry.is_quantised(config) and recipe.exl3.tier != "none"
    sentences = geometry.cut_faults(config, tensor=parallel.tensor, expert=parallel.expert, exl3=quantised)
    found = {
        "tensor": (sentences, "choose a tensor that fits; parallel.expert keeps experts whole"),
        "pipeline": (geometry.pipeline_faults(config, pipeline=parallel.pipeline), "choose fewer"),
        "expert": (geometry.expert_faults(config, expert=parallel.expert), "remove it"),
    }
    return [
        LocatedFault((yaml_source.find(tree, ("parallel", key)) or path).place, f"parallel.{key}: {sentence}", hint)
        for key, (said, hint) in found.items()
        for sentence in said
    ]


def locate(ref: str) -> Path:
    """The file of a reference: anything with a slash or a .yaml ending is a path, a bare word a shipped recipe."""
    path = _named(ref, Path())
    if isinstance(path, str):
        raise KitError(path, where=printable(ref), next_step=_nearest(ref))
    return path


def display(path: Path) -> str:
    """A path as a reader would type it: relative to the working directory when below it."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)


def _nearest(ref: str) -> str:
    names = [path.stem for path in shipped()]
    near = did_you_mean(Path(ref).stem, names)
    return f"did you mean {near}?" if near else f"shipped recipes: {', '.join(names)}; a path needs a slash or .yaml"


def _nearest_file(path: Path) -> str:
    """What was meant by a path at which there is nothing: a file beside it, or a shipped recipe."""
    beside = {one.stem: one.name for one in path.parent.glob("*.y*ml")} if path.parent.is_dir() else {}
    if near := did_you_mean(path.stem, [*(one.stem for one in shipped()), *beside]):
        return f"did you mean {beside.get(near, near)}?"
    return (
        f"nothing of that name is in {printable(str(path.parent.absolute()))}; `kit recipe list` has those of the kit"
    )


def _named(ref: str, directory: Path) -> Path | str:
    """The file that `ref` names from `directory`, or a sentence why there is none."""
    if "\0" in ref or not ref.strip():
        return "expected the name of a recipe or a path"
    if "/" in ref or ref.endswith((".yaml", ".yml")):
        try:
            return directory / Path(ref).expanduser()
        except RuntimeError:
            return f"{ref.partition('/')[0]} is no user of this machine"
    path = paths.RECIPES / f"{ref}.yaml"
    return path if _is_file(path) else f"no shipped recipe is called {ref!r}"


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name too long, a folder that may not be searched
        return False


def _bytes_of(path: Path) -> bytes:
    source = printable(display(path))
    try:
        return _read(path)
    except FileNotFoundError:
        raise KitError("there is no such recipe", where=source, next_step=_nearest_file(path)) from None
    except IsADirectoryError:
        raise KitError("expected a recipe, found a directory", where=source, next_step="name a .yaml file") from None
    except TimeoutError:
        what = f"nothing came out of this pipe for {PATIENCE_S} s"
        raise KitError(what, where=source, next_step="is its writer running?") from None
    except OSError as error:
        raise KitError("the recipe cannot be read", where=source, why=error.strerror or str(error)) from None


def _read(path: Path) -> bytes:
    """The bytes of a file or pipe, at most one more than a recipe may have; a pipe that stays silent is a TimeoutError.

    Without O_NONBLOCK the opening of a pipe that nobody writes to would wait for ever.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
        data, silent_since = b"", time.monotonic()
        while len(data) <= yaml_source.MAX_BYTES:
            try:
                piece = os.read(descriptor, yaml_source.MAX_BYTES + 1 - len(data))
            except BlockingIOError:
                piece = None  # no byte yet
            if piece:
                data, silent_since = data + piece, time.monotonic()
            elif piece is not None and (data or not is_pipe):
                break
            elif time.monotonic() - silent_since > PATIENCE_S:
                raise TimeoutError
            else:
                time.sleep(0.02)  # a pipe without a writer, at its beginning, may get one
        return data
    finally:
        os.close(descriptor)


def _parse(data: bytes, path: Path) -> tuple[Fields, list[LocatedFault]]:
    """One file's own tree; relative paths in it are made absolute."""
    origin = yaml_source.Origin(display(path))
    tree, faults = yaml_source.read(yaml_source.decode(data, origin), origin)
    if tree is None or (isinstance(tree, Scalar) and tree.value is None):
        hint = "`kit recipe show demo` prints a whole one"
        raise RecipeError([*faults, LocatedFault(origin.place(1, 1), "the recipe is empty", hint)])
    if not isinstance(tree, Fields):
        what = f"expected a mapping (key: value), found {recipe_faults.describe(tree)}"
        raise RecipeError([*faults, LocatedFault(tree.place, what)])
    return _absolute_paths(tree, path.parent), faults


def _absolute_paths(tree: Fields, directory: Path) -> Fields:
    """The tree with the values of `PATHS` made absolute, so that an extending file elsewhere keeps their meaning."""
    for section, key in PATHS:
        node = yaml_source.find(tree, (section, key))
        if not isinstance(node, Scalar) or not isinstance(node.value, str) or not node.value.strip():
            continue  # absent, or the model refuses it
        try:
            absolute = (directory / Path(node.value).expanduser()).resolve()
        except (OSError, RuntimeError, ValueError):  # no such user, a loop of links, a NUL, no current folder
            continue
        tree = yaml_source.put(tree, (section, key), replace(node, value=str(absolute)))
    return tree


def _chain(
    data: bytes, path: Path, below: tuple[Path, ...] = ()
) -> tuple[Fields, tuple[Path, ...], list[LocatedFault]]:
    """A file's tree on top of all that it extends; `below` are the files that led here."""
    tree, faults = _parse(data, path)
    entry = tree.entries.get("extends")
    if entry is None:
        return tree, (path,), faults
    chain = (*below, path.resolve())
    base = _base_of(entry.node, path, chain)
    inherited, files, more = _chain(_bytes_of(base), base, chain)
    passed_on = {key: value for key, value in inherited.entries.items() if key not in OWN_KEYS}
    own = {key: value for key, value in tree.entries.items() if key != "extends"}
    merged = yaml_source.merge_fields(replace(inherited, entries=passed_on), replace(tree, entries=own))
    return merged, (*files, path), [*faults, *more]


def _base_of(node: Node, path: Path, chain: tuple[Path, ...]) -> Path:
    """The file that `extends` names; `chain` are the files from the first to the one that says it."""

    def refuse(what: str, hint: str | None = None) -> RecipeError:
        return RecipeError([LocatedFault(node.place, f"extends: {what}", hint)])

    if not isinstance(node, Scalar) or not isinstance(node.value, str):
        raise refuse(f"expected the name of a recipe or a path, found {recipe_faults.describe(node)}")
    base = _named(node.value, path.parent)
    if isinstance(base, str):
        raise refuse(base, _nearest(node.value))
    if not _is_file(base):
        raise refuse(f"there is no file {display(base)}", _nearest(node.value))
    if base.resolve() in chain:
        loop = [*chain[chain.index(base.resolve()) :], base]
        raise refuse("the recipe extends itself: " + " -> ".join(file.name for file in loop), "remove one extends")
    if len(chain) >= MAX_CHAIN:
        raise refuse(f"more than {MAX_CHAIN} recipes build on each other")
    return base


def _read_override(text: str) -> tuple[Fields, list[LocatedFault]]:
    """`a.b=value` as a tree of one value; places count columns in `text`."""
    source = f"--set {text}"
    keys, equals, written = text.partition("=")
    names = keys.split(".")
    if not equals or not all(names) or len(names) > yaml_source.MAX_DEPTH or not keys.isprintable():
        what = "expected KEY.KEY=VALUE"
        raise RecipeError([LocatedFault(Place(source, 0, 1), what, "for example --set serve.port=9000")])
    if names == ["extends"]:
        raise RecipeError(
            [LocatedFault(Place(source, 0, 1), "extends belongs in a file", "name another recipe instead")]
        )
    node, faults = yaml_source.read_inline(written, source, len(keys) + 1)
    column = len(keys) + 1
    for name in reversed(names):
        column -= len(name) + 1
        node = Fields({name: Entry(Place(source, 0, column + 1), node)}, Place(source, 0, column + 1))
    assert isinstance(node, Fields)
    return _absolute_paths(node, Path()), faults
