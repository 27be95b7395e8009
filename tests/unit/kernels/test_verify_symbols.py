"""`kit verify symbols` on files and recipes: what it prints, what it returns, and what it refuses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from workshop import REPO

from exl3kit import paths, recipes, wheelhouse, wheels
from exl3kit import symbols as kernels
from exl3kit.errors import KitError

RECIPE = """\
recipe: 1
extends: demo
name: on-gpu
image:
  {base: {rootfs: bookworm}, vllm: 0.32.0, platform: linux/arm64, arch: ["12.1"], rates: [2.5, 4], codebooks: [mcg]}
exl3: {tier: kernel}
"""

GPU_RECIPE = "qwen3.8-27b-rtx-pro-6000"


def kit(*words: object, **env: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "exl3kit.cli", "verify", "symbols", *map(str, words)]
    return subprocess.run(argv, capture_output=True, text=True, check=False, cwd=REPO, env=os.environ | env)


def test_a_whole_file_passes_and_prints_the_table(native: Path) -> None:
    done = kit(native)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "exl3_fat_gemm_scatter" in line]
    assert len(lines) == 1 and lines[0].count("yes") == 3


def test_json_is_one_object_with_the_seconds_spent(native: Path) -> None:
    done = kit(native, "--json")
    report = json.loads(done.stdout)
    assert report["ok"] is True and report["asked"]["targets"] == ["12.0", "12.1"] and "seconds" in report


def test_a_damaged_file_leaves_with_5_and_says_what_is_wrong(native: Path, tmp_path: Path) -> None:
    stripped = shutil.copy(native, tmp_path / "stripped.so")
    subprocess.run(["strip", stripped], check=True)
    done = kit(stripped)
    assert done.returncode == 5 and "no symbol table" in done.stdout
    assert kit(stripped, "--json").returncode == 5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "nothing to verify"),
        (("LICENSE",), "LICENSE: cannot be read as a kernel library (not an ELF file)"),
        (("demo", "--build"), "demo: the recipe asks for no GPU code"),
        (("LICENSE", "--out", "x.so"), "needs --build"),
    ],
)
def test_what_cannot_be_verified_is_refused_with_2(words: tuple[str, ...], said: str) -> None:
    done = kit(*words)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_a_recipe_is_what_its_library_is_held_against(tmp_path: Path) -> None:
    (tmp_path / "on-gpu.yaml").write_text(RECIPE)
    need = kernels.need_of(recipes.load(str(tmp_path / "on-gpu.yaml")))
    assert need == kernels.Need(("12.1",), (2.5, 4.0), ("mcg",), "kernel", "aarch64")
    assert need.words() == [
        *("--targets", "12.1", "--rates", "2.5,4", "--codebooks", "mcg", "--tier", "kernel", "--host", "aarch64"),
    ]


def test_a_recipe_without_gpu_code_has_no_symbols_to_verify() -> None:
    with pytest.raises(KitError, match="asks for no GPU code"):
        kernels.need_of(recipes.load("demo"))


def test_case_7_a_library_is_read_without_a_network_after_one_fetch(
    native: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a machine without a network, on which nothing was fetched yet
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    alone = {"EXL3KIT_OFFLINE": "1", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    refused = kit(native, **alone)
    assert refused.returncode == 3 and "the wheel nvidia-cuda-cuobjdump==" in refused.stderr
    # when its part of `kit fetch` has run
    sources = wheelhouse.of(recipes.load(GPU_RECIPE))
    assert sources.readers is not None
    wheels.fetch(sources.readers)
    # then the library is read, and what was fetched is part of a bundle
    assert kit(native, **alone).returncode == 0
    assert {path.name for path in paths.wheelhouse().iterdir()} <= {path.name for path in sources.files()}
