"""The kit's images that nodes hold: which stamp, since when, used by what; which may go, and which come back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from exl3kit import built_image, image, side_by_side
from exl3kit.built_image import LOCK, MADE_FROM, PREVIOUS, REPOSITORY, STAMP, BuiltImage
from exl3kit.errors import ExitCode, KitError
from exl3kit.lock import Lock

if TYPE_CHECKING:
    from exl3kit.nodes import Node
    from exl3kit.progress import Progress


@dataclass(frozen=True)
class Held:
    """An image of the kit on one node: `names` are the recipes whose moving tag leads to it, `users` its containers.

    `made_from` is the tag of the image with its kernels, empty where it has none.
    """

    node: str
    image: BuiltImage
    made: datetime
    names: tuple[str, ...]
    previous_of: tuple[str, ...]
    users: tuple[str, ...]
    made_from: str = ""

    @property
    def age_seconds(self) -> float:
        return (datetime.now(UTC) - self.made).total_seconds()


@dataclass(frozen=True)
class Removal:
    """An image that was, or with `dry_run` would be, removed from a node."""

    node: str
    tag: str
    size: int


def inventory(nodes: Sequence[Node]) -> dict[str, list[Held]]:
    """Every image of the kit on each node, newest first."""
    return dict(
        zip((node.name for node in nodes), side_by_side.run(*(partial(_held, node) for node in nodes)), strict=True)
    )


def _held(node: Node) -> list[Held]:
    users: dict[str, list[str]] = {}
    for container in node.engine.api.containers(all=True):
        users.setdefault(container["ImageID"], []).append(container["Names"][0].removeprefix("/"))
    found = []
    for one in node.engine.images.list(filters={"label": STAMP}):
        stamp = one.labels[STAMP]
        tag = f"{REPOSITORY}:{stamp[:12]}"
        if tag not in one.tags:
            continue  # the layers of an image that was built anew
        moving = [name.partition(":")[2] for name in one.tags if name.startswith(f"{REPOSITORY}:") and name != tag]
        found.append(
            Held(
                node.name,
                built_image.described(one, tag),
                datetime.fromisoformat(re.sub(r"(\.\d{6})\d*", r"\1", one.attrs["Created"])).astimezone(UTC),
                tuple(name for name in moving if not name.endswith(PREVIOUS)),
                tuple(name.removesuffix(PREVIOUS) for name in moving if name.endswith(PREVIOUS)),
                tuple(users.get(str(one.id), ())),
                one.labels.get(MADE_FROM, ""),
            )
        )
    return sorted(found, key=lambda held: held.made, reverse=True)


# ---- which may go ----------------------------------------------------------------------------------------------------


def superfluous(held: Sequence[Held], keep: int) -> list[Held]:
    """Those of one node's images that may go: not the newest `keep`, none that a container or a moving tag needs."""
    return [one for one in held[keep:] if not (one.users or one.names or one.previous_of)]


@dataclass(frozen=True)
class Part:
    """An image that others are made from: they lie on its layers, or name its tag as what they were `made_from`."""

    tag: str
    layers: tuple[str, ...]
    size: int
    made_from: str = ""


PARTS = ("exl3kit-env", "exl3kit-base", "exl3kit-kernels", "exl3kit-builder")  # each after all that is made from it


def superfluous_parts(parts: Mapping[str, Sequence[Part]], staying: Sequence[Held]) -> list[Part]:
    """Of one node's parts, by repository and newest first: those that nothing which stays was made from.

    The newest of each stays: the next build starts from that, whatever was made from it now.
    """
    layers = [one.image.layers for one in staying]
    named = {one.made_from for one in staying}
    going = []
    for repository in PARTS:
        for place, part in enumerate(parts.get(repository, ())):
            if place == 0 or part.tag in named or _is_below(part.layers, layers):
                layers.append(part.layers)
                named.add(part.made_from)
            else:
                going.append(part)
    return going


def prune(nodes: Sequence[Node], keep: int, *, dry_run: bool) -> list[Removal]:
    """Remove the superfluous images of every node, and with them the parts that nothing is left of."""
    jobs = (partial(_prune, node, keep, dry_run) for node in nodes)
    return [removal for removals in side_by_side.run(*jobs) for removal in removals]


def _prune(node: Node, keep: int, dry_run: bool) -> list[Removal]:
    from docker.errors import APIError

    held = _held(node)
    going = superfluous(held, keep)
    gone = [Removal(node.name, one.image.tag, one.image.size) for one in going]
    if going:
        found = {repository: _parts(node, repository) for repository in PARTS}
        parts = superfluous_parts(found, [one for one in held if one not in going])
        gone += [Removal(node.name, part.tag, part.size) for part in parts]
    for removal in [] if dry_run else gone:
        try:
            node.engine.images.remove(removal.tag)
        except APIError as error:
            raise node.error(f"{removal.tag} cannot be removed", why=error.explanation, code=ExitCode.FAULT) from error
    return gone


def _parts(node: Node, repository: str) -> list[Part]:
    """The node's images of a repository, newest first."""
    found = sorted(node.engine.images.list(name=repository), key=lambda one: str(one.attrs["Created"]), reverse=True)
    return [
        Part(tag, tuple(one.attrs["RootFS"].get("Layers") or ()), int(one.attrs["Size"]), one.labels.get(MADE_FROM, ""))
        for one in found
        for tag in one.tags
        if tag.startswith(f"{repository}:")
    ]


def _is_below(layers: Sequence[str], images: Iterable[Sequence[str]]) -> bool:
    """Whether some image lies on these layers."""
    return any(tuple(image[: len(layers)]) == tuple(layers) for image in images)


# ---- which come back -------------------------------------------------------------------------------------------------


def recall(nodes: Sequence[Node], reference: str) -> tuple[Node, BuiltImage, Lock]:
    """An image by its stamp (12 digits or more): the first node that has it, and the lock that it was built from.

    Raises `KitError` (preflight) when no node has it, or several are meant.
    """
    wanted = reference.removeprefix(f"{REPOSITORY}:")
    held = inventory(nodes)
    matching = {one.image.stamp for found in held.values() for one in found if one.image.stamp.startswith(wanted)}
    if len(matching) != 1 or len(wanted) < 12:
        there = ", ".join(sorted({one.image.stamp[:12] for found in held.values() for one in found})) or "none"
        raise KitError(
            f"no image {reference} on {', '.join(held)}",
            why=f"images there: {there}; a stamp has 12 digits or more",
            next_step="`kit image status --nodes ...` shows them; one that was pruned can be built again",
            code=ExitCode.PREFLIGHT,
        )
    stamp = matching.pop()
    for node in nodes:
        if (found := built_image.find(node, stamp)) is not None:
            labels = node.engine.images.get(found.tag).labels
            lock = Lock(json.loads(labels[LOCK]))
            if lock.stamp != stamp:
                raise node.error(f"{found.tag} carries another lock than its stamp", code=ExitCode.VERIFICATION)
            return node, found, lock
    raise KitError(f"{reference} has just been removed", code=ExitCode.PREFLIGHT)


def previous(nodes: Sequence[Node], name: str) -> str:
    """The stamp that the recipe's moving tag led to before the one that it leads to now.

    Raises `KitError` (preflight) when the nodes know of none.
    """
    held = inventory(nodes)
    for found in held.values():
        for one in found:
            if name in one.previous_of and name not in one.names:
                return one.image.stamp
    raise KitError(
        f"there is no earlier image of {name} on {', '.join(held)}",
        next_step="name one: `kit rollback RECIPE --to STAMP`; `kit image status --nodes ...` shows them",
        code=ExitCode.PREFLIGHT,
    )


def bring_back(nodes: Sequence[Node], name: str, reference: str, progress: Progress) -> BuiltImage:
    """Have an earlier image on every node, and the recipe's moving tag lead to it."""
    source, built, _ = recall(nodes, reference)
    image.spread(built, name, source, nodes, progress=progress)
    return built


def differing(nodes: Sequence[Node], stamp: str) -> Mapping[str, str]:
    """Nodes that do not hold the one image of this stamp, each with what it holds instead."""
    found = dict(zip(nodes, side_by_side.run(*(partial(built_image.find, node, stamp) for node in nodes)), strict=True))
    first = next((one for one in found.values() if one is not None), None)
    told = {}
    for node, one in found.items():
        if one is None:
            told[node.name] = "has no image of it"
        elif first is not None and not one.same_content(first):
            told[node.name] = "has another build of it"
    return told


def require_everywhere(nodes: Sequence[Node], lock: Lock, name: str) -> None:
    """Raise `KitError` (preflight) unless every node has the image of this lock, and all the same."""
    if not (told := differing(nodes, lock.stamp)):
        return
    raise KitError(
        f"{lock.tag} is not on every node, and nothing may be built or copied",
        where=", ".join(f"node {node}" for node in told),
        why="; ".join(f"{node} {what}" for node, what in told.items()),
        next_step=f"`kit build {name}` with these --nodes, or leave out --no-build",
        code=ExitCode.PREFLIGHT,
    )
