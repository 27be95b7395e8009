"""A library is held against the GPUs that a node's driver lists."""

from __future__ import annotations

import pytest

from exl3kit import gpus


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("NVIDIA GB10, 12.1\n", [gpus.Gpu("NVIDIA GB10", "12.1")]),
        (
            "NVIDIA RTX PRO 6000, Max-Q, 12.0\nNVIDIA H200, 9.0\n",
            [gpus.Gpu("NVIDIA RTX PRO 6000, Max-Q", "12.0"), gpus.Gpu("NVIDIA H200", "9.0")],
        ),
        ("NVIDIA GB10, [N/A]\n", []),
        ("", []),
    ],
)
def test_the_drivers_lines_are_read(answer: str, found: list[gpus.Gpu]) -> None:
    assert gpus.parse(answer) == found


def test_case_5_a_gpu_without_machine_code_is_named_with_the_way_out() -> None:
    report = {"resources": {"12.0": {}, "12.1": {}}}
    listed = [gpus.Gpu("NVIDIA GB10", "12.1"), gpus.Gpu("NVIDIA H200", "9.0")]
    assert gpus.unserved(listed, report) == [
        "NVIDIA H200 has compute capability 9.0, and the library has machine code for 12.0, 12.1; "
        'next: add "9.0" to image.arch and build again'
    ]
    assert len(gpus.unserved(listed, {"resources": {}})) == 2
