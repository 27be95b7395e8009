"""Wheels: fetching what the pins name, checked by hash, and looking up what they do not name yet. pip does the work.

pip reads the machine's own configuration (index, proxy, `find-links`), so nothing here knows where wheels come from.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exl3kit import offline, paths, side_by_side
from exl3kit.errors import ExitCode, KitError
from exl3kit.pins import Pins, Wheel

if TYPE_CHECKING:
    from exl3kit.progress import Stage

log = logging.getLogger(__name__)

# Tags that a glibc of bookworm (2.36) can load; pip takes the newest that a project offers.
_GLIBC = tuple(range(36, 4, -1))
_LEGACY = {"x86_64": ("manylinux2014", "manylinux2010", "manylinux1"), "aarch64": ("manylinux2014",)}
_GIVEN_UP = re.compile(r"WARNING: Retrying \(Retry\(total=0,.* after connection broken by '(.*)': /")
_MACHINES = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}


def fetch(pins: Pins, stage: Stage | None = None) -> Path:
    """Have every wheel of the pins in the wheelhouse, each with its locked sha256; gives the wheelhouse's folder.

    Wheels that are there already are only hashed, so this works offline after one fetch. Raises `KitError` (build) when
    a wheel has vanished or is another file than the locked one.
    """
    house = paths.wheelhouse()
    missing = []
    for wheel in pins.wheels:
        if intact(house, wheel):
            _count(stage, house, wheel)
        else:
            missing.append(wheel)
    offline.refuse([f"the wheel {wheel.requirement}" for wheel in missing])
    if missing:
        _download(pins, missing, house, stage)
    return house


def intact(house: Path, wheel: Wheel) -> bool:
    """Whether the wheelhouse holds this very wheel."""
    if wheel.filename is None or not (house / wheel.filename).is_file():
        return False
    return digest_of(house / wheel.filename) == wheel.sha256


def digest_of(path: Path) -> str:
    """sha256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(pins: Pins, missing: Sequence[Wheel], house: Path, stage: Stage | None) -> None:
    # Beside the wheelhouse, then renamed: two fetches at once, or one cut short, leave only whole wheels behind.
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=house) as folder:
        wanted = Path(folder) / "requirements.txt"
        wanted.write_text("".join(f"{w.requirement} --hash=sha256:{w.sha256}\n" for w in missing), encoding="utf-8")
        command = ["download", "--no-deps", "--require-hashes", "--dest", folder, *target(pins), "-r", str(wanted)]
        lines: list[str] = []
        taken = 0
        for line in run_pip(command, lines):
            if stage is not None and line.startswith(("Collecting ", "Processing ")):
                taken += 1
                stage.say(f"{taken} of {len(missing)}: {Path(line.split()[1]).name}")
            elif stage is not None and line.lstrip().startswith("WARNING: Retrying"):
                stage.say("the package index does not answer: trying again")
        absent = sum(not intact(Path(folder), wheel) for wheel in missing)
        if absent and (why := silence(lines)) is not None:
            what = f"{absent} wheel{'s are' if absent > 1 else ' is'} not here, and the package index does not answer"
            raise KitError(
                what,
                where=paths.shown(pins.path),
                why=why,
                next_step="start again when the network is back (index and proxy: `pip config list`), "
                "or `kit bundle load FILE` of one made where there is a network",
                code=ExitCode.BUILD,
            )
        for wheel in missing:
            name = wheel.filename or ""
            if not intact(Path(folder), wheel):
                raise KitError(
                    f"{wheel.requirement} could not be fetched as locked",
                    where=paths.shown(pins.path),
                    why=_cause(lines, wheel),
                    next_step="`kit lock --update RECIPE` if the version is gone; else start again",
                    code=ExitCode.BUILD,
                )
            (Path(folder) / name).replace(house / name)
            _count(stage, house, wheel)


def _count(stage: Stage | None, house: Path, wheel: Wheel) -> None:
    if stage is not None and wheel.filename is not None:
        stage.advance((house / wheel.filename).stat().st_size)


def _cause(lines: Sequence[str], wheel: Wheel) -> str:
    told = [line for line in lines if line.startswith("ERROR:")]
    own = [line for line in told if wheel.name in line.lower().replace("_", "-")]
    return (own or told or lines or ["pip said nothing"])[0].removeprefix("ERROR:").strip()


def silence(lines: Sequence[str]) -> str | None:
    """Why an index could not be reached, in pip's words, when it gave one up; None when every one answered."""
    given_up = [found[1] for line in lines if (found := _GIVEN_UP.search(line))]
    if not given_up:
        return None
    return re.sub(r"[\"']\)$", "", re.split(r"[)>]: ", given_up[-1], maxsplit=1)[-1])


# ---- looking up ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """A wheel as an index offers it, with the requirements that it states itself."""

    wheel: Wheel
    requires: tuple[str, ...]


def look_up(pins: Pins, requirements: Iterable[str]) -> dict[str, Found]:
    """Ask the machine's index which file pip would take for each requirement; nothing is installed.

    Gives name -> what was found; a name that the index cannot serve is absent.
    """
    wanted = list(requirements)
    with tempfile.TemporaryDirectory(prefix="kit-lookup-") as folder:
        report = Path(folder) / "report.json"
        options = ["install", "--dry-run", "--ignore-installed", "--no-deps", "--target", folder, *target(pins)]
        lines: list[str] = []
        for _ in run_pip([*options, "--report", str(report), *wanted], lines):
            pass
        if report.is_file():
            return dict(_reported(json.loads(report.read_text(encoding="utf-8"))))
    # The second form is that of a machine whose pip configuration holds a constraint on the name.
    silent = silence(lines)  # then no project is found, and none of them has vanished
    refused = re.search(r"(?:No matching distribution found for|Cannot install) ([\w.-]+)", "\n".join(lines))
    if refused is None or silent:
        raise KitError(
            "the package index could not be asked",
            why=silent or _cause(lines, pins.wheels[0]),
            next_step="check network and proxy (`pip config list`), then start again",
            code=ExitCode.PREFLIGHT,
        )
    # pip stops at the first requirement that it cannot serve, so ask again without that one.
    rest = [one for one in wanted if normal(re.split(r"[=<>!~;\[ ]", one)[0]) != normal(refused[1])]
    return look_up(pins, rest) if 0 < len(rest) < len(wanted) else {}


def _reported(report: dict[str, Any]) -> Iterator[tuple[str, Found]]:
    from urllib.parse import unquote, urlsplit

    for item in report["install"]:
        metadata, download = item["metadata"], item["download_info"]
        name = normal(metadata["name"])
        filename = unquote(urlsplit(download["url"]).path).rpartition("/")[2]
        wheel = Wheel(name, metadata["version"], filename, download["archive_info"]["hashes"]["sha256"])
        yield name, Found(wheel, tuple(metadata.get("requires_dist", ())))


def normal(name: str) -> str:
    """A project's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


# ---- pip -------------------------------------------------------------------------------------------------------------


def target(pins: Pins) -> list[str]:
    """pip's options for the image's interpreter and CPU, whatever this machine runs."""
    machine = _MACHINES[pins.platform]
    tags = [*(f"manylinux_2_{minor}_{machine}" for minor in _GLIBC), *(f"{old}_{machine}" for old in _LEGACY[machine])]
    options = ["--only-binary", ":all:", "--implementation", "cp", "--python-version", pins.python]
    for abi in (f"cp{pins.python.replace('.', '')}", "abi3", "none"):
        options += ["--abi", abi]
    for tag in tags:
        options += ["--platform", tag]
    return options


def run_pip(arguments: Sequence[str], lines: list[str]) -> Iterator[str]:
    """Run pip and give its output line by line; all of it is also appended to `lines`. The caller judges the result."""
    command = [
        sys.executable,
        "-m",
        "pip",
        *arguments,
        "--disable-pip-version-check",
        "--no-input",
        "--progress-bar",
        "off",
    ]
    with side_by_side.program(command) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            lines.append(line.rstrip())
            log.debug("pip: %s", lines[-1])
            yield lines[-1]
