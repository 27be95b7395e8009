"""The image for GPUs, from Debian packages and wheels alone: really built once, on an engine that has no GPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from kit_verbs import kit, kit_argv, told
from rig_hosts import REPOSITORY, Rig, call

BUILD_SECONDS = 7200
ROOM = 45_000_000_000  # 4 GB of wheels, twice as a context; some 10 GB of packages, twice while they are installed

RECIPE = """\
recipe: 1
extends: {demo}
name: sm120
image: {{base: {{rootfs: bookworm}}, vllm: 0.33.0, arch: ["12.0"], rates: [4], codebooks: [mcg]}}
"""


@pytest.mark.full
def test_the_gpu_image_is_built_without_a_registry_and_has_its_symbols(
    rig: Rig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Given pins of vLLM 0.33.0 with CUDA, then the image is built and every symbol of its recipe is in it."""
    if shutil.disk_usage(rig.status["options"]["disk_dir"]).free < ROOM:
        pytest.skip(f"building the image for GPUs needs {ROOM / 1e9:.0f} GB of disk")
    recipe = tmp_path / "sm120.yaml"
    recipe.write_text(RECIPE.format(demo=REPOSITORY / "recipes" / "demo.yaml"))
    # when
    built = told(kit(rig, "build", recipe, "--nodes", "node1", "--json", timeout=BUILD_SECONDS))
    environment = rig.env | {"DOCKER_HOST": rig.docker_host("node1")}
    argv = kit_argv("verify", "symbols", built["tag"], "--json")
    verified = told(call(*argv, check=False, timeout=600, env=environment, cwd=REPOSITORY))
    # then
    with capsys.disabled():
        print(f"\nimage for GPUs: {built['size'] / 1e9:.1f} GB, {built['stages']}")
    assert verified["ok"] is True
    rig.docker("node1", "image", "rm", "--force", built["tag"])
