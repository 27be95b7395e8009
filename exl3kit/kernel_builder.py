"""The root file system in which kernels are compiled: pinned g++ and Python of Debian, for each pair of machines.

`locks/kernel-builder.json` holds "linux/amd64" and "linux/arm64" (compiling for themselves) and "linux/amd64 for
linux/arm64" (cross), each with the packages that mmdebstrap is asked for and what it then installs.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from exl3kit import paths, rootfs
from exl3kit.errors import ExitCode, KitError
from exl3kit.pins import Rootfs

FILE = paths.LOCKS / "kernel-builder.json"
SCHEMA = 1


def name_of(platform: str, host: str) -> str:
    """The entry for compiling on ``platform`` what runs on ``host`` (Docker's platform names)."""
    return platform if platform == host else f"{platform} for {host}"


def load(platform: str, host: str) -> Rootfs:
    """Its root file system. Raises `KitError` (preflight) when nothing is pinned for that pair."""
    entries = _read()
    name = name_of(platform, host)
    if name not in entries:
        raise KitError(
            f"no builder of kernels is pinned for {name}",
            where=paths.shown(FILE),
            why=f"there are {', '.join(entries)}",
            next_step="build on a node of the image's own platform",
            code=ExitCode.PREFLIGHT,
        )
    return _rootfs(entries[name])


def update() -> None:
    """Look every package version up on the machine's mirrors and write the file anew (5 s for each pair)."""
    entries = {}
    for name, entry in _read().items():
        found = rootfs.resolve(_rootfs(entry), name.partition(" ")[0])
        entries[name] = {**entry, "packages": dict(sorted(found.items()))}
    FILE.write_text(json.dumps({"builder": SCHEMA, "entries": entries}, indent=1) + "\n", encoding="utf-8")


def _read() -> dict[str, dict[str, Any]]:
    try:
        content = json.loads(FILE.read_text(encoding="utf-8"))
        if content["builder"] != SCHEMA:
            raise ValueError(f"schema {content['builder']!r}, this kit reads {SCHEMA}")
        entries: dict[str, dict[str, Any]] = content["entries"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        step = f"git checkout -- {paths.shown(FILE)}"
        raise KitError("the pins of the kernels' builder cannot be read", where=paths.shown(FILE), why=str(error),
                       next_step=step) from error  # fmt: skip
    return entries


def _rootfs(entry: dict[str, Any]) -> Rootfs:
    base = Rootfs(entry["rootfs"], tuple(entry["suites"]), entry["variant"], tuple(entry["include"]), {})
    return replace(base, packages=dict(entry.get("packages", {})))
