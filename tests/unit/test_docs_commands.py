"""Blocks of commands in README and docs are run as they stand, by bash, line by line.

What may not or cannot be run here is marked in the page, with the reason (see `docs_blocks`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import docs_blocks
import pytest
from docs_blocks import REPO, Block

RUN = [block for page in docs_blocks.pages() for block in docs_blocks.blocks(page) if block.script()]
QUICK = ("README.md", "docs/update.md", "docs/tune-mnbt.md")  # of the short suite; each command takes half a second
KIT = """#!/bin/sh
PYTHONPATH='{repository}' exec '{python}' -m exl3kit.cli "$@"
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder like a checkout, with a kit that needs no environment of its own; it takes what is written."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in ("recipes", "models", "overlay", "locks", "scripts", "tests", "exl3kit", "Dockerfile"):
        (folder / name).symlink_to(REPO / name)
    shutil.copytree(REPO / "docs", folder / "docs")  # `kit bench report` writes beside the receipts
    kit = folder / "kit.py"
    kit.write_text(KIT.format(repository=REPO, python=sys.executable))
    kit.chmod(0o755)
    programs = tmp_path / "bin"
    programs.mkdir()
    shutil.copy2(kit, programs / "kit")
    return folder


def run(block: Block, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "HOME": str(folder.parent),
        "PATH": f"{folder.parent / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(folder.parent / "cache"),
        "XDG_STATE_HOME": str(folder.parent / "state"),
    }
    return subprocess.run(
        ["bash", "-eu", "-o", "pipefail", "-x", "-c", block.script()],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def cases(quick: bool) -> list[object]:
    return [pytest.param(block, id=block.where) for block in RUN if (block.page in QUICK) == quick]


@pytest.mark.parametrize("block", cases(quick=True))
def test_commands_of_the_first_pages_run(block: Block, checkout: Path) -> None:
    done = run(block, checkout)
    assert done.returncode == 0, f"{block.where}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}"


@pytest.mark.full
@pytest.mark.parametrize("block", cases(quick=False))
def test_commands_of_the_other_pages_run(block: Block, checkout: Path) -> None:
    done = run(block, checkout)
    assert done.returncode == 0, f"{block.where}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}"


def test_a_command_that_fails_fails_its_block(checkout: Path) -> None:
    block = Block("page", 1, "sh", "kit recipe check demo\nkit recipe show dmeo\ntrue\n", None, ())
    assert run(block, checkout).returncode == 2
