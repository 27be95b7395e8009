"""Verifying weights where they are, here and on every node: file by file, against each other or the hub's hashes."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from exl3kit import manifest, weights
from exl3kit.errors import KitError

if TYPE_CHECKING:
    from exl3kit.deployment import NodeFacts
    from exl3kit.nodes import Node
    from exl3kit.recipe import Recipe

HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Held:
    """What one machine holds: `problems` is empty when it is whole and what it should be; None files: nothing there."""

    where: str
    folder: str
    files: Mapping[str, Mapping[str, Any]] | None
    problems: tuple[str, ...]
    seconds: float

    @property
    def state(self) -> str:
        return "missing" if self.files is None else "differs" if self.problems else "whole"

    @property
    def size(self) -> int:
        return sum(int(entry["size"]) for entry in (self.files or {}).values())


def verify(
    recipe: Recipe, nodes: Sequence[Node], facts: Mapping[str, NodeFacts], image: str, *, full: bool
) -> list[Held]:
    """Look at the weights of this machine, when it has them, and of every node, all at once.

    Parameters
    ----------
    full: hash every byte, and hold it against the hash by which the hub's cache names the file; else headers, sizes,
        index and samples, which takes seconds for 164 GiB.
    """
    held = [here] if (here := look_here(recipe, full=full)) is not None else []
    remote = [node for node in nodes if not (node.is_local and held)]
    with ThreadPoolExecutor(max_workers=max(1, len(remote))) as pool:
        held += pool.map(lambda node: look_on(recipe, node, facts[node.name], image, full=full), remote)
    return against_each_other(held)


def look_here(recipe: Recipe, *, full: bool) -> Held | None:
    """What this machine holds; None when it holds nothing."""
    begun = time.monotonic()
    try:
        source = weights.locate(recipe)
    except KitError:
        return None
    found = manifest.survey(source, full=full)
    problems = found["problems"]
    if full:
        links = {name: (source / name).readlink().name for name in found["files"] if (source / name).is_symlink()}
        problems = problems + wrong_hashes(found["files"], links)
    return Held("this machine", str(source), found["files"], tuple(problems), time.monotonic() - begun)


def look_on(recipe: Recipe, node: Node, facts: NodeFacts, image: str, *, full: bool) -> Held:
    """What a node holds: the copy that a rank would see, else the folder that it would be made from."""
    begun = time.monotonic()
    copies = kit_copy(recipe, node, facts)
    folder = copies or weights.place_on(recipe, node, facts)
    if folder is None:
        return Held(f"node {node.name}", "-", None, ("there are none",), time.monotonic() - begun)
    found = weights.survey_on(node, image, folder, None if copies else facts, full=full)
    problems = list(found["problems"])
    if full and not copies:
        listed = node.run(["find", folder, "-type", "l", "-printf", "%P %l\\n"]).stdout.splitlines()
        links = {line.partition(" ")[0]: line.rpartition("/")[2] for line in listed}
        problems += wrong_hashes(found["files"], links)
    return Held(f"node {node.name}", folder, found["files"], tuple(problems), time.monotonic() - begun)


def kit_copy(recipe: Recipe, node: Node, facts: NodeFacts) -> str | None:
    """The kit's own copy of these weights on a node, the newest where there are several."""
    name = recipe.model.path.name if recipe.model.path is not None else recipe.model.revision
    root = f"{facts.cache}/weights"
    found = node.run(["find", root, "-maxdepth", "1", "-type", "d", "-name", f"{name}-*", "!", "-name", "*.partial"])
    newest = node.run(["ls", "-dt", *found.stdout.split()]).stdout.split() if found.stdout.strip() else []
    return newest[0] if newest else None


def wrong_hashes(files: Mapping[str, Mapping[str, Any]], links: Mapping[str, str]) -> list[str]:
    """A sentence for every file whose sha256 is not the one by which the hub's cache names it."""
    return [
        f"{name} has another hash than the hub's: {files[name]['digest'][:12]} instead of {wanted[:12]}"
        for name, wanted in links.items()
        if HASH.fullmatch(wanted) and name in files and files[name]["digest"] != wanted
    ]


def against_each_other(held: Sequence[Held]) -> list[Held]:
    """Each holding with what is different from the first whole one."""
    reference = next((one for one in held if one.files is not None and not one.problems), None)
    if reference is None or reference.files is None:
        return list(held)
    result = []
    for one in held:
        problems = list(one.problems)
        if one is not reference and one.files is not None:
            names = sorted({*reference.files, *one.files})
            problems += [
                f"{name} {difference(reference.files.get(name), one.files.get(name))} on {reference.where}"
                for name in names
                if reference.files.get(name) != one.files.get(name)
            ]
        result.append(Held(one.where, one.folder, one.files, tuple(problems), one.seconds))
    return result


def difference(wanted: Mapping[str, Any] | None, found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "is missing, and is there"
    return "is there, and is not" if wanted is None else "has other content than"


def code_of(held: Sequence[Held]) -> str:
    """The worst state of all: differs, missing or whole."""
    states = {one.state for one in held}
    return "differs" if "differs" in states else "missing" if "missing" in states else "whole"
