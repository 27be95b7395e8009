"""ptxas' report becomes numbers, and a number over its limit becomes a sentence with kernel, target and figure."""

from __future__ import annotations

import ptxas
import pytest
import units

REPORT = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4gemmILi8EEvPf' for 'sm_120'
ptxas info    : Function properties for _Z4gemmILi8EEvPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 226 registers, used 1 barriers, 34816 bytes smem
ptxas info    : Compiling entry function '_Z4gemmILi8EEvPf' for 'sm_121'
ptxas info    : Function properties for _Z4gemmILi8EEvPf
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 16 bytes stack
"""


def test_the_report_is_read_per_kernel_and_target() -> None:
    assert ptxas.parse(REPORT) == [
        ptxas.KernelUse("_Z4gemmILi8EEvPf", "sm_120", registers=226, stack=0, spilled=0, shared=34816),
        ptxas.KernelUse("_Z4gemmILi8EEvPf", "sm_121", registers=255, stack=16, spilled=20, shared=0),
    ]


def test_a_spill_is_a_fault_without_any_budget() -> None:
    assert ptxas.faults(ptxas.parse(REPORT), ()) == [
        "_Z4gemmILi8EEvPf on sm_121: 20 bytes spilled, 0 allowed",
        "_Z4gemmILi8EEvPf on sm_121: 16 bytes stack, 0 allowed",
    ]


@pytest.mark.parametrize(
    ("word", "limit", "faults"),
    [
        ("gemm", ("registers", 128), ["_Z4gemmILi8EEvPf on sm_120: 226 registers, 128 allowed"]),
        ("gemm", ("shared", 16384), ["_Z4gemmILi8EEvPf on sm_120: 34816 bytes shared, 16384 allowed"]),
        ("gemm", ("registers", 226), []),
        ("other", ("registers", 1), []),
    ],
)
def test_a_budget_binds_the_kernels_with_its_word(word: str, limit: tuple[str, int], faults: list[str]) -> None:
    uses = ptxas.parse(REPORT)[:1]
    assert ptxas.faults(uses, (units.Budget(word, (limit,)),)) == faults
