"""Build contexts: what a builder gets to see, as a tar that is the same for the same inputs.

Every file is read once, checked against the lock while it is read, and written with fixed owner, mode and time. So a
builder's cache keys on content alone, and a file that changes between lock and build stops the build.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tarfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from exl3kit import paths
from exl3kit.errors import ExitCode, KitError

if TYPE_CHECKING:
    from exl3kit.lock import ContextFile, Lock
    from exl3kit.pins import Wheel
    from exl3kit.progress import Stage

INSTALLER = "uv"  # the wheel that installs the others; it stays out of the image
REQUIREMENTS = "requirements.txt"
DOCKERFILE = "Dockerfile"
# Of the kernels: no input of an image that compiles none, so a kernel change leaves the CPU images alone.
SOURCES = "overlay/csrc/"
FILE_TIME = 1_700_000_000  # of every file in every context; builders look at content
_PIECE = 1 << 20


@dataclass(frozen=True)
class Entry:
    """One file of a context: its name there, its content or where that lies, and the sha256 it must have."""

    name: str
    source: Path | bytes
    sha256: str | None = None
    executable: bool = False

    @property
    def size(self) -> int:
        """Its bytes. Raises `KitError` (build) when the file is gone."""
        if isinstance(self.source, bytes):
            return len(self.source)
        try:
            return self.source.stat().st_size
        except FileNotFoundError as error:
            raise self.changed("it went away meanwhile") from error

    def open(self) -> IO[bytes]:
        """Its content, to be read. Raises `KitError` (build) when the file is gone."""
        if isinstance(self.source, bytes):
            return io.BytesIO(self.source)
        try:
            return self.source.open("rb")
        except FileNotFoundError as error:
            raise self.changed("it went away meanwhile") from error

    def changed(self, why: str) -> KitError:
        """What there is to say of a file that is no longer what was locked: somebody works in the checkout."""
        return KitError(
            f"{self.name} is not the file that was locked",
            where="build context",
            why=why,
            next_step="run the same command again",
            code=ExitCode.BUILD,
        )


def requirements(wheels: Sequence[Wheel]) -> str:
    """The wheels of the image as hash-checked requirement lines."""
    return "".join(f"{w.requirement} --hash=sha256:{w.sha256}\n" for w in wheels if w.name != INSTALLER)


def for_environment(lock: Lock, wheels: Sequence[Wheel], house: Path) -> list[Entry]:
    """The context of the Dockerfile's stages up to `environment`, or of `adopted` where the base brings every package.

    No file of the overlay is in it.
    """
    if not wheels:
        vllm = lock.data["vllm"]
        return [
            Entry(DOCKERFILE, adopted_part(_dockerfile(lock)).encode()),
            Entry(REQUIREMENTS, f"{vllm['distribution']}=={vllm['version']}\n".encode()),
        ]
    return [
        Entry(DOCKERFILE, environment_part(_dockerfile(lock)).encode()),
        Entry(REQUIREMENTS, requirements(wheels).encode()),
        *(Entry(f"wheels/{w.filename}", house / str(w.filename), w.sha256) for w in wheels),
    ]


def for_kernels(lock: Lock, wheels: Sequence[Wheel], house: Path, repo: Path = paths.REPO) -> list[Entry]:
    """The context of the Dockerfile's stage `kernels`: their sources, and the wheels of their compiler."""
    pins = json.dumps(lock.data["toolchain"], indent=1, sort_keys=True)
    return [
        Entry(DOCKERFILE, kernels_part(_dockerfile(lock, repo)).encode()),
        Entry("toolchain.json", pins.encode()),
        *(Entry(f"wheels/{w.filename}", house / str(w.filename), w.sha256) for w in wheels),
        *(_locked(f, repo) for f in lock.files if f.path.startswith(SOURCES)),
    ]


def for_image(lock: Lock, repo: Path = paths.REPO) -> list[Entry]:
    """The context of the Dockerfile's last stage: the lock's files, no wheels and no sources of kernels."""
    files = [_locked(f, repo) for f in lock.files if f.path != DOCKERFILE and not f.path.startswith(SOURCES)]
    part = image_part(_dockerfile(lock, repo), kernels=bool(lock.data["arch"]))
    return [Entry(DOCKERFILE, part.encode()), *files]


def _locked(file: ContextFile, repo: Path) -> Entry:
    return Entry(file.path, repo / file.path, file.sha256, file.executable)


# ---- the Dockerfile's parts ------------------------------------------------------------------------------------------
# The classic builder runs every stage before its target, used or not, so each part is a Dockerfile of its own.

_STAGE = re.compile(r"^FROM \S+ AS (\S+)$", re.MULTILINE)


def environment_part(text: str) -> str:
    """The stages up to `environment`."""
    return _part(text, "wheels", "environment")


def adopted_part(text: str) -> str:
    """The stage that makes an environment out of a base with vLLM."""
    return _part(text, "adopted")


def kernels_part(text: str) -> str:
    """The stages that compile the kernels and keep the library alone."""
    return _part(text, "compiled", "kernels")


def image_part(text: str, *, kernels: bool) -> str:
    """The last stage, with the library of the stage `built` or without."""
    if kernels:
        return _part(text, "built", "image")
    return re.sub(r"^COPY --from=built .*\n", "", _part(text, "image"), flags=re.MULTILINE)


def _part(text: str, *names: str) -> str:
    """The Dockerfile's global arguments and some of its stages, without the comments that head the next one."""
    begins = list(_STAGE.finditer(text))
    arguments = [line for line in text[: begins[0].start()].splitlines() if line.startswith("ARG ")]
    ends = [begin.start() for begin in begins[1:]] + [len(text)]
    stages = {begin[1]: text[begin.start() : end] for begin, end in zip(begins, ends, strict=True)}
    kept = [re.sub(r"(\n(#.*)?)+\Z", "\n", stages[name]) for name in names]
    return "\n".join([*arguments, *kept])


def _dockerfile(lock: Lock, repo: Path = paths.REPO) -> str:
    locked = next(f for f in lock.files if f.path == DOCKERFILE)
    content = (repo / DOCKERFILE).read_bytes()
    _check(Entry(DOCKERFILE, content, locked.sha256), hashlib.sha256(content).hexdigest())
    return content.decode()


# ---- the tar ---------------------------------------------------------------------------------------------------------


def write(entries: Sequence[Entry], out: IO[bytes], stage: Stage | None = None) -> None:
    """Write the context as a tar, sorted by name.

    Raises `KitError` (build) when a file is not the locked one, or is gone.
    """
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for entry in sorted(entries, key=lambda entry: entry.name):
            member = tarfile.TarInfo(entry.name)
            member.size, member.mtime = entry.size, FILE_TIME
            member.mode = 0o755 if entry.executable else 0o644
            with entry.open() as source:
                reader = Hashing(source, stage)
                archive.addfile(member, reader)
            _check(entry, reader.digest)


@contextmanager
def streamed(entries: Sequence[Entry], stage: Stage | None = None) -> Iterator[IO[bytes]]:
    """The context's tar as a readable stream, written by a thread; its failure is raised when the block ends."""
    reading, writing = os.pipe()
    failures: list[BaseException] = []

    def fill() -> None:
        with suppress(BrokenPipeError), os.fdopen(writing, "wb", buffering=_PIECE) as out:
            try:
                write(entries, out, stage)
            except BrokenPipeError:
                return  # the builder gave up; it says why
            except BaseException as error:
                failures.append(error)

    filler = threading.Thread(target=fill, name="context", daemon=True)
    filler.start()
    try:
        with os.fdopen(reading, "rb", buffering=_PIECE) as stream:
            yield stream
    finally:
        filler.join()
        if failures:
            raise failures[0]


class Hashing:
    """A file that hashes what is read from it and counts it for the stage."""

    def __init__(self, source: IO[bytes], stage: Stage | None) -> None:
        self._source, self._stage, self._hash = source, stage, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        piece = self._source.read(size)
        self._hash.update(piece)
        if self._stage is not None:
            self._stage.advance(len(piece))
        return piece

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()


def _check(entry: Entry, digest: str) -> None:
    if entry.sha256 is not None and digest != entry.sha256:
        raise entry.changed(f"sha256 {digest[:12]}, locked is {entry.sha256[:12]}: it changed meanwhile")
