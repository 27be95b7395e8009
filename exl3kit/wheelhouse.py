"""What images are built from, in this machine's cache: fetched once, then no network is needed.

What a container registry holds is not among it: an engine pulls that itself, and `kit bundle` carries it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from exl3kit import kernel_image, lock, paths, pins, rootfs, symbols, wheels

if TYPE_CHECKING:
    from exl3kit.lock import Lock
    from exl3kit.pins import Pins, Wheel
    from exl3kit.progress import Progress
    from exl3kit.recipe import Recipe


@dataclass(frozen=True)
class Sources:
    """What one recipe's image is built from."""

    recipe: Recipe
    lock: Lock
    pinned: Pins

    @property
    def kernels(self) -> kernel_image.Stage | None:
        """How its kernels are compiled, if it has any."""
        platform = self.pinned.platform
        return kernel_image.Stage(self.lock, platform, platform) if self.lock.data["arch"] else None

    @property
    def readers(self) -> Pins | None:
        """By what this machine, which may be of another kind than the engine's, reads the compiled library."""
        if self.kernels is None:
            return None
        found = tuple(symbols.reader_wheels())
        return replace(self.pinned, platform=pins.host(), wheels=found, path=symbols.LOCK)

    @property
    def wheels(self) -> list[Wheel]:
        of_kernels = [*self.kernels.wheels, *symbols.reader_wheels()] if self.kernels else []
        return [*self.pinned.wheels, *of_kernels]

    @property
    def rootfs(self) -> list[tuple[pins.Rootfs, str]]:
        """(root file system, platform): the base, and what kernels are compiled in."""
        found = [self.pinned.base] if isinstance(self.pinned.base, pins.Rootfs) else []
        return [(base, self.pinned.platform) for base in [*found, *([self.kernels.builder] if self.kernels else [])]]

    def files(self) -> Iterator[Path]:
        """Where they lie in the cache."""
        yield from (paths.wheelhouse() / str(wheel.filename) for wheel in self.wheels)
        yield from (rootfs.place(base, platform) for base, platform in self.rootfs)


def of(recipe: Recipe) -> Sources:
    """The sources of a recipe's image. Raises `KitError` when a pin is unknown."""
    return Sources(recipe, lock.make_lock(recipe), pins.load(recipe.image).with_digest_of(recipe.image))


def fetch(sources: Sources, progress: Progress) -> None:
    """Have all of them in the cache; what is there is checked by hash and not fetched again."""
    with progress.stage(f"wheels of {sources.recipe.name}") as stage:
        wheels.fetch(sources.pinned, stage)
        stage.conclude(f"{len(sources.pinned.wheels)} wheels")
    if sources.kernels:
        kernel_image.fetch(sources.kernels, progress)
    if sources.readers:
        with progress.stage("readers of the library") as stage:
            wheels.fetch(sources.readers, stage)
    for base, platform in sources.rootfs:
        with progress.stage(f"root file system of {base.suite}") as stage:
            rootfs.make(base, platform, stage)


def size(files: Iterable[Path]) -> int:
    """Bytes of files together."""
    return sum(path.stat().st_size for path in files)
