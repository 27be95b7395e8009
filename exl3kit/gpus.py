"""The GPUs of a node, and whether a kernel library has code for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from exl3kit.errors import ExitCode

if TYPE_CHECKING:
    from exl3kit.nodes import Node

_QUERY = ["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"]


@dataclass(frozen=True)
class Gpu:
    """One GPU: the driver's name for it and its compute capability, such as ("NVIDIA GB10", "12.1").

    Its memory is in bytes, and None where the GPU has none of its own, as a GB10.
    """

    name: str
    capability: str
    driver: str = ""
    memory_total: int | None = None
    memory_free: int | None = None


def ask(node: Node) -> list[Gpu]:
    """The GPUs of ``node``. Raises KitError (verification) if its driver does not answer or names none."""
    done = node.run(_QUERY)
    found = parse(done.stdout) if done.returncode == 0 else []
    if not found:
        said = (done.stderr or done.stdout).strip().splitlines() or ["no GPU"]
        raise node.error(
            "has no NVIDIA GPU that its driver knows of",
            why=f"nvidia-smi: {said[-1]}",
            next_step="`nvidia-smi` on that node must list the GPU",
            code=ExitCode.VERIFICATION,
        )
    return found


def parse(answer: str) -> list[Gpu]:
    """GPUs from nvidia-smi's lines; one that has no compute capability (`[N/A]`) is left out."""
    pairs = [line.rpartition(",") for line in answer.splitlines()]
    return [Gpu(name.strip(), number.strip()) for name, _, number in pairs if number.strip()[:1].isdigit()]


def parse_memory(answer: str) -> list[Gpu]:
    """GPUs from lines of name, capability, driver, and total and free memory in MiB (`[N/A]` where it has none)."""
    found = []
    for line in answer.splitlines():
        name, capability, driver, total, free = (word.strip() for word in line.rsplit(",", 4))
        if capability[:1].isdigit():
            found.append(Gpu(name, capability, driver, _mebibytes(total), _mebibytes(free)))
    return found


def _mebibytes(text: str) -> int | None:
    return int(text) << 20 if text.isdecimal() else None


def unserved(gpus: Sequence[Gpu], report: Mapping[str, Any]) -> list[str]:
    """A sentence for every GPU that the library of a symbols report has no machine code for."""
    there = sorted(report["resources"])
    return [
        f"{gpu.name} has compute capability {gpu.capability}, and the library has machine code for "
        f'{", ".join(there) or "none"}; next: add "{gpu.capability}" to image.arch and build again'
        for gpu in gpus
        if gpu.capability not in there
    ]
