"""What ptxas says of each kernel (`-Xptxas -v`), and whether it is acceptable. Standard library only."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass

from units import Budget

STATIC_SHARED_LIMIT = 48 * 1024  # bytes; more static shared memory than this does not launch without opting in

_ENTRY = re.compile(r"Compiling entry function '([^']+)' for '(sm_\w+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(.*)")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class KernelUse:
    """Resources of one kernel on one target: registers per thread, bytes per thread or block."""

    kernel: str
    target: str
    registers: int
    stack: int
    spilled: int
    shared: int

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def parse(text: str) -> list[KernelUse]:
    """The kernels of a ptxas report, in its order. PTX-only targets leave no report."""
    uses: list[KernelUse] = []
    kernel = target = ""
    stack = spilled = 0
    for line in text.splitlines():
        if found := _ENTRY.search(line):
            kernel, target = found[1], found[2]
            stack = spilled = 0
        elif found := _FRAME.search(line):
            stack, spilled = int(found[1]), int(found[2]) + int(found[3])
        elif (found := _USED.search(line)) and kernel:
            shared = _SHARED.search(found[2])
            uses.append(KernelUse(kernel, target, int(found[1]), stack, spilled, int(shared[1]) if shared else 0))
            kernel = ""
    return uses


def faults(uses: list[KernelUse], budgets: tuple[Budget, ...]) -> list[str]:
    """A sentence for every spill and every figure over its budget; empty when all is well.

    A spill costs a round trip to local memory in the innermost loop, so none is tolerated anywhere.
    """
    found = []
    for use in uses:
        limits = {"spilled": 0, "stack": 0, "shared": STATIC_SHARED_LIMIT}
        for budget in budgets:
            if budget.word in use.kernel:
                limits.update(budget.limits)
        for name, limit in limits.items():
            if (value := getattr(use, name)) > limit:
                unit = "registers" if name == "registers" else f"bytes {name}"
                found.append(f"{use.kernel} on {use.target}: {value} {unit}, {limit} allowed")
    return found
