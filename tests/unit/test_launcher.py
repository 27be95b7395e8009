"""kit.py for real: it makes its environment from the lock, once, whatever happens meanwhile, and then starts fast."""

from __future__ import annotations

import ast
import os
import pty
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
NEEDED = ("kit.py", "requirements.lock", "exl3kit", "recipes", "models", "overlay", "locks")


def copy_of_the_kit(target: Path) -> Path:
    target.mkdir(parents=True)
    for name in NEEDED:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__", ".*_cache"))
        else:
            shutil.copy(source, target / name)
    return target


def start(home: Path, *arguments: str, **options: object) -> subprocess.Popen[str]:
    command = [sys.executable, str(home / "kit.py"), *arguments]
    given: dict[str, object] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.Popen(command, **given)  # type: ignore[call-overload,no-any-return]


def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def kit(home: Path, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return finish(start(home, *arguments, **options))


def pretending(home: Path, pretence: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run kit.py in an interpreter that lacks something."""
    run = f"runpy.run_path({str(home / 'kit.py')!r}, run_name='__main__')"
    program = f"import runpy, sys; {pretence}; sys.argv = ['kit.py', '--help']; {run}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, **options)  # type: ignore[call-overload,no-any-return]


def environments(home: Path) -> list[str]:
    return sorted(path.name for path in home.glob(".venv*") if path.is_dir())


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A kit in a folder with spaces whose first start was interrupted, and whose next two came at the same time.

    Links to nowhere stand at the place of its environment, and where a killed start left something.
    """
    home = copy_of_the_kit(tmp_path_factory.mktemp("launcher") / "a folder, with spaces")
    for name in (".venv", ".venv-new-old1"):
        (home / name).symlink_to("/nowhere/at/all")
    interrupted = start(home, "--help", start_new_session=True)
    deadline = time.monotonic() + 60
    while not environments(home):
        assert time.monotonic() < deadline and interrupted.poll() is None, "no environment was begun"
        time.sleep(0.05)
    os.killpg(interrupted.pid, signal.SIGINT)
    done = finish(interrupted)
    assert (done.returncode, done.stdout) == (130, "")
    assert "interrupted" in done.stderr and "Traceback" not in done.stderr
    assert environments(home) == [], "half an environment was left behind"
    both = [start(home, "recipe", "list"), start(home, "recipe", "list")]
    for done in [finish(process) for process in both]:
        assert done.returncode == 0, done.stderr
        assert "demo" in done.stdout
    yield home
    shutil.rmtree(home.parent)


def test_two_starts_at_once_make_one_environment(home: Path) -> None:
    """Given an interrupted first start and two more at once, then one whole environment stands."""
    assert environments(home) == [".venv"]


def test_scripts_of_the_environment_name_its_final_place(home: Path) -> None:
    """Given an environment made beside its place, when it was renamed, then its scripts and pip work from there."""
    done = subprocess.run([home / ".venv/bin/python", "-m", "pip", "--version"], capture_output=True, text=True)
    assert done.returncode == 0
    for script in (home / ".venv/bin").iterdir():
        if script.is_file() and not script.is_symlink():
            assert b"-new-" not in script.read_bytes(), script


def test_it_runs_from_any_folder_and_through_a_symbolic_link(home: Path, tmp_path: Path) -> None:
    """Given a link to kit.py elsewhere, when it is started from a third folder, then it finds its repository."""
    link = tmp_path / "kit"
    link.symlink_to(home / "kit.py")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = subprocess.run([sys.executable, link, "recipe", "list"], cwd=elsewhere, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout


def test_a_hostile_environment_does_not_reach_it(home: Path, tmp_path: Path) -> None:
    """Given modules in the way of the kit's on PYTHONPATH and in the current folder, then they are not imported."""
    for name in ("typer.py", "exl3kit.py"):
        (tmp_path / name).write_text("raise SystemExit('the wrong module')")
    done = kit(home, "--help", cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&-"])
def test_closed_streams_do_not_stop_it(closed: str, home: Path) -> None:
    line = f'"$0" kit.py recipe list {closed}'
    done = subprocess.run(["bash", "-c", line, sys.executable], cwd=home, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_damaged_environment_is_a_sentence(home: Path) -> None:
    """Given an environment that lost a package, when the kit starts, then it says so and how to make it anew."""
    (package,) = home.glob(".venv/lib/python3.*/site-packages/typer")
    package.rename(home / "away")
    try:
        done = kit(home, "recipe", "list")
    finally:
        (home / "away").rename(package)
    assert done.returncode == 3
    assert done.stderr == (
        f"kit: {home}/.venv is damaged: No module named 'typer'\n  next: `rm -r '{home}/.venv'`, then start again\n"
    )


def test_later_starts_are_fast(home: Path) -> None:
    """Given an environment, when the kit starts, then it answers in under 0.3 s, though the machine forbids bytecode.

    Measured in seconds of CPU, so that a busy machine does not fail the test; wall clock is the same on an idle one.
    """
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    seconds = []
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert kit(home, "--help", env=environment).returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 0.3, seconds


@pytest.mark.parametrize(("terminal", "renewed"), [("dumb", False), ("xterm", True)])
def test_passing_lines_are_renewed_in_place_only_where_a_terminal_can(terminal: str, renewed: bool) -> None:
    """Given a terminal of 30 columns, then a passing line fits it, and one without a cursor gets plain lines."""
    program = "import kit; kit.say('first'); kit.say('  1/3 ' + 'x' * 60, passing=True); kit.say('  2/3', passing=True)"
    line = f"stty cols 30; TERM={terminal} '{sys.executable}' -c \"{program}\""
    ours, theirs = pty.openpty()
    subprocess.run(["sh", "-c", line], cwd=REPOSITORY, stdin=theirs, stderr=theirs, check=True)
    os.close(theirs)
    shown = os.read(ours, 4096).decode()
    os.close(ours)
    assert ("\x1b" in shown) == renewed and shown.startswith("kit: first")
    assert ("x" * 60 in shown) != renewed


def test_an_environment_without_its_marker_is_made_again(home: Path) -> None:
    """Given requirements that changed (a pull), then the environment no longer counts and is replaced."""
    before = (home / ".venv").stat().st_ino
    lock = home / "requirements.lock"
    lock.write_text(lock.read_text() + "# one line more\n")
    done = kit(home, "--help")
    assert done.returncode == 0, done.stderr
    assert "preparing" in done.stderr
    assert (home / ".venv").stat().st_ino != before
    assert environments(home) == [".venv"]
    assert "preparing" not in kit(home, "--help").stderr


def test_unreachable_index_is_a_sentence(tmp_path: Path) -> None:
    """Given no package index, when the environment is made, then the sentence names the network, and nothing stays."""
    home = copy_of_the_kit(tmp_path / "kit")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_"))}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "1"}
    environment |= {"UV_INDEX_URL": "http://127.0.0.1:9/simple", "UV_NO_CACHE": "1", "UV_HTTP_TIMEOUT": "2"}
    done = kit(home, "--help", env=environment)
    assert done.returncode == 3
    assert "check network and proxy" in done.stderr and "Traceback" not in done.stderr
    assert "kit: the kit's packages are not here, and the package index does not answer (Failed to " in done.stderr
    assert done.stderr.endswith("; where there is none: docs/air-gapped.md\n")
    assert "No matching distribution" not in done.stderr  # as if it had looked
    assert "the package index does not answer: trying again" in done.stderr  # or the wait looks like a kit that hangs
    assert environments(home) == []


def test_missing_venv_module_names_the_package(tmp_path: Path) -> None:
    """Given a Python whose venv module is a package of its own, as Debian's, then that package is named."""
    home = copy_of_the_kit(tmp_path / "kit")
    done = pretending(home, "sys.modules['ensurepip'] = None", env={**os.environ, "PATH": str(tmp_path)})
    assert done.returncode == 3
    assert "apt install python3-venv" in done.stderr
    assert environments(home) == []


def test_an_old_python_gets_a_sentence(tmp_path: Path) -> None:
    """Given Python 3.10, when the kit starts, then it says so; the file itself parses on 3.6."""
    home = copy_of_the_kit(tmp_path / "kit")
    ast.parse((home / "kit.py").read_text(), feature_version=(3, 6))
    done = pretending(home, "sys.version_info = (3, 10, 12, 'final', 0)")
    assert done.returncode == 3
    assert "this is Python 3.10, the kit needs 3.11 or newer" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_is_a_sentence(tmp_path: Path) -> None:
    """Given 40 MiB of room, when the environment is to be made, then the kit says beforehand how much it needs."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode != 0:
        pytest.skip("this root may not make mount namespaces")
    home = copy_of_the_kit(tmp_path / "kit")
    script = (
        'mount -t tmpfs -o size=40m none "$1/small" && cp -r "$1"/kit/* "$1/small/" && "$2" "$1/small/kit.py" --help'
    )
    (tmp_path / "small").mkdir()
    for name in ("models", "overlay"):
        shutil.rmtree(home / name)
    command = ["unshare", "--mount", "sh", "-c", script, "sh", str(tmp_path), sys.executable]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert "MiB free" in done.stderr and "make room" in done.stderr


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0, reason="a folder that its user cannot write needs another user")
def test_read_only_repository_keeps_its_environment_in_the_cache() -> None:
    """Given a kit that its user may only read, when it starts, then its environment is made in the user's cache."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        home, cache = copy_of_the_kit(Path(folder, "kit")), Path(folder, "cache")
        cache.mkdir()
        shutil.chown(cache, "nobody")
        user = ["setpriv", "--reuid=nobody", "--clear-groups"]
        environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "HOME": str(cache)}
        for _ in range(2):
            command = [*user, "/usr/bin/python3", str(home / "kit.py"), "recipe", "list"]
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            assert done.returncode == 0, done.stderr
        assert "preparing" not in done.stderr
        assert environments(home) == []
        assert len(list(cache.glob("exl3kit/venv-*/bin/python"))) == 1
