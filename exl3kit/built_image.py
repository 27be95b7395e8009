"""An image of the kit on one engine: what it says of itself, and how it is found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from docker.models.images import Image

    from exl3kit.nodes import Node

REPOSITORY = "exl3kit"
STAMP = "io.exl3kit.stamp"
LOCK = "io.exl3kit.lock"
ENVIRONMENT = "io.exl3kit.environment"  # of every image that has the wheels, Python among them

MADE_FROM = "io.exl3kit.made-from"  # tag of an image that it was made from and does not lie on, for `kit image prune`

PREVIOUS = ".previous"  # ends the tag of what a recipe's moving tag led to before


@dataclass(frozen=True)
class BuiltImage:
    """An image that is there: its fixed tag, stamp (64 hex), root-fs layers, size in bytes and platform.

    Two engines hold the same image when `stamp` and `layers` agree; `.Id` differs from store to store.
    """

    tag: str
    stamp: str
    layers: tuple[str, ...]
    size: int
    platform: str = "linux/amd64"

    def same_content(self, other: BuiltImage) -> bool:
        """Whether the two are one image, whatever the engines call it."""
        return (self.stamp, self.layers) == (other.stamp, other.layers)


def find(node: Node, stamp: str) -> BuiltImage | None:
    """The image with this stamp on the node's engine under its fixed tag, or None."""
    tag = f"{REPOSITORY}:{stamp[:12]}"
    for image in node.engine.images.list(filters={"label": f"{STAMP}={stamp}"}):
        if tag in image.tags:
            return described(image, tag)
    return None


def described(image: Image, tag: str) -> BuiltImage:
    """What the engine says about an image."""
    layers = tuple(image.attrs["RootFS"].get("Layers") or ())
    platform = f"{image.attrs.get('Os', 'linux')}/{image.attrs.get('Architecture', 'amd64')}"
    return BuiltImage(tag, image.labels.get(STAMP, ""), layers, int(image.attrs["Size"]), platform)
