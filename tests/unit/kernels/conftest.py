"""The real toolchain out of the locked wheels (fetched once, kept in the user's cache) and the specimen library."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from workshop import LOCK, SPECIMEN, Edited, Symbols, Workshop, run_symbols, wheels


@pytest.fixture(scope="session")
def toolchain() -> Path:
    """Compiler for this machine, runtimes for both hosts, torch's headers."""
    into = wheels.default_cache() / "toolchain/cuda-13.0"
    return wheels.install(LOCK, into, list(wheels.MACHINES), torch_headers=True)


@pytest.fixture(scope="session")
def cuobjdump(toolchain: Path) -> Path:
    return toolchain / wheels.build_machine() / "nvidia/cu13/bin/cuobjdump"


@pytest.fixture(scope="session")
def workshop(toolchain: Path, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(toolchain, tmp_path_factory.mktemp("kernel-cache"))


@pytest.fixture
def edited(tmp_path: Path) -> Edited:
    """A copy of the specimen with ``{file: (old, new)}`` replaced in it; ``new`` None removes the file."""

    def copy(changes: dict[str, tuple[str, str] | None]) -> Path:
        source = tmp_path / "source"
        shutil.copytree(SPECIMEN, source)
        for name, change in changes.items():
            if change is None:
                (source / name).unlink()
                continue
            text = (source / name).read_text()
            assert change[0] in text
            (source / name).write_text(text.replace(*change))
        return source

    return copy


@pytest.fixture(scope="session")
def native(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The specimen library for this machine's hosts, two rates."""
    out = tmp_path_factory.mktemp("native") / "specimen.so"
    workshop.build(out, workshop.request(rates=(4.0, 2.5)))
    return out


@pytest.fixture(scope="session")
def arm64(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The specimen library for aarch64 hosts, with the torch binding."""
    out = tmp_path_factory.mktemp("arm64") / "specimen.so"
    workshop.build(out, workshop.request(host="aarch64"))
    return out


@pytest.fixture(scope="session")
def symbols(cuobjdump: Path) -> Symbols:
    """Run the symbol check on a file: (exit code, report)."""

    def run(file: Path, *words: object) -> tuple[int, dict[str, Any]]:
        return run_symbols(file, "--cuobjdump", cuobjdump, *words)

    return run
