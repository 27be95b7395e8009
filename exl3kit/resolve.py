"""`kit lock --update`: look up everything that a pins file names, and settle versions that no longer fit or exist.

Versions stay as they are wherever they can: a pin moves only when its version has vanished or another wheel forbids it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from exl3kit import paths, pins, registry, rootfs, wheels
from exl3kit.errors import ExitCode, KitError
from exl3kit.pins import Pins, Registry, Rootfs, Wheel
from exl3kit.wheels import Found

if TYPE_CHECKING:
    from packaging.requirements import Requirement

    from exl3kit.progress import Progress
    from exl3kit.recipe import Image

ROUNDS = 6  # a new vLLM release settled in 3


@dataclass(frozen=True)
class Updated:
    """The pins as looked up today; `notes` are sentences about what moved or stays unknown."""

    pins: Pins
    notes: list[str]


def update(image: Image, progress: Progress) -> Updated:
    """Look up base and wheels of a recipe's image part. Nothing is written; raises `KitError` when a look-up fails."""
    current = start(image)
    base: Rootfs | Registry
    if isinstance(current.base, Rootfs):
        with progress.stage(f"packages of {current.base.suite}"):
            base = replace(current.base, packages=rootfs.resolve(current.base, current.platform))
    else:
        with progress.stage(f"digest of {current.base.reference}"):
            base = replace(current.base, digest=registry.digest(current.base.reference, current.platform))
    current = replace(current, base=base)
    if not current.wheels:
        return Updated(current, [])
    with progress.stage(f"{len(current.wheels)} wheels"):
        return settle(current)


def start(image: Image) -> Pins:
    """The pins to begin with: the file of this image, else the nearest one of the same base and distribution."""
    wanted = image.platform or pins.host()
    distribution, version = image.vllm_distribution
    name = pins.base_name(image)
    near = [p for p in pins.available() if pins.base_name_of(p) == name]
    near.sort(key=lambda p: (p.distribution == distribution, p.vllm == version, p.platform == wanted), reverse=True)
    if near:
        fits = (distribution, version, wanted)
        path = near[0].path if pins_of(near[0]) == fits else pins.path_for(name, *fits)
        return replace(
            near[0],
            distribution=distribution,
            vllm=version,
            platform=wanted,
            wheels=kept(near[0], distribution, version),
            path=path,
        )
    if isinstance(image.base, str):
        path = pins.path_for(name, distribution, version, wanted)
        return Pins(Registry(name, None), distribution, version, wanted, "", (), path)
    raise KitError(
        f"no pins to start from for {distribution} on {name}",
        where="image",
        why="a root file system needs the list of wheels of its vLLM, and locks/ has none like it",
        next_step=f"copy the nearest file of {paths.shown(paths.LOCKS)}/ and correct it",
        code=ExitCode.PREFLIGHT,
    )


def pins_of(known: Pins) -> tuple[str, str, str]:
    """What a pins file of one base is about: distribution and version of vLLM, and the platform."""
    return known.distribution, known.vllm, known.platform


def kept(near: Pins, distribution: str, version: str) -> tuple[Wheel, ...]:
    """Another image's wheels to begin with; torch belongs to the build of vLLM, as do the versions that it demands."""
    if near.distribution == distribution:
        return tuple(Wheel(w.name, version if w.name == distribution else w.version) for w in near.wheels)
    others = [Wheel(w.name, w.version) for w in near.wheels if w.name not in (near.distribution, "torch")]
    return (Wheel(distribution, version), *others)


def settle(current: Pins) -> Updated:
    """Look up every wheel; move those that vanished or that another wheel forbids, until all agree."""
    locked = {w.name: w.version for w in current.wheels}
    asked = {name: f"{name}=={version}" for name, version in locked.items()}
    found: dict[str, Found] = {}
    for _ in range(ROUNDS):
        found.update(wheels.look_up(current, asked.values()))
        demands = demanded(current, found)
        movable = {*demands, *locked} - {*current.omitted, current.distribution}
        wishes = {name: _wish(name, demands.get(name, [])) for name in movable}
        unfit = [name for name in movable if not _fits(found.get(name), demands.get(name, []))]
        asked = {name: wishes[name] for name in sorted(unfit) if asked.get(name) != wishes[name]}
        if not asked:
            break
    chosen = tuple(
        found[name].wheel if name in found else Wheel(name, locked[name]) for name in sorted({*locked, *found})
    )
    return Updated(replace(current, wheels=chosen), _notes(locked, found, demanded(current, found), current))


def demanded(current: Pins, found: Mapping[str, Found]) -> dict[str, list[Requirement]]:
    """What the wheels require of each other in the image: name -> requirements, extras followed."""
    from packaging.requirements import Requirement

    environment = _environment(current)
    demands: dict[str, list[Requirement]] = {}
    queue = [(name, "") for name in found]
    seen = set(queue)
    while queue:
        name, extra = queue.pop()
        for text in found[name].requires if name in found else ():
            requirement = Requirement(text)
            if requirement.marker is not None and not requirement.marker.evaluate({**environment, "extra": extra}):
                continue
            target = wheels.normal(requirement.name)
            if requirement not in demands.setdefault(target, []):
                demands[target].append(requirement)
            for wanted in requirement.extras:
                if (target, wanted) not in seen:
                    seen.add((target, wanted))
                    queue.append((target, wanted))
    return demands


def _environment(current: Pins) -> dict[str, str]:
    machine = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}[current.platform]
    return {
        "implementation_name": "cpython",
        "implementation_version": f"{current.python}.0",
        "os_name": "posix",
        "platform_machine": machine,
        "platform_python_implementation": "CPython",
        "platform_release": "",
        "platform_system": "Linux",
        "platform_version": "",
        "python_full_version": f"{current.python}.0",
        "python_version": current.python,
        "sys_platform": "linux",
    }


def _fits(found: Found | None, demand: list[Requirement]) -> bool:
    return found is not None and all(r.specifier.contains(found.wheel.version, prereleases=True) for r in demand)


def _wish(name: str, demand: list[Requirement]) -> str:
    """One requirement that all the others allow, such as `numpy<2.4,>=2`."""
    return name + ",".join(sorted({str(spec) for requirement in demand for spec in requirement.specifier}))


def _notes(
    locked: Mapping[str, str], found: Mapping[str, Found], demands: Mapping[str, list[Requirement]], current: Pins
) -> list[str]:
    notes = []
    for name in sorted({*locked, *found, *demands} - set(current.omitted)):
        if name not in found:
            notes.append(f"{name} {locked.get(name, '')} is not offered here: its pin stays unset".replace("  ", " "))
        elif name not in locked:
            notes.append(f"{name} {found[name].wheel.version} is new: another wheel requires it")
        elif found[name].wheel.version != locked[name]:
            notes.append(f"{name} moved from {locked[name]} to {found[name].wheel.version}")
        if name in found and not _fits(found[name], demands.get(name, [])):
            wanted = ", ".join(sorted(str(r) for r in demands[name]))
            notes.append(f"{name} {found[name].wheel.version} does not satisfy: {wanted}")
    return notes
