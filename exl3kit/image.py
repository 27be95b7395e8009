"""The image of a recipe on one engine: found by its stamp, or built there.

Three images on top of each other, so that a change costs what it must: `exl3kit-base` (Debian packages, or the
registry's image), `exl3kit-env` (every wheel, 2 GB) and `exl3kit` (what this repository adds, seconds); beside them
`exl3kit-kernels` (the library for the recipe's GPUs, where it names any). Each is named by what it is made of, so
nothing depends on a builder's cache.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exl3kit import (
    builders,
    context,
    kernel_image,
    offline,
    paths,
    pins,
    rootfs,
    side_by_side,
    symbols,
    transfer,
    wheels,
)
from exl3kit import lock as locks
from exl3kit.built_image import ENVIRONMENT, LOCK, MADE_FROM, PREVIOUS, REPOSITORY, STAMP, BuiltImage, described, find
from exl3kit.errors import ExitCode, KitError

if TYPE_CHECKING:
    from exl3kit.lock import Lock
    from exl3kit.nodes import Node
    from exl3kit.progress import Progress
    from exl3kit.recipe import Recipe

BASE = "io.exl3kit.base"
MACHINES = {"x86_64": "linux/amd64", "amd64": "linux/amd64", "aarch64": "linux/arm64", "arm64": "linux/arm64"}

# Unpacked wheels are 4.5 times their size, and a build holds them twice (installing, and copied) beside the context.
ROOM_PER_WHEEL_BYTE = 12
ROOM_FOR_THE_REST = 500_000_000
WHEELS_AT_LEAST = 400_000_000  # bytes that wheels have where all of vLLM comes from them; the demo's are 458 MB


def ensure(
    recipe: Recipe,
    lock: Lock,
    nodes: Sequence[Node],
    *,
    progress: Progress,
    cache: bool = True,
    builder: str | None = None,
) -> BuiltImage:
    """The recipe's image, the same on every node: built on the first unless some node has it, then copied.

    Two builds of one stamp may differ in the times of their files, so a node whose layers differ gets a copy too.
    `builder` names another node than the first to build on; without `cache` it is built there, whoever has it. Raises
    `KitError` as `build` and `transfer.spread` do.
    """
    first = next((node for node in nodes if node.name == builder), nodes[0])
    there = side_by_side.run(*(partial(find, node, lock.stamp) for node in nodes)) if cache else [None] * len(nodes)
    source = next((node for node, image in zip(nodes, there, strict=True) if image is not None), first)
    built = build(recipe, lock, source, progress=progress, cache=cache)
    spread(built, recipe.name, source, nodes, progress=progress)
    return built


def spread(built: BuiltImage, name: str, source: Node, nodes: Sequence[Node], *, progress: Progress) -> None:
    """Bring an image of one node to all of them, and only then let the moving tag of the recipe `name` lead to it."""
    there = side_by_side.run(*(partial(find, node, built.stamp) for node in nodes))
    pairs = zip(nodes, there, strict=True)
    lacking = [node for node, image in pairs if image is None or not image.same_content(built)]
    for node in lacking:
        check_platform(node, built.platform)
    if lacking:
        transfer.spread(source, lacking, built, progress=progress)
    for node in nodes:
        _move_tag(node, built, name)


def changes(node: Node, recipe: Recipe, lock: Lock) -> list[str] | None:
    """Which inputs changed since the recipe's newest image on the node; None when it has none there."""
    from docker.errors import ImageNotFound

    try:
        labels = node.engine.images.get(f"exl3kit:{recipe.name}").labels
    except ImageNotFound:
        return None
    if labels.get(STAMP) == lock.stamp or LOCK not in labels:
        return []
    return locks.explain(json.loads(labels[LOCK]), lock.data)


def build(recipe: Recipe, lock: Lock, node: Node, *, progress: Progress, cache: bool = True) -> BuiltImage:
    """The recipe's image on the node: what is there already is kept, the rest is built.

    Raises `KitError`: preflight when it cannot be built there, build when a step fails, verification when the result
    is not what was locked.
    """
    if cache and (there := find(node, lock.stamp)):
        progress.skip("image", f"{there.tag} is there already on {node.name}")
        return there
    pinned = pins.load(recipe.image).with_digest_of(recipe.image)
    check_platform(node, pinned.platform)
    wanted = kernel_image.Stage(lock, pinned.platform, pinned.platform) if lock.data["arch"] else None
    environment = _find_environment(node, lock, pinned) if cache else None
    if environment is None:
        _check_room(node, room_foreseen(pinned))
    if wanted is not None:
        kernel_image.check_room(wanted, node, cache=cache)
    if environment is None:
        environment = _build_environment(lock, pinned, node, progress, cache)
    kernels = kernel_image.ensure(wanted, node, progress, cache=cache) if wanted is not None else None
    with progress.stage("image") as stage:
        builders.build(_image_request(lock, environment, kernels, cache), node, stage, progress)
        built = verify(node, lock)
        stage.conclude(f"{built.tag}, {built.size / 1e9:.2f} GB")
    return built


def check_platform(node: Node, platform: str) -> None:
    """Raise `KitError` (preflight) unless the node's engine runs images of this platform natively."""
    machine = str(node.engine.info()["Architecture"])
    if MACHINES.get(machine, machine) != platform:
        raise node.error(
            f"the image is for {platform} and this engine runs on {machine}",
            next_step="build on a node of that platform: `kit build RECIPE --node NAME`",
            code=ExitCode.PREFLIGHT,
        )


def verify(node: Node, lock: Lock) -> BuiltImage:
    """The freshly made image, if it is what was locked; otherwise it is removed again and `KitError` says why."""
    image = node.engine.images.get(lock.tag)
    labels = image.labels
    wrong = []
    if labels.get(STAMP) != lock.stamp:
        wrong.append(f"its stamp label is {labels.get(STAMP, 'missing')}")
    if locks.canonical(json.loads(labels.get(LOCK) or "null") or {}) != lock.canonical():
        wrong.append("its lock label is not the lock")
    if (user := image.attrs["Config"].get("User") or "root").split(":")[0] in ("root", "0"):
        wrong.append(f"it runs as {user}")
    if wrong:
        node.engine.images.remove(lock.tag)
        raise node.error("the built image is not what was locked", why=", ".join(wrong), code=ExitCode.VERIFICATION)
    return described(image, lock.tag)


def _move_tag(node: Node, built: BuiltImage, name: str) -> None:
    """Let `exl3kit:NAME` lead to the image, and `exl3kit:NAME.previous` to the one that it led to before."""
    image = node.engine.images.get(built.tag)
    if f"{REPOSITORY}:{name}" in image.tags:
        return
    before = node.engine.images.list(name=f"{REPOSITORY}:{name}")
    if before:
        before[0].tag(REPOSITORY, f"{name}{PREVIOUS}")
    image.tag(REPOSITORY, name)


# ---- requests --------------------------------------------------------------------------------------------------------


def _image_request(lock: Lock, environment: str, kernels: str | None, cache: bool) -> builders.Request:
    args = {**lock.data["build_args"], "ENVIRONMENT": environment, "BASE": "scratch"}
    made_from = {}
    if kernels is not None:
        args["KERNELS"] = made_from[MADE_FROM] = kernels
    return builders.Request(lock.tag, args, labels(lock) | made_from, context.for_image(lock), cache)


def labels(lock: Lock) -> dict[str, str]:
    """What the image says of itself; nothing of the machine or the hour that built it."""
    vllm = lock.data["vllm"]
    kernels = {symbols.KERNELS_LABEL: f"{kernel_image.FOLDER}/{symbols.LIBRARY}"} if lock.data["arch"] else {}
    return {
        **kernels,
        STAMP: lock.stamp,
        LOCK: lock.canonical().decode(),
        "org.opencontainers.image.title": REPOSITORY,
        "org.opencontainers.image.description": "vLLM with the EXL3 plugin",
        "org.opencontainers.image.version": lock.short,
        "org.opencontainers.image.licenses": "Apache-2.0",
        "org.opencontainers.image.base.name": _base_name(lock.data["base"]),
        "io.exl3kit.vllm": f"{vllm['distribution']} {vllm['version']}",
    }


def _base_name(base: dict[str, Any]) -> str:
    return f"{base['image']}@{base['digest']}" if "image" in base else f"debian-rootfs:{base['rootfs']}"


# ---- environment -----------------------------------------------------------------------------------------------------


def environment_key(lock: Lock, pinned: pins.Pins) -> str:
    """64 hex digits over everything that decides the environment image, the Dockerfile's first half included."""
    entries = context.for_environment(lock, pinned.wheels, paths.wheelhouse())
    named = [[entry.name, entry.sha256 or hashlib.sha256(bytes(_inline(entry))).hexdigest()] for entry in entries]
    fields = [named, base_key(pinned)]
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()


def _inline(entry: context.Entry) -> bytes:
    assert isinstance(entry.source, bytes)
    return entry.source


def _environment_tag(key: str) -> str:
    return f"exl3kit-env:{key[:12]}"


def _find_environment(node: Node, lock: Lock, pinned: pins.Pins) -> str | None:
    key = environment_key(lock, pinned)
    return _environment_tag(key) if _has(node, _environment_tag(key), ENVIRONMENT, key) else None


def _has(node: Node, tag: str, label: str, value: str) -> bool:
    from docker.errors import ImageNotFound

    try:
        return node.engine.images.get(tag).labels.get(label) == value
    except ImageNotFound:
        return False


def _build_environment(lock: Lock, pinned: pins.Pins, node: Node, progress: Progress, cache: bool) -> str:
    """Base and wheels are fetched side by side, then the environment is built from them; gives its tag."""
    base, house = side_by_side.run(
        lambda: _base(pinned, node, progress), lambda: _wheels(pinned, progress), say=progress.tell
    )
    entries = context.for_environment(lock, pinned.wheels, Path(house))
    _check_room(node, ROOM_PER_WHEEL_BYTE * sum(entry.size for entry in entries) + ROOM_FOR_THE_REST)
    key = environment_key(lock, pinned)
    request = builders.Request(_environment_tag(key), {"BASE": base}, {ENVIRONMENT: key}, entries, cache)
    with progress.stage("environment") as stage:
        builders.build(request, node, stage, progress)
    return request.tag


def room_foreseen(pinned: pins.Pins) -> int:
    """Bytes that building the environment needs at least, by what is here before anything is fetched."""
    house = paths.wheelhouse()
    named = {wheel.filename for wheel in pinned.wheels}
    here = sum(file.stat().st_size for file in house.iterdir() if file.name in named)
    least = WHEELS_AT_LEAST if isinstance(pinned.base, pins.Rootfs) else 0
    return ROOM_PER_WHEEL_BYTE * max(here, least) + ROOM_FOR_THE_REST


def _wheels(pinned: pins.Pins, progress: Progress) -> str:
    with progress.stage("wheels") as stage:
        folder = wheels.fetch(pinned, stage)
        stage.conclude(f"{len(pinned.wheels)} wheels")
    return str(folder)


def _check_room(node: Node, needed: int) -> None:
    free = node.free_bytes()
    if free < needed:
        raise node.error(
            f"the build needs {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free",
            why="the disk of the engine's data",
            next_step="`docker system df` shows what could go",
            code=ExitCode.PREFLIGHT,
        )


# ---- base ------------------------------------------------------------------------------------------------------------


def base_key(pinned: pins.Pins) -> str:
    """64 hex digits that name the base's content."""
    if isinstance(pinned.base, pins.Rootfs):
        return rootfs.key(pinned.base, pinned.platform)
    return str(pinned.base.digest).removeprefix("sha256:")


def _base(pinned: pins.Pins, node: Node, progress: Progress) -> str:
    """The base under a local tag, so that a build never asks a registry; gives the tag."""
    key = base_key(pinned)
    tag = f"exl3kit-base:{key[:12]}"
    if isinstance(pinned.base, pins.Rootfs):
        if _has(node, tag, BASE, key):
            progress.skip("base", f"{tag} is there already")
        else:
            _import_rootfs(pinned.base, pinned.platform, node, tag, key, progress)
    elif not _is_there(node, tag):
        _pull(pinned.base, pinned.platform, node, tag, progress)
    return tag


def _import_rootfs(base: pins.Rootfs, platform: str, node: Node, tag: str, key: str, progress: Progress) -> None:
    with progress.stage("rootfs") as stage:
        tar = rootfs.make(base, platform, stage)
    repository, _, version = tag.partition(":")
    with progress.stage("base") as stage, node.patient_engine(600) as engine:
        changes = [f"LABEL {BASE}={key}"]
        engine.api.import_image_from_file(str(tar), repository=repository, tag=version, changes=changes)
        if not _has(node, tag, BASE, key):
            raise node.error("the engine did not import the root file system", code=ExitCode.BUILD)
        stage.conclude(tag)


def _is_there(node: Node, tag: str) -> bool:
    from docker.errors import ImageNotFound

    try:
        node.engine.images.get(tag)
    except ImageNotFound:
        return False
    return True


def _pull(base: pins.Registry, platform: str, node: Node, tag: str, progress: Progress) -> None:
    from docker.errors import APIError

    carried = "build once while the node reaches its registry, or `kit bundle load FILE --nodes ...` of a built image"
    offline.refuse([f"the base image {base.reference}"], carried)
    repository = base.reference.rpartition(":")[0] if ":" in base.reference.rpartition("/")[2] else base.reference
    with progress.stage("base") as stage, node.patient_engine(3600) as engine:
        stage.say(f"pulling {repository}@{base.digest}")
        try:
            image = engine.images.pull(f"{repository}@{base.digest}", platform=platform)
        except APIError as error:
            raise KitError(
                f"the base image {base.reference} cannot be pulled",
                where=f"node {node.name}",
                why=error.explanation or str(error),
                next_step="check the node's network and `docker login` there",
                code=ExitCode.BUILD,
            ) from error
        image.tag(*tag.split(":"))
        stage.conclude(tag)
