"""The overlay's patches and its contract with vLLM, as the kit shows them.

The work is done by `overlay/patches`, which the image carries and runs too; the kit runs the same program, so both say
the same about the same vLLM.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exl3kit import paths
from exl3kit.errors import ExitCode, KitError

if TYPE_CHECKING:
    from exl3kit.recipe import Recipe

PATCHES = paths.OVERLAY / "patches"
DRIFT = 5  # exit code of the program when something is not as recorded


def versions() -> list[str]:
    """Versions of vLLM that the overlay has a set for."""
    return sorted(path.parent.name.removeprefix("vllm-") for path in PATCHES.glob("vllm-*/manifest.yaml"))


def version_of(recipe: Recipe) -> str:
    """The recipe's vLLM without its local part: `0.32.0` of `0.32.0+cpu`."""
    return str(recipe.image.vllm).partition("+")[0]


def render(version: str, target: Path) -> list[Path]:
    """Write the rendered diffs of a version to a folder; gives their paths, none where the version needs no patch.

    Raises `KitError` (usage) for a version without a set.
    """
    if version not in versions():
        raise KitError(
            f"the overlay has no patches for vLLM {version}",
            why=f"there are sets for {', '.join(versions())}",
            next_step="name one of these with --vllm; docs/overlay.md says how a new one is made",
        )
    done = _run("render", version, target.absolute())
    if done.returncode != 0:
        raise KitError("the patches cannot be rendered", where=f"vLLM {version}", why=_words(done))
    return [Path(line) for line in done.stdout.splitlines()]


def check(wheel: Path) -> dict[str, Any]:
    """Hold a vLLM, as a wheel or an unpacked folder, against the contract and the patches; installs nothing.

    Gives `{wheel, vllm, set, verdicts, ok}`: a verdict has `kind` (symbol or patch), `subject`, `status` (same, moved,
    changed, missing), `detail`, and `why` the overlay needs it. A version without a set is held against the newest set.

    Raises `KitError` (usage) when it is no vLLM.
    """
    done = _run("check", wheel.absolute())
    if done.returncode not in (0, DRIFT) or not done.stdout:
        raise KitError("no vLLM to check", where=paths.shown(wheel), why=_words(done))
    report: dict[str, Any] = json.loads(done.stdout)
    return {"wheel": paths.shown(wheel), **report}


def pinned_wheels() -> list[Path]:
    """The vLLM wheels of all locks that the wheelhouse holds.

    Raises `KitError` (preflight) when it holds none.
    """
    from exl3kit import pins

    locked = [(one.distribution, wheel) for one in pins.available() for wheel in one.wheels]
    names = sorted({wheel.filename for distribution, wheel in locked if wheel.name == distribution and wheel.filename})
    found = [paths.wheelhouse() / name for name in names if (paths.wheelhouse() / name).is_file()]
    if not found:
        raise KitError(
            "no pinned wheel of vLLM is in the wheel cache",
            where=paths.shown(paths.wheelhouse()),
            why=f"the locks name {', '.join(names) or 'none'}",
            next_step="name one with --wheel, or fetch them with `kit build RECIPE`",
            code=ExitCode.PREFLIGHT,
        )
    return found


def _run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-B", "-m", "patches", *map(str, arguments)]
    return subprocess.run(command, cwd=paths.OVERLAY, capture_output=True, text=True, check=False)


def _words(done: subprocess.CompletedProcess[str]) -> str:
    lines = done.stderr.strip().splitlines()
    return lines[-1].removeprefix("patches: ") if lines else f"exit code {done.returncode}"
