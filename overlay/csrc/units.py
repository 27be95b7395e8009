"""The translation units of the kernel library: what each file says of itself, and the compilations that follow.

A file is a unit when one of its first 40 lines is ``// unit: …``; README.md ("Build") describes the lines. Standard
library only: this runs in the image build and on a machine that has nothing but Python and g++.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from dataclasses import dataclass
from pathlib import Path

# The value of EXL3_CODEBOOK. Order as in the checkpoint format: no marker, `mcg`, `mul1`.
CODEBOOKS = {"3inst": 0, "mcg": 1, "mul1": 2}
RATES = (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0)  # bits per weight that checkpoints use
_HEAD_LINES = 40
_DIRECTIVE = re.compile(r"^//\s*(unit|ops|budget):\s*(.*?)\s*$")
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


class UnitError(Exception):
    """A directive that cannot be read; the text names file and line."""


@dataclass(frozen=True)
class Budget:
    """Upper limits for every kernel whose mangled name contains ``word``; registers per thread, bytes per block."""

    word: str
    limits: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Unit:
    """One source file and what its head says: axes to multiply it by, ops it serves, budgets of its kernels."""

    path: Path
    axes: tuple[tuple[str, tuple[str, ...]], ...]
    ops: tuple[str, ...]
    budgets: tuple[Budget, ...]
    torch: bool

    @property
    def name(self) -> str:
        return self.path.name


@dataclass(frozen=True)
class Job:
    """One compilation: a unit with one value for each of its axes."""

    unit: Unit
    defines: tuple[tuple[str, str], ...]
    rate: float | None
    codebook: str | None

    @property
    def label(self) -> str:
        return " ".join([self.unit.name, *(f"{name}={value}" for name, value in self.defines)])


def read_unit(path: Path) -> Unit | None:
    """The unit in ``path``, or None if the file does not call itself one.

    Raises UnitError on a directive with an unknown axis or a malformed budget.
    """
    text = path.read_text()
    axes: tuple[tuple[str, tuple[str, ...]], ...] | None = None
    ops: list[str] = []
    budgets: list[Budget] = []
    for number, line in enumerate(text.splitlines()[:_HEAD_LINES], 1):
        found = _DIRECTIVE.match(line)
        if not found:
            continue
        words = found[2].split()
        where = f"{path.name}:{number}"
        if found[1] == "unit":
            axes = _axes(words, where)
        elif found[1] == "ops":
            ops += words
        else:
            budgets.append(_budget(words, where))
    if axes is None:
        return None
    torch = re.search(r"^\s*#\s*include\s*<torch/", text, re.MULTILINE) is not None
    return Unit(path, axes, tuple(ops), tuple(budgets), torch)


def _axes(words: list[str], where: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    if words == ["once"]:
        return ()
    axes = []
    for word in words:
        name, _, values = word.partition("=")
        if word not in ("rate", "codebook") and not (re.fullmatch(r"[a-z]+", name) and values):
            raise UnitError(f"{where}: unit axis {word!r} is neither once, rate, codebook nor name=value,value")
        axes.append((name, tuple(values.split(",")) if values else ()))
    if not axes:
        raise UnitError(f"{where}: `unit:` names nothing; write `once` or axes")
    return tuple(axes)


def _budget(words: list[str], where: str) -> Budget:
    limits = []
    for word in words[1:]:
        found = re.fullmatch(r"(registers|shared|stack)=(\d+)", word)
        if not found:
            raise UnitError(f"{where}: budget {word!r} is not registers=N, shared=N or stack=N")
        limits.append((found[1], int(found[2])))
    if not limits:
        raise UnitError(f"{where}: `budget:` needs a kernel word and at least one limit")
    return Budget(words[0], tuple(limits))


def read_units(csrc: Path) -> list[Unit]:
    """Every unit of the folder, by name. Raises UnitError when there is none."""
    files = sorted([*csrc.glob("*.cu"), *csrc.glob("*.cpp")])
    units = [unit for unit in map(read_unit, files) if unit]
    if not units:
        raise UnitError(f"{csrc}: no file has a `// unit:` line; nothing to build")
    return units


def expand(units: list[Unit], rates: list[float], codebooks: list[str]) -> list[Job]:
    """The compilations of ``units`` for these rates (bits per weight) and codebooks, the widest units first.

    A unit that is multiplied is the slow kind; starting it first keeps the last core from idling at the end.
    """
    values = {"rate": [str(round(rate * 2)) for rate in rates], "codebook": [str(CODEBOOKS[c]) for c in codebooks]}
    names = {str(number): name for name, number in CODEBOOKS.items()}
    jobs = []
    for unit in sorted(units, key=lambda unit: (-len(unit.axes), -unit.path.stat().st_size, unit.name)):
        axes = [name for name, _ in unit.axes]
        choices = [values.get(name, list(given)) for name, given in unit.axes]
        for picked in itertools.product(*choices):
            axis = dict(zip(axes, picked, strict=True))
            defines = tuple((_define(name), value) for name, value in axis.items())
            rate = int(axis["rate"]) / 2 if "rate" in axis else None
            jobs.append(Job(unit, defines, rate, names.get(axis.get("codebook", ""))))
    return jobs


def _define(axis: str) -> str:
    return "EXL3_RATE2" if axis == "rate" else f"EXL3_{axis.upper()}"


def sources(path: Path) -> list[Path]:
    """``path`` and every file that it includes in quotes, directly or not, in the order found.

    Quoted names that do not exist beside the includer belong to the toolchain, which the cache key covers by its own
    hash.
    """
    found: list[Path] = []
    waiting = [path]
    while waiting:
        current = waiting.pop()
        if current in found:
            continue
        found.append(current)
        for name in _INCLUDE.findall(current.read_text()):
            if (current.parent / name).is_file():
                waiting.append((current.parent / name).resolve())
    return found


def digest(files: list[Path], *words: str) -> str:
    """sha256 over the names and bytes of ``files`` (in any order) and over ``words`` (in this order)."""
    total = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.name):
        total.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        total.update(file.read_bytes())
    for word in words:
        total.update(f"{word}\0".encode())
    return total.hexdigest()
