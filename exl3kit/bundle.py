"""One file for a site without a network: a tar of images, what they are built from, the kit's own wheels and a model.

    bundle.json       what is in it, with size and sha256 of everything; the last member, since it is known last
    images/*.tar      as `docker save` writes them, by stamp
    cache/...         wheels and root file systems, as they lie in the cache
    kit/...           the wheels of the kit's own environment
    models/NAME/...   a checkpoint

A bundle is written beside its name and renamed, so a broken one never bears the name. Before anything is taken from it,
all of it is read once and held against the hashes; every file is then written beside its place and renamed.
"""

from __future__ import annotations

import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any

from exl3kit import built_image, paths, side_by_side, wheels
from exl3kit.built_image import BuiltImage
from exl3kit.context import Hashing
from exl3kit.errors import ExitCode, KitError
from exl3kit.transfer import CHUNK, SILENT_SECONDS

if TYPE_CHECKING:
    from exl3kit.nodes import Node
    from exl3kit.progress import Progress, Stage

SCHEMA = 1
INDEX = "bundle.json"
KINDS = ("images", "cache", "kit", "models")
PIECE = 1 << 20


@dataclass(frozen=True)
class Member:
    """One file of a bundle."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Bundle:
    """What a bundle says of itself; `images` are stamp, recipe, platform and layers of each image."""

    path: Path
    recipes: tuple[str, ...]
    members: tuple[Member, ...]
    images: tuple[dict[str, Any], ...]

    def of(self, kind: str) -> list[Member]:
        """The members under one folder of it."""
        return [member for member in self.members if member.name.startswith(f"{kind}/")]


# ---- writing ---------------------------------------------------------------------------------------------------------


class Writer:
    """A bundle that is being written: members go in one by one, hashed on their way."""

    def __init__(self, out: IO[bytes], stage: Stage) -> None:
        self._archive = tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT)  # noqa: SIM115 - closed by `finish`
        self._stage = stage
        self.members: list[Member] = []

    def add_file(self, name: str, path: Path) -> None:
        """Add a file of this machine."""
        with path.open("rb") as source:
            self._add(name, path.stat().st_size, source, self._stage)

    def add_stream(self, name: str, pieces: Iterator[bytes], folder: Path) -> None:
        """Add a stream whose length is not known before its end; it waits in `folder` until then."""
        with tempfile.TemporaryFile(dir=folder) as spool:
            for piece in pieces:
                spool.write(piece)
                self._stage.advance(len(piece))
            size = spool.tell()
            spool.seek(0)
            self._add(name, size, spool, None)  # its bytes are counted already

    def finish(self, recipes: Sequence[str], images: Sequence[dict[str, Any]]) -> None:
        """Write the index and the end of the archive."""
        index = {"bundle": SCHEMA, "recipes": list(recipes), "images": list(images)}
        members = [{"name": m.name, "size": m.size, "sha256": m.sha256} for m in self.members]
        text = json.dumps({**index, "members": members}, indent=1).encode()
        with tempfile.TemporaryFile() as spool:
            spool.write(text)
            spool.seek(0)
            self._add(INDEX, len(text), spool, None)
        self._archive.close()

    def _add(self, name: str, size: int, source: IO[bytes], stage: Stage | None) -> None:
        member = tarfile.TarInfo(name)
        member.size, member.mode = size, 0o644
        reader = Hashing(source, stage)
        self._archive.addfile(member, reader)
        self.members.append(Member(name, size, reader.digest))


def image_members(node: Node, built: BuiltImage) -> Iterator[bytes]:
    """What `docker save` writes of an image, under its fixed tag."""
    with node.patient_engine(SILENT_SECONDS) as engine:
        yield from engine.api.get_image(built.tag, chunk_size=CHUNK)


@contextmanager
def beside(path: Path) -> Iterator[IO[bytes]]:
    """A new file that takes the name `path` when the block ends well, and is gone when it does not.

    Raises `KitError` (preflight) when it cannot be written.
    """
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
            try:
                yield file
                file.flush()
                os.fsync(file.fileno())
                Path(file.name).chmod(0o644)
                Path(file.name).replace(path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        raise KitError(
            f"{path} cannot be written",
            why=error.strerror or str(error),
            next_step="choose a folder with room that you may write",
            code=ExitCode.PREFLIGHT,
        ) from error


def kit_wheels(folder: Path) -> Iterator[tuple[str, Path]]:
    """(name, path) of the wheels of the kit's own environment, fetched for this interpreter into `folder`."""
    lines: list[str] = []
    requirements = paths.REPO / "requirements.lock"
    words = ["download", "--no-deps", "--require-hashes", "--only-binary", ":all:", "--dest", str(folder)]
    for _ in wheels.run_pip([*words, "-r", str(requirements)], lines):
        pass
    found = sorted(folder.glob("*.whl"))
    failures = [line for line in lines if line.startswith("ERROR:")]
    if not found or failures:
        raise KitError(
            "the kit's own wheels could not be fetched",
            why=wheels.silence(lines) or next(iter(failures), "pip said nothing"),
            next_step="start again when the network is back, or leave them out with --no-kit",
            code=ExitCode.BUILD,
        )
    return ((f"kit/{path.name}", path) for path in found)


# ---- reading ---------------------------------------------------------------------------------------------------------


def read(path: Path) -> Bundle:
    """The index of a bundle; nothing is checked yet. Raises `KitError` (usage) when it is none, or was cut short."""
    try:
        with tarfile.open(path, "r:") as archive:
            names = archive.getnames()
            if not names or names[-1] != INDEX:
                raise ValueError("its last member is not its index: it was cut short, or is no bundle")
            index = json.load(archive.extractfile(INDEX))  # type: ignore[arg-type]
        if index["bundle"] != SCHEMA:
            raise ValueError(f"schema {index['bundle']!r}, this kit reads {SCHEMA}")
        members = tuple(Member(m["name"], m["size"], m["sha256"]) for m in index["members"])
        for member in members:
            parts = PurePosixPath(member.name).parts
            if parts[0] not in KINDS or ".." in parts:
                raise ValueError(f"a member is called {member.name!r}")
        return Bundle(path, tuple(index["recipes"]), members, tuple(index["images"]))
    except (OSError, tarfile.TarError, ValueError, KeyError, TypeError) as error:
        raise KitError(
            "this is no bundle", where=str(path), why=str(error), next_step="copy the file again, or make it anew"
        ) from error


def verify(bundle: Bundle, stage: Stage) -> None:
    """Read all of it once against the hashes. Raises `KitError` (verification) that names the first wrong member."""
    for member, file in opened(bundle):
        reader = Hashing(file, stage)
        while reader.read(PIECE):
            pass
        if reader.digest != member.sha256:
            raise KitError(
                f"{member.name} is damaged",
                where=str(bundle.path),
                why=f"its sha256 is {reader.digest[:12]}, the bundle says {member.sha256[:12]}",
                next_step="copy the bundle again; nothing was taken from it",
                code=ExitCode.VERIFICATION,
            )


def opened(
    bundle: Bundle, wanted: Callable[[Member], bool] = lambda member: True
) -> Iterator[tuple[Member, IO[bytes]]]:
    """Each wanted member, open for reading, in the order in which they lie there."""
    known = {member.name: member for member in bundle.members}
    with tarfile.open(bundle.path, "r:") as archive:
        for entry in archive:
            member = known.get(entry.name)
            if member is not None and wanted(member) and entry.isreg():
                file = archive.extractfile(entry)
                assert file is not None
                with file:
                    yield member, file


def unpack(bundle: Bundle, kind: str, into: Path, stage: Stage) -> list[Path]:
    """Put the members of one kind below `into`; those that are there with the same content stay. Gives their paths."""
    there = []
    for member, file in opened(bundle, lambda member: member.name.startswith(f"{kind}/")):
        place = into / PurePosixPath(member.name).relative_to(kind)
        there.append(place)
        if place.is_file() and place.stat().st_size == member.size and wheels.digest_of(place) == member.sha256:
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        with beside(place) as out:
            reader = Hashing(file, stage)
            shutil.copyfileobj(reader, out, PIECE)
            if reader.digest != member.sha256:  # the file changed since it was verified
                raise KitError(f"{member.name} is damaged", where=str(bundle.path), code=ExitCode.VERIFICATION)
    return there


def load_image(bundle: Bundle, told: dict[str, Any], node: Node, stage: Stage) -> BuiltImage:
    """Load an image of the bundle into an engine, unless it has it; what arrived is held against the bundle.

    Raises `KitError`: preflight when there is no room, build when the engine refuses it, verification when
    another one arrived.
    """
    from docker.errors import DockerException
    from requests.exceptions import RequestException

    layers = tuple(told["layers"])
    there = built_image.find(node, told["stamp"])
    if there is not None and there.layers == layers:
        return there
    name = f"images/{told['stamp']}.tar"
    size = next(member.size for member in bundle.members if member.name == name)
    if (free := node.free_bytes()) < 2 * size:
        raise node.error(
            f"{(2 * size - free) / 1e9:.2f} GB are missing to load {told['stamp'][:12]}",
            why=f"{free / 1e9:.2f} GB are free; the engine keeps what arrives beside what it unpacks",
            next_step="`docker system df` shows what could go; `kit image prune`",
            code=ExitCode.PREFLIGHT,
        )
    for _, file in opened(bundle, lambda member: member.name == name):
        with node.patient_engine(SILENT_SECONDS) as engine:
            try:
                for message in engine.api.load_image(_pieces(file, stage)):  # type: ignore[no-untyped-call]
                    if "error" in message:
                        raise node.error("the engine refuses the image", why=message["error"], code=ExitCode.BUILD)
            except (DockerException, RequestException, OSError) as error:
                code = ExitCode.BUILD if node.answers() else ExitCode.UNREACHABLE
                raise node.error("loading the image broke off", why=str(error)[:300], code=code) from error
    arrived = built_image.find(node, told["stamp"])
    if arrived is None or arrived.layers != layers:
        raise node.error("what was loaded is another image", why="stamp or layers differ", code=ExitCode.VERIFICATION)
    return arrived


def _pieces(file: IO[bytes], stage: Stage) -> Iterator[bytes]:
    while piece := file.read(PIECE):
        stage.advance(len(piece))
        yield piece


def load_images(bundle: Bundle, nodes: Sequence[Node], progress: Progress) -> list[BuiltImage]:
    """Load every image into the first node that can run it; `image.spread` brings it to the others."""
    from exl3kit import image

    loaded = []
    for told in bundle.images:
        first = nodes[0]
        for node in nodes:
            image.check_platform(node, told["platform"])
        name = f"images/{told['stamp']}.tar"
        size = next((member.size for member in bundle.members if member.name == name), None)
        with progress.stage(f"image {told['stamp'][:12]} to {first.name}", total=size) as stage:
            built = load_image(bundle, told, first, stage)
        for name in told["recipes"]:
            image.spread(built, name, first, nodes, progress=progress)
        loaded.append(built)
    return loaded


def saved_images(nodes: Sequence[Node], stamps: dict[str, list[str]]) -> list[tuple[Node, BuiltImage, list[str]]]:
    """(node, image, recipes) of each stamp. Raises `KitError` (preflight) for one that no node has."""
    found = []
    for stamp, recipes in stamps.items():
        held = side_by_side.run(*(partial(built_image.find, node, stamp) for node in nodes))
        pair = next(((node, one) for node, one in zip(nodes, held, strict=True) if one is not None), None)
        if pair is None:
            raise KitError(
                f"no image of {', '.join(recipes)} with today's stamp {stamp[:12]}",
                where=", ".join(f"node {node.name}" for node in nodes),
                next_step=f"`kit build {recipes[0]}` there first, or leave the images out with --no-images",
                code=ExitCode.PREFLIGHT,
            )
        found.append((*pair, recipes))
    return found
