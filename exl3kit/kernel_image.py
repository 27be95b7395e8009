"""The kernels of a recipe's image, compiled on the engine into an image of their own that holds just the library.

It is named by what goes into the library, so a change of Python in the overlay, of a wheel or of the base compiles
nothing. nvcc comes from locked wheels and g++ from a root file system of pinned Debian packages; the build has no
network, and needs no GPU and no driver.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exl3kit import builders, context, kernel_builder, offline, paths, rootfs, symbols, wheels
from exl3kit.built_image import MADE_FROM
from exl3kit.errors import ExitCode
from exl3kit.pins import Rootfs, Wheel

if TYPE_CHECKING:
    from exl3kit.lock import Lock
    from exl3kit.nodes import Node
    from exl3kit.progress import Progress

KEY = "io.exl3kit.kernels.key"
MACHINES = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}
FOLDER = "/opt/exl3/kernels"  # in the image of a recipe
ROOM = 3_000_000_000  # the builder 0.5 GB, its wheels and the compiler 0.5 GB, each held twice while it builds


@dataclass(frozen=True)
class Stage:
    """What is compiled where: ``platform`` is the engine's, ``host`` that of the image that will hold the library."""

    lock: Lock
    platform: str
    host: str

    @property
    def builder(self) -> Rootfs:
        return kernel_builder.load(self.platform, self.host)

    @property
    def wheels(self) -> list[Wheel]:
        """Compiler, readers and runtime for the builder, the runtime of another host, torch's headers."""
        machine, host = MACHINES[self.platform], MACHINES[self.host]
        found = [
            wheel
            for wheel in self.lock.data["toolchain"]["wheels"]
            if wheel["machine"] == machine or (wheel["machine"] == host and wheel["role"] == "host")
        ]
        return [
            Wheel(wheel["name"], wheel["version"], wheel["filename"], wheel["sha256"])
            for wheel in [*found, self.lock.data["toolchain"]["torch_headers"]]
        ]

    def entries(self, house: Path) -> list[context.Entry]:
        return context.for_kernels(self.lock, self.wheels, house)

    @property
    def args(self) -> dict[str, str]:
        return {**self.lock.data["build_args"], "EXL3_HOST": MACHINES[self.host]}

    @property
    def key(self) -> str:
        """64 hex digits over everything that decides the library."""
        named = [[e.name, e.sha256 or hashlib.sha256(_inline(e)).hexdigest()] for e in self.entries(paths.wheelhouse())]
        fields = [named, sorted(self.args.items()), rootfs.key(self.builder, self.platform)]
        return hashlib.sha256(json.dumps(fields).encode()).hexdigest()

    @property
    def tag(self) -> str:
        return f"exl3kit-kernels:{self.key[:12]}"

    @property
    def need(self) -> symbols.Need:
        """What the library is held against before its image stays."""
        data = self.lock.data
        rates, books = tuple(map(float, data["rates"])), tuple(data["codebooks"])
        return symbols.Need(tuple(data["arch"]), rates, books, host=MACHINES[self.host])


def _inline(entry: context.Entry) -> bytes:
    assert isinstance(entry.source, bytes)
    return entry.source


def fetch(stage: Stage, progress: Progress) -> Path:
    """Have the compiler's wheels in the wheelhouse; gives its folder. Raises `KitError` (build)."""
    house = paths.wheelhouse()
    offline.refuse([f"the wheel {wheel.requirement}" for wheel in stage.wheels if not wheels.intact(house, wheel)])
    with progress.stage("compiler") as told:
        words = ["wheels", "--lock", str(symbols.LOCK), "--into", str(paths.wheelhouse())]
        words += ["--machine", MACHINES[stage.platform], "--host", MACHINES[stage.host]]
        symbols.run_build(words, progress)
        told.conclude(f"{len(stage.wheels)} wheels")
    return paths.wheelhouse()


def ensure(stage: Stage, node: Node, progress: Progress, *, cache: bool = True) -> str:
    """The image with the kernels on ``node``, made unless it is there; gives its tag.

    Raises `KitError`: preflight when there is no room or no builder, build when a step fails (a kernel that spills is
    named), verification when the library is not what was asked for.
    """
    if cache and has(node, stage.tag, KEY, stage.key):
        progress.skip("kernels", f"{stage.tag} is there already")
        return stage.tag
    house = fetch(stage, progress)
    builder = _ensure_builder(stage, node, progress)
    check_room(stage, node, cache=cache)
    labels = {KEY: stage.key, symbols.KERNELS_LABEL: f"/{symbols.LIBRARY}", MADE_FROM: builder}
    request = builders.Request(stage.tag, {**stage.args, "BUILDER": builder}, labels, stage.entries(house), cache)
    with progress.stage("kernels") as told:
        builders.build(request, node, told, progress)
        _verify(stage, node, progress)
        told.conclude(stage.tag)
    return stage.tag


def has(node: Node, tag: str, label: str, value: str) -> bool:
    """Whether ``node`` has an image of that tag which says so of itself."""
    from docker.errors import ImageNotFound

    try:
        return node.engine.images.get(tag).labels.get(label) == value
    except ImageNotFound:
        return False


def check_room(stage: Stage, node: Node, *, cache: bool = True) -> None:
    """Raise `KitError` (preflight) unless the kernels are on the node, or there is room to compile them."""
    free = node.free_bytes()
    if free < ROOM and not (cache and has(node, stage.tag, KEY, stage.key)):
        raise node.error(
            f"compiling the kernels needs {ROOM / 1e9:.0f} GB and {free / 1e9:.1f} GB are free",
            why="the disk of the engine's data",
            next_step="`docker system df` shows what could go",
            code=ExitCode.PREFLIGHT,
        )


def _ensure_builder(stage: Stage, node: Node, progress: Progress) -> str:
    key = rootfs.key(stage.builder, stage.platform)
    tag = f"exl3kit-builder:{key[:12]}"
    if has(node, tag, KEY, key):
        progress.skip("builder", f"{tag} is there already")
        return tag
    with progress.stage("builder's rootfs") as told:
        tar = rootfs.make(stage.builder, stage.platform, told)
    repository, _, version = tag.partition(":")
    with progress.stage("builder") as told, node.patient_engine(600) as engine:
        engine.api.import_image_from_file(str(tar), repository=repository, tag=version, changes=[f"LABEL {KEY}={key}"])
        if not has(node, tag, KEY, key):
            raise node.error("the engine did not import the builder's root file system", code=ExitCode.BUILD)
        told.conclude(tag)
    return tag


def _verify(stage: Stage, node: Node, progress: Progress) -> None:
    with symbols.from_image(node.engine, stage.tag) as library:
        report: dict[str, Any] = symbols.verify(library, stage.need, progress)
    if not report["ok"]:
        node.engine.images.remove(stage.tag)
        faults: Sequence[str] = report["errors"]
        what = "the compiled kernels are not what was asked for"
        raise node.error(what, why="; ".join(faults), code=ExitCode.VERIFICATION)
