"""Lock: everything that goes into an image, by content. Its sha256 is the stamp of the image.

In the lock: the base (Debian package versions, or the digest of a registry image), every wheel, every file of the
build context, the build arguments, and what the fat symbols are compiled for. Not in it: models, serve settings, tests,
docs, the kit.

Nothing of the machine gets in: paths are relative to the repository, order is fixed, times, owners and group or other
permission bits are not looked at. So the same tree gives the same stamp in another folder, checkout, umask or year.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from exl3kit import context, kernel_builder, paths, pins, rootfs
from exl3kit.errors import ExitCode, KitError
from exl3kit.faults import printable

if TYPE_CHECKING:
    from exl3kit.recipe import Image, Recipe

SCHEMA = 1

# The build context is what these lists let in and nothing else: a new kind of file is invisible until it is added here.
SUFFIXES = frozenset(
    {".py", ".pyi", ".cu", ".cuh", ".h", ".hpp", ".cpp", ".map"}
    | {".toml", ".yaml", ".json", ".txt", ".j2", ".diff", ".patch", ".sh"}
)
NAMES = frozenset({"Dockerfile", "py.typed", "Makefile"})
SKIPPED_FOLDERS = frozenset({"__pycache__", "tests", "build", "dist", "node_modules"})


class ContextFile(NamedTuple):
    """One file of the build context: repo-relative POSIX path, the owner's executable bit, sha256 of the bytes."""

    path: str
    executable: bool
    sha256: str


@dataclass(frozen=True)
class Lock:
    """The lock of one recipe's image; `data` holds only JSON types."""

    data: dict[str, Any]

    def canonical(self) -> bytes:
        """The one spelling that is hashed: UTF-8, keys sorted, no spaces."""
        return canonical(self.data)

    @cached_property
    def stamp(self) -> str:
        """64 hex digits that name the image."""
        return hashlib.sha256(self.canonical()).hexdigest()

    @property
    def short(self) -> str:
        """The first 12 digits of the stamp, used in tags."""
        return self.stamp[:12]

    @property
    def tag(self) -> str:
        return f"exl3kit:{self.short}"

    @property
    def files(self) -> list[ContextFile]:
        """The build context, sorted by path."""
        return [ContextFile(f["path"], f["executable"], f["sha256"]) for f in self.data["files"]]


def canonical(data: Mapping[str, Any]) -> bytes:
    """Canonical JSON of a lock."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def make_lock(recipe: Recipe, *, repo: Path = paths.REPO) -> Lock:
    """The lock of a recipe.

    Raises `KitError` (preflight) when a pin is unknown, or when the build context holds something that cannot be built
    the same way everywhere (a symbolic link, Windows line endings).
    """
    image = recipe.image
    pinned = pins.load(image)
    pinned = pinned.with_digest_of(image)
    pinned.require_complete(recipe.name)
    data = pinned.as_dict()
    del data["pins"], data["omitted"]
    data.update(
        lock=SCHEMA,
        arch=sorted_arch(image),
        rates=sorted(image.rates),
        codebooks=sorted(str(name) for name in image.codebooks),
        build_args=build_args(image),
        files=[f._asdict() for f in context_files(repo) if image.arch or not f.path.startswith(context.SOURCES)],
    )
    if isinstance(pinned.base, pins.Rootfs):
        # How the kit makes it counts as well as what is in it: a change there gives another root file system.
        data["base"]["made"] = rootfs.key(pinned.base, pinned.platform)
    if image.arch:
        data["toolchain"] = toolchain()
        builder = kernel_builder.load(pinned.platform, pinned.platform)
        data["builder"] = {"packages": dict(builder.packages), "made": rootfs.key(builder, pinned.platform)}
    return Lock(data)


def toolchain() -> dict[str, Any]:
    """The pins of the compiler that the fat symbols are built with (`locks/cuda-*-toolchain.json`)."""
    files = sorted(paths.LOCKS.glob("cuda-*-toolchain.json"))
    if len(files) != 1:
        raise KitError(
            f"{len(files)} toolchain locks, one is needed",
            where=paths.shown(paths.LOCKS),
            next_step="git checkout -- locks",
            code=ExitCode.PREFLIGHT,
        )
    content: dict[str, Any] = json.loads(files[0].read_text(encoding="utf-8"))
    return content


def sorted_arch(image: Image) -> list[str]:
    """Compute capabilities in order, so that two spellings of one image share a stamp."""
    return sorted(image.arch, key=lambda capability: tuple(map(int, capability.split("."))))


def build_args(image: Image) -> dict[str, str]:
    """The `--build-arg`s of the Dockerfile; lists are joined by semicolons, as CUDA's own tools write them."""
    return {
        "EXL3_ARCH": ";".join(sorted_arch(image)),
        "EXL3_RATES": ";".join(str(rate) for rate in sorted(image.rates)),
        "EXL3_CODEBOOKS": ";".join(sorted(str(name) for name in image.codebooks)),
    }


def context_files(repo: Path = paths.REPO) -> list[ContextFile]:
    """Every file a build may see, sorted by path. What git does not track counts too, since it would be built.

    Where every file is executable the file system keeps no modes (FAT, some network mounts), and none counts as such.
    """
    found = sorted(_walk(repo), key=lambda item: item[0])
    modeless = len(found) > 1 and all(executable for _, executable in found)
    return [
        ContextFile(name, executable and not modeless, hashlib.sha256(_content(repo, name)).hexdigest())
        for name, executable in found
    ]


def _walk(repo: Path) -> Iterator[tuple[str, bool]]:
    """(repo-relative POSIX path, owner may execute) of each file that the allow-list lets in, in no order."""
    yield _entry(repo, repo / "Dockerfile")
    for folder, below, names in os.walk(repo / "overlay", onerror=_unreadable):
        below[:] = [name for name in below if _wanted_folder(name)]
        for name in below:
            if (Path(folder) / name).is_symlink():
                _entry(repo, Path(folder) / name)
        for name in names:
            if not name.startswith(".") and (name in NAMES or PurePosixPath(name).suffix in SUFFIXES):
                yield _entry(repo, Path(folder) / name)


def _unreadable(error: OSError) -> None:
    """Refuse what cannot be looked at: passed over, it would give the stamp of a smaller tree."""
    raise KitError(
        "part of the build context cannot be read",
        where=printable(paths.shown(Path(error.filename))),
        why=error.strerror,
        next_step="git status; git checkout -- Dockerfile overlay   (or give yourself the right to read it)",
        code=ExitCode.PREFLIGHT,
    ) from error


def _wanted_folder(name: str) -> bool:
    return name not in SKIPPED_FOLDERS and not name.startswith(".") and not name.endswith(".egg-info")


def _entry(repo: Path, path: Path) -> tuple[str, bool]:
    name = path.relative_to(repo).as_posix()
    if not name.isprintable():
        raise KitError(
            "a file name of the build context holds a character that cannot be shown",
            where=printable(name),
            next_step="rename the file, or remove it",
            code=ExitCode.PREFLIGHT,
        )
    try:
        mode = path.lstat().st_mode
    except OSError as error:
        _unreadable(error)
        raise
    if not stat.S_ISREG(mode):
        kind = "a symbolic link" if stat.S_ISLNK(mode) else "not a regular file"
        raise KitError(
            f"{kind} in the build context",
            where=name,
            why="archives turn it into something else, so the image would depend on how the tree was copied",
            next_step=f"put a real file at {name}, or remove it",
            code=ExitCode.PREFLIGHT,
        )
    return name, bool(mode & stat.S_IXUSR)


def _content(repo: Path, name: str) -> bytes:
    try:
        content = (repo / name).read_bytes()
    except OSError as error:
        _unreadable(error)
        raise
    if b"\r\n" in content:
        raise KitError(
            "Windows line endings (CRLF) in the build context",
            where=name,
            why="patches and scripts break with them inside the image, and the stamp would be another",
            next_step=f"sed -i 's/\\r$//' {name}   (a git checkout does this by itself: .gitattributes)",
            code=ExitCode.PREFLIGHT,
        )
    return content


# ---- what changed between two locks ----------------------------------------------------------------------------------


def explain(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Sentences, one for each input that differs between two locks' data; empty when the stamps are equal."""
    told = [*_files(old, new), *_wheels(old, new), *_base(old, new)]
    for key in sorted({*old, *new} - {"files", "wheels", "base"}):
        if old.get(key) != new.get(key):
            told.append(f"{key} changed from {_brief(old.get(key))} to {_brief(new.get(key))}")
    return told


def _files(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    before = {f["path"]: f for f in old.get("files", [])}
    after = {f["path"]: f for f in new.get("files", [])}
    told = []
    for path in sorted({*before, *after}):
        if path not in before:
            told.append(f"{path} added")
        elif path not in after:
            told.append(f"{path} removed")
        else:
            if before[path]["sha256"] != after[path]["sha256"]:
                told.append(f"{path} changed")
            if before[path]["executable"] != after[path]["executable"]:
                told.append(f"{path} {'became' if after[path]['executable'] else 'is no longer'} executable")
    return told


def _wheels(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    before = {w["name"]: w for w in old.get("wheels", [])}
    after = {w["name"]: w for w in new.get("wheels", [])}
    told = []
    for name in sorted({*before, *after}):
        if name not in before:
            told.append(f"wheel {name} {after[name]['version']} added")
        elif name not in after:
            told.append(f"wheel {name} removed")
        elif before[name]["version"] != after[name]["version"]:
            told.append(f"wheel {name} changed from {before[name]['version']} to {after[name]['version']}")
        elif before[name] != after[name]:
            told.append(f"wheel {name} {after[name]['version']} is another file")
    return told


def _base(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    before, after = dict(old.get("base", {})), dict(new.get("base", {}))
    packages_before, packages_after = before.pop("packages", {}), after.pop("packages", {})
    made_before, made_after = before.pop("made", None), after.pop("made", None)
    if before != after:
        return [f"base changed from {_brief(before)} to {_brief(after)}"]
    told = []
    for name in sorted({*packages_before, *packages_after}):
        was, now = packages_before.get(name), packages_after.get(name)
        if was != now:
            told.append(f"Debian package {name} changed from {was or 'absent'} to {now or 'absent'}")
    if made_before != made_after and not told:
        told.append("the way the kit makes the root file system changed")
    return told


def _brief(value: object) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 120 else f"{text[:117]}..."


# ---- locks seen before, so that a stamp can be explained -------------------------------------------------------------


def remember(lock: Lock) -> None:
    """Keep the lock in the cache under its stamp. A cache that cannot be written costs only the later explanation."""
    try:
        beside = paths.cache_dir("locks") / f"{lock.stamp}.{os.getpid()}"
        beside.write_bytes(lock.canonical())
        beside.replace(paths.cache_dir("locks") / f"{lock.stamp}.json")
    except (OSError, KitError):
        return


def recall(reference: str) -> dict[str, Any]:
    """The data of an older lock: a file holding it, or a stamp (12 digits or more) that this machine has seen.

    Raises `KitError` (usage) when there is none, or the file is not a lock.
    """
    name = reference.removeprefix("exl3kit:")
    if re.fullmatch(r"[0-9a-f]{12,64}", name):
        for path in sorted(paths.cache_dir("locks").glob(f"{name}*.json")):
            return _read(path, reference)
    if Path(reference).is_file():
        return _read(Path(reference), reference)
    raise KitError(
        "no lock to compare with",
        where=reference,
        why="it is neither a file nor a stamp that this machine has seen",
        next_step="give a file made by `kit lock RECIPE --json > FILE`, or the stamp of an earlier `kit build`",
    )


def _read(path: Path, reference: str) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise KitError("this lock cannot be read", where=reference, why=str(error)) from error
    no_lock = KitError("this is not a lock", where=reference, next_step="make one with `kit lock RECIPE --json > FILE`")
    if not isinstance(data, dict) or data.get("lock") != SCHEMA:
        raise no_lock
    try:
        explain(data, data)
    except (AttributeError, KeyError, TypeError, ValueError):  # parts of it have the wrong shape
        raise no_lock from None
    return data
