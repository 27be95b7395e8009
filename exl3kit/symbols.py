"""The kernel library of an image, a file or a recipe: built alone if asked, read, and held against what is needed.

The reading itself is `overlay/exl3_vllm/symbols.py`, which the image carries too; the kit runs it as a program, so both
sides say the same about the same file.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exl3kit import image_program, offline, paths, wheels
from exl3kit.errors import ExitCode, KitError
from exl3kit.pins import Wheel

if TYPE_CHECKING:
    from docker import DockerClient

    from exl3kit.nodes import Node
    from exl3kit.progress import Progress
    from exl3kit.recipe import Recipe

LOCK = paths.LOCKS / "cuda-13.0-toolchain.json"
BUILD = paths.OVERLAY / "csrc/build.py"
LIBRARY = "exl3_kernels.abi3.so"
KERNELS_LABEL = "io.exl3kit.kernels"  # of an image: where in it the library lies
_MACHINES = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}


@dataclass(frozen=True)
class Need:
    """What a deployment needs of its kernel library; an empty field takes the library's own word."""

    targets: tuple[str, ...] = ()
    rates: tuple[float, ...] = ()
    codebooks: tuple[str, ...] = ()
    tier: str = "auto"
    host: str = ""

    def words(self) -> list[str]:
        """The same as options of the symbol check."""
        options = {
            "--targets": ",".join(self.targets),
            "--rates": ",".join(f"{rate:g}" for rate in self.rates),
            "--codebooks": ",".join(self.codebooks),
            "--tier": self.tier,
            "--host": self.host,
        }
        return [word for name, value in options.items() if value for word in (name, value)]


def this_machine() -> str:
    """This machine as ELF files and the toolchain lock name it."""
    machine = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)


HEADLINE = Need(("12.0", "12.1"), (4,), ("mcg",))
"""What `--build` without a recipe makes: both Blackwell targets, 4 bits, codebook mcg."""


def need_of(recipe: Recipe) -> Need:
    """What ``recipe`` asks for. Raises KitError (usage) if it asks for no GPU code at all."""
    image = recipe.image
    if not image.arch:
        raise KitError(
            "the recipe asks for no GPU code, so there are no symbols to verify",
            where=recipe.name,
            why="image.arch is empty",
            next_step="name a recipe with image.arch, or a library file",
        )
    host = _MACHINES[image.platform] if image.platform else this_machine()
    rates, codebooks = tuple(map(float, image.rates)), tuple(map(str, image.codebooks))
    return Need(tuple(image.arch), rates, codebooks, recipe.exl3.tier, host)


def reader_wheels() -> list[Wheel]:
    """The wheels of the programs by which this machine reads a library, for whatever machine that was compiled."""
    return [Wheel(one["name"], one["version"], one["filename"], one["sha256"]) for one in _locked_readers()]


def _locked_readers() -> list[dict[str, str]]:
    locked: list[dict[str, str]] = json.loads(LOCK.read_text(encoding="utf-8"))["wheels"]
    found = [wheel for wheel in locked if wheel["machine"] == this_machine() and wheel["role"] == "inspect"]
    return sorted(found, key=lambda wheel: wheel["filename"])


def _readers_from(tree: Path) -> list[str]:
    """Where build.py finds the readers, as options. Raises KitError (preflight) when offline and they are nowhere."""
    house, stamp = paths.wheelhouse(), tree / "toolchain.json"
    missing = [wheel for wheel in reader_wheels() if not wheels.intact(house, wheel)]
    if missing and not (stamp.is_file() and json.loads(stamp.read_text(encoding="utf-8")) == _locked_readers()):
        offline.refuse([f"the wheel {wheel.requirement}" for wheel in missing])
    return [] if missing else ["--wheels", str(house)]


def install(progress: Progress, hosts: tuple[str, ...] = ()) -> Path:
    """The toolchain folder in the cache, from the locked wheels; without ``hosts`` only the readers of binaries."""
    into = paths.cache_dir("toolchain") / LOCK.stem.removesuffix("-toolchain")
    with progress.stage("toolchain from locked wheels"):
        base = ["toolchain", "--lock", str(LOCK), "--into", str(into)]
        if not hosts:
            run_build([*base, "--readers-only", *_readers_from(into / f"inspect-{this_machine()}")], progress)
        for host in hosts:
            run_build([*base, "--host", host, "--torch-headers"], progress)
    return into


def build(need: Need, progress: Progress, out: Path | None = None) -> Path:
    """Build the kernel library for ``need`` on this machine, without any container engine, and return its path.

    Raises KitError (build) with the compiler's words, or naming the kernel that spills or is over its budget.
    """
    host = need.host or this_machine()
    toolchain = install(progress, (host,))
    key = hashlib.sha256(repr(need).encode()).hexdigest()[:12]
    file = out or paths.cache_dir("kernels", "libraries", f"{host}-{key}") / LIBRARY
    words = ["library", "--toolchain", str(toolchain), "--host", host, "--out", str(file)]
    words += ["--targets", ",".join(need.targets), "--codebooks", ",".join(need.codebooks)]
    words += ["--rates", ",".join(f"{rate:g}" for rate in need.rates)]
    with progress.stage(f"kernels for {host}") as stage:
        stage.conclude(run_build(words, progress))
    return file


def run_build(words: list[str], progress: Progress) -> str:
    """Run build.py, telling its lines as they come; its closing line. Raises KitError (build)."""
    argv = [sys.executable, str(BUILD), *words]
    refusal: list[str] = []
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout and running.stderr
        for line in running.stderr:
            if line.startswith("[") and not refusal:
                progress.tell(line.rstrip())
            else:
                refusal.append(line.rstrip().removeprefix("build.py: "))
        closing = running.stdout.read().strip()
    if running.returncode:
        why = "\n".join(refusal) or f"build.py ended with {running.returncode}"
        raise KitError("the kernels cannot be built", where=paths.shown(BUILD), why=why, code=ExitCode.BUILD)
    return closing.rpartition(": ")[2]


def verify(file: Path, need: Need, progress: Progress) -> dict[str, Any]:
    """The symbol check's report on ``file`` (key `ok` says how it ended). Raises KitError on what is no library."""
    readers = install(progress)
    cuobjdump = readers / f"inspect-{this_machine()}/nvidia/cu13/bin/cuobjdump"
    argv = [sys.executable, "-m", "exl3_vllm.symbols", str(file.resolve()), "--json", "--cuobjdump", str(cuobjdump)]
    environment = {**os.environ, "PYTHONPATH": str(paths.OVERLAY), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([*argv, *need.words()], capture_output=True, text=True, check=False, env=environment)
    if not done.stdout:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        said = why.removeprefix("exl3_vllm.symbols: ").removeprefix(f"{file.resolve()}: ")
        raise KitError("cannot be read as a kernel library", where=paths.shown(file), why=said)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


CHECK = ("python", "-m", "exl3_vllm.kernelcheck")


def call_on(node: Node, image: str) -> dict[str, Any]:
    """Import the library in ``image`` on ``node`` and call every instance on its GPUs; the check's report.

    Raises KitError (verification) when the check says nothing that can be read, else as `image_program.run` does.
    """
    ended = image_program.run(node, image, CHECK, gpus=True)
    lines = ended.stdout.strip().splitlines()
    try:
        report: dict[str, Any] = json.loads(lines[-1])
        _ = report["gpus"], report["errors"]  # an object of another program has neither
    except (IndexError, ValueError, KeyError, TypeError) as error:
        said = (ended.stderr.strip().splitlines() or lines or [f"exit code {ended.code}"])[-1]
        what, step = "the image's kernel check gave no report", "kit build RECIPE: the image is of another version"
        raise node.error(what, why=said, next_step=step, code=ExitCode.VERIFICATION) from error
    if not report["gpus"] and not report["errors"]:
        report["errors"] = ["torch in the image sees no GPU: its CUDA does not fit the node's driver"]
    return report


@contextmanager
def from_image(client: DockerClient, reference: str) -> Iterator[Path]:
    """The library inside an image, copied out for the time of the block; no container of it is started.

    Raises KitError (verification) if the image or the library in it is not there.
    """
    import tempfile

    from docker.errors import APIError, ImageNotFound, NotFound

    try:
        label = client.images.get(reference).labels.get(KERNELS_LABEL)
    except ImageNotFound as error:
        why, way_out = "this engine has no such image", "kit build RECIPE"
        code = ExitCode.VERIFICATION
        raise KitError("no image to verify", where=reference, why=why, next_step=way_out, code=code) from error
    if not label:
        raise KitError(f"the image has no label {KERNELS_LABEL}", where=reference, code=ExitCode.VERIFICATION)
    container = client.containers.create(reference, command=["true"], network_disabled=True)
    try:
        chunks, _ = container.get_archive(label)
        content = _single_file(b"".join(chunks))
    except (APIError, NotFound) as error:
        what = f"the image has no library at {label}"
        raise KitError(what, where=reference, why=str(error.explanation), code=ExitCode.VERIFICATION) from error
    finally:
        container.remove(force=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / LIBRARY
        file.write_bytes(content)
        yield file


def _single_file(archive: bytes) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            if stream := tar.extractfile(member) if member.isfile() else None:
                return stream.read()
    return b""
