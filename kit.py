#!/usr/bin/env python3
"""Launcher of the kit: makes `.venv` from the hash-locked requirements on first use, then runs `exl3kit` in it.

Standard library only. The file must parse on Python 3.6, so that an old interpreter gets a sentence instead of a syntax
error. A `.venv` counts only with its marker, which is written last; it is made beside its final name and renamed, under
a file lock, so neither Ctrl-C, nor a full disk, nor two starts at once leave half of one behind.
"""

import os
import sys

TYPE_CHECKING = False  # importing typing for this name would cost 4 ms at each start
if TYPE_CHECKING:
    from typing import IO

OLDEST = (3, 11)
NEEDED_MIB = 200  # the environment takes 80 MiB, its downloads and the replaced one as much again
PREFLIGHT, INTERRUPTED = 3, 130

REPO = os.path.dirname(os.path.realpath(__file__))
REQUIREMENTS = os.path.join(REPO, "requirements.lock")


class Refusal(Exception):
    """Why the kit cannot start: one sentence, and the way out."""

    def __init__(self, what: str, next_step: str) -> None:
        super().__init__(what)
        self.next_step = next_step


def main() -> None:
    """Run the kit: at once inside its environment, else by way of making it."""
    for closed in ("stdout", "stderr"):
        if getattr(sys, closed) is None:  # `>&-`
            setattr(sys, closed, open(os.devnull, "w"))  # noqa: SIM115 - for the life of the process
    if sys.version_info < OLDEST:
        raise Refusal(
            "this is Python {}.{}, the kit needs {}.{} or newer".format(*sys.version_info[:2], *OLDEST),
            "run `{} {}`".format(newer_python() or "python3.12", " ".join([sys.argv[0], *sys.argv[1:]])),
        )
    venv = find_environment()
    if venv is None:
        if sys.argv[1:3] == ["completion", "words"]:  # a Tab in a shell must not install anything
            return
        venv = make_environment(choose_place(), REQUIREMENTS)
    if os.path.realpath(sys.prefix) == os.path.realpath(venv):
        sys.path.insert(0, REPO)
        try:
            from exl3kit.cli import main as run
        except ImportError as error:
            raise Refusal(f"{venv} is damaged: {error}", f"`rm -r '{venv}'`, then start again") from error
        run()
        return
    sys.stdout.flush()
    # -I: neither PYTHONPATH nor the current folder nor PYTHONDONTWRITEBYTECODE reaches the kit (without .pyc files a
    # start takes twice as long).
    os.execv(python_of(venv), [python_of(venv), "-I", os.path.realpath(__file__), *sys.argv[1:]])


def newer_python() -> "str | None":
    """Name of an interpreter on PATH that is new enough."""
    from shutil import which

    for minor in (13, 12, 11, 14, 15):
        if which(f"python3.{minor}"):
            return f"python3.{minor}"
    return None


# ---- which environment -----------------------------------------------------------------------------------------------


def python_of(venv: str) -> str:
    return os.path.join(venv, "bin", "python")


def marker_of(venv: str) -> str:
    return os.path.join(venv, "kit-marker")


def identity(venv: str, requirements: str) -> str:
    """What the marker of a usable environment says: hash of the requirements, interpreter that made it, CPU.

    The interpreter is the resolved path (python3.11, not python3), so an upgrade of the distribution is noticed.
    """
    from hashlib import sha256

    try:
        with open(requirements, "rb") as file:
            digest = sha256(file.read()).hexdigest()
    except OSError as error:
        name = os.path.basename(requirements)
        raise Refusal(f"{name} cannot be read: {error}", f"restore it with `git checkout -- {name}`") from error
    return f"{digest}\n{os.path.realpath(python_of(venv))}\n{os.uname().machine}\n"


def usable(venv: str, requirements: str) -> bool:
    """Whether the environment is complete and made from today's requirements."""
    try:
        with open(marker_of(venv)) as file:
            marker = file.read()
    except OSError:
        return False
    return marker == identity(venv, requirements) and os.access(python_of(venv), os.X_OK)


def places() -> "list[str]":
    """Where the environment may be: in the repository, or in the user's cache when the repository is read-only."""
    from hashlib import sha256

    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):
        cache = os.path.join(os.path.expanduser("~"), ".cache")
    name = "venv-" + sha256(REPO.encode("utf-8", "surrogateescape")).hexdigest()[:12]
    return [os.path.join(REPO, ".venv"), os.path.join(cache, "exl3kit", name)]


def find_environment() -> "str | None":
    for venv in places():
        if usable(venv, REQUIREMENTS):
            return venv
    return None


def choose_place() -> str:
    """Where to make the environment."""
    at_home, in_cache = places()
    if os.access(REPO, os.W_OK):
        return at_home
    try:
        os.makedirs(os.path.dirname(in_cache), exist_ok=True)
    except OSError as error:
        raise Refusal(
            f"neither {REPO} nor the cache can be written: {error}", "set XDG_CACHE_HOME to a writable folder"
        ) from error
    return in_cache


# ---- making it -------------------------------------------------------------------------------------------------------


def make_environment(venv: str, requirements: str) -> str:
    """Make the environment and give back its path; a second start waits for the first and uses what that one made."""
    import fcntl

    try:
        with open(venv + "-lock", "w") as lock:
            wait_for(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not usable(venv, requirements):
                replace_environment(venv, requirements)
    except OSError as error:
        raise Refusal(f"{venv} could not be made: {error}", "check room and permissions there") from error
    return venv


def replace_environment(venv: str, requirements: str) -> None:
    """Make the environment beside its place, then put it there; only the holder of the file lock may."""
    from contextlib import suppress
    from glob import escape, glob
    from shutil import rmtree

    for left_over in glob(escape(venv) + "-new-*"):
        with suppress(OSError):  # the pip of a start that was killed may still write into it
            remove(left_over)
    beside = f"{venv}-new-{os.getpid()}"
    try:
        install(beside, requirements, final=venv)
        if os.path.lexists(venv):
            replaced = f"{venv}-new-old{os.getpid()}"
            os.rename(venv, replaced)
            remove(replaced)
        os.rename(beside, venv)
    except BaseException:
        rmtree(beside, ignore_errors=True)
        raise


def remove(path: str) -> None:
    """Remove what stands there, of whatever kind; of a link only the link."""
    from shutil import rmtree

    if os.path.isdir(path) and not os.path.islink(path):
        rmtree(path)
    else:
        os.unlink(path)


def wait_for(lock: "IO[str]", flags: int, deadline: float = 900.0) -> None:
    """Take the file lock; the kernel gives it back when its owner ends, however it ends."""
    import fcntl
    import time

    started = time.monotonic()
    while True:
        try:
            fcntl.flock(lock, flags)
            return
        except BlockingIOError:
            if time.monotonic() - started > deadline:
                raise Refusal(
                    f"another start of the kit has been preparing the environment for {deadline:.0f} s",
                    f"look for it with `fuser -v {lock.name}` and end it",
                ) from None
            say("waiting for another start of the kit that prepares the environment")
            time.sleep(0.2)


def install(venv: str, requirements: str, final: str) -> None:
    """Make a complete environment at `venv`, ready to be renamed to `final`."""
    from shutil import disk_usage, which

    free = disk_usage(os.path.dirname(venv)).free >> 20
    if free < NEEDED_MIB:
        raise Refusal(
            f"only {free} MiB free at {os.path.dirname(venv)}, the kit's environment needs {NEEDED_MIB}",
            "make room there",
        )
    uv = which("uv")
    say("first use: preparing {} ({})".format(final, "uv" if uv else "pip"))
    failure = with_uv(uv, venv, requirements) if uv else "no uv"
    if failure:
        if uv:
            say(f"uv could not do it ({failure}); trying pip")
        with_pip(venv, requirements)
    correct_paths(venv, final)
    with open(marker_of(venv), "w") as file:
        file.write(identity(venv, requirements))
    say("environment ready")
    say("")


def with_uv(uv: str, venv: str, requirements: str) -> str:
    """Install with uv; an empty answer means that it worked, else it is the reason."""
    code, tail = follow([uv, "venv", "--quiet", "--prompt", ".venv", "--python", sys.executable, venv])
    if code == 0:
        hashed = ["--require-hashes", "--compile-bytecode", "--link-mode", "copy", "-r", requirements]
        code, tail = follow([uv, "pip", "install", "--python", python_of(venv), *hashed])
    return "" if code == 0 else (tail or f"exit code {code}").splitlines()[-1]


def with_pip(venv: str, requirements: str) -> None:
    """Install with Python's own venv and pip."""
    from importlib.util import find_spec
    from shutil import rmtree

    rmtree(venv, ignore_errors=True)
    version = "{}.{}".format(*sys.version_info[:2])
    if find_spec("venv") is None or find_spec("ensurepip") is None:
        raise Refusal(
            f"Python {version} has no complete venv module here",
            f"`sudo apt install python3-venv` (or python{version}-venv), or install uv",
        )
    code, tail = follow([sys.executable, "-m", "venv", "--prompt", ".venv", venv])
    if code != 0:
        raise Refusal(reason("python -m venv", code, tail), way_out(tail))
    # pip compiles what it installs, also where PYTHONDONTWRITEBYTECODE is set.
    command = [python_of(venv), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"]
    code, tail = follow([*command, "--require-hashes", "-r", requirements], count(requirements))
    if code != 0:
        raise Refusal(reason("pip", code, tail), way_out(tail))


def reason(program: str, code: int, tail: str) -> str:
    """What went wrong: in the words of the last try where the index was silent, for pip then finds no version."""
    from re import findall, split, sub

    silent = findall(r"Retry\(total=0,.* after connection broken by '(.*)': /", tail)
    if silent:
        cause = sub(r"[\"']\)$", "", split(r"[)>]: ", silent[-1], maxsplit=1)[-1])
        return f"the kit's packages are not here, and the package index does not answer ({cause})"
    lines = [line for line in tail.splitlines() if "error" in line.lower()] or tail.splitlines()
    return "{} ended with exit code {}: {}".format(program, code, lines[-1].strip() if lines else "it said nothing")


def way_out(tail: str) -> str:
    """The next step for what pip said."""
    text = tail.lower()
    if "no space left" in text:
        return f"make room at {REPO} and in the temporary folder"
    if "hashes" in text and "match" in text:
        return "a download differs from requirements.lock: check the package index in use (`pip config list`)"
    offline = ("connection", "resolution", "timed out", "no matching distribution", "unreachable", "proxy")
    if any(word in text for word in offline):
        step = "the first start needs a package index: check network and proxy (`pip config list`), then start again"
        return step + "; where there is none: docs/air-gapped.md"
    return f"start again; if it stays, `{sys.executable} -m pip --version` tells which pip this is"


def correct_paths(venv: str, final: str) -> None:
    """Replace the building place by the final one in the scripts of `bin`, which hold absolute paths."""
    for entry in os.scandir(os.path.join(venv, "bin")):
        if entry.is_file(follow_symlinks=False):
            with open(entry.path, "rb") as file:
                content = file.read()
            changed = content.replace(os.fsencode(venv), os.fsencode(final))
            if changed != content:
                with open(entry.path, "wb") as file:
                    file.write(changed)


# ---- saying ----------------------------------------------------------------------------------------------------------


def count(requirements: str) -> int:
    """How many distributions the requirements name for this platform."""
    with open(requirements, encoding="utf-8") as file:
        return sum("==" in line and "win32" not in line for line in file)


def follow(command: "list[str]", total: int = 0) -> "tuple[int, str]":
    """Run a program and show how far it is, of `total` packages; gives its exit code and its last 20 lines."""
    import subprocess

    environment = {
        k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "PIP_REQUIRE_VIRTUALENV")
    }
    lines: list[str] = []
    seen = 0
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        universal_newlines=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines = [*lines[-19:], line.rstrip()]
            if line.startswith(("Collecting ", "Processing ")):
                seen += 1
                name = os.path.basename(line.split()[1]).split("-py3-")[0].split("-cp3")[0].replace("==", "-")
                say(f"  {seen:2d}/{total} {name}", passing=True)
            elif line.startswith(("Installing collected", "Resolved ", "Prepared ", "Installed ")):
                say("  " + line.split(":")[0].strip(), passing=True)
            elif line.lstrip().startswith("WARNING: Retrying"):
                say("  the package index does not answer: trying again", passing=True)
    return process.returncode, "\n".join(lines)


_said = [""]


def say(text: str, passing: bool = False) -> None:
    """One line of progress on stderr: a terminal shows passing ones in place, anything else a plain line each."""
    if text == _said[0]:
        return
    previous, _said[0] = _said[0], text
    shown = text if text.startswith(" ") or not text else "kit: " + text
    if not sys.stderr.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        if text:
            sys.stderr.write(shown + "\n")
    else:
        if previous:
            sys.stderr.write("\r\x1b[K" if passing or previous.startswith(" ") else "\n")
        sys.stderr.write(shown[: columns() - 1] if passing else shown)
    sys.stderr.flush()


def columns() -> int:
    """Columns of the terminal: a passing line that is wrapped could not be taken back."""
    try:
        return os.get_terminal_size(2).columns or 80
    except OSError:
        return 80


if __name__ == "__main__":
    try:
        main()
    except Refusal as refusal:
        sys.stderr.write(f"kit: {refusal}\n  next: {refusal.next_step}\n")
        sys.exit(PREFLIGHT)
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted\n")
        sys.exit(INTERRUPTED)
