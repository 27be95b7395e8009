"""Container registries: which digest a tag stands for today. buildx asks, with the credentials that docker has."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from exl3kit.errors import ExitCode, KitError


def digest(reference: str, platform: str) -> str:
    """The `sha256:...` that a tag points to, an index of several platforms where the registry has one.

    Raises `KitError` (preflight) when the registry cannot be asked, or has nothing for the platform.
    """
    command = ["docker", "buildx", "imagetools", "inspect", reference, "--format", "{{json .Manifest}}"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _unasked(reference, str(error)) from error
    if done.returncode != 0:
        raise _unasked(reference, (done.stderr.strip().splitlines() or ["docker said nothing"])[0])
    try:
        return _chosen(json.loads(done.stdout), reference, platform)
    except (ValueError, KeyError, TypeError) as error:
        raise _unasked(reference, f"buildx answered {done.stdout[:200]!r}") from error


def _chosen(manifest: dict[str, Any], reference: str, platform: str) -> str:
    offered = [
        f"{entry['platform']['os']}/{entry['platform']['architecture']}"
        for entry in manifest.get("manifests", [])
        if entry.get("platform", {}).get("os", "unknown") != "unknown"
    ]
    if offered and platform not in offered:
        raise KitError(
            f"the registry has no {platform} image of {reference}",
            why=f"it has {', '.join(sorted(set(offered)))}",
            next_step="choose another tag, or another image.platform in the recipe",
            code=ExitCode.PREFLIGHT,
        )
    return str(manifest["digest"])


def _unasked(reference: str, why: str) -> KitError:
    return KitError(
        f"the digest of {reference} could not be looked up",
        why=why,
        next_step="check the network, `docker login`, and that `docker buildx version` answers",
        code=ExitCode.PREFLIGHT,
    )
