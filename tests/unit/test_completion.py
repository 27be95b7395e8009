"""Completion: what may follow which words, and real shells that ask for it when Tab is pressed."""

from __future__ import annotations

import os
import pty
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer

from exl3kit import cli, paths, timings
from exl3kit.cli import candidates, completion

PROGRAM: Any = typer.main.get_command(cli.app)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user who has two nodes in the ssh configuration, one more in known_hosts, a recipe, and a cluster file."""
    ssh = tmp_path / ".ssh"
    (ssh / "more").mkdir(parents=True)
    (ssh / "config").write_text("Include more/*\nHost spark1 *.lan !spark9\n  User x\nHost=workstation\n")
    (ssh / "more" / "one").write_text("host spark2\n")
    (ssh / "known_hosts").write_text(
        "|1|hash= ssh-ed25519 A\n[spark7]:22 ssh-ed25519 A\nspark3,10.0.0.3 ssh-ed25519 A\n"
    )
    (tmp_path / "my.yaml").write_text("recipe: 1\n")
    (tmp_path / "cluster.yaml").write_text("cluster: 1\n")
    (tmp_path / "folder").mkdir()
    for variable in ("HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.delenv("EXL3KIT_SSH_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words(line: str) -> list[str]:
    return [value for value, _ in completion.candidates(PROGRAM, completion.split(line))]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("kit pla", ["plan"]),
        ("kit recipe sh", ["show"]),
        ("kit recipe show demo-t", ["demo-tp2"]),
        ("kit recipe show m", ["my.yaml"]),
        ("kit up my.yaml --no-b", ["--no-build"]),
        ("kit up demo --no-build --no-b", []),
        ("kit up demo --set a=1 --se", ["--set"]),
        ("kit bundle save out.tar demo demo-t", ["demo-tp2"]),
        ("kit build --dry-run demo-t", ["demo-tp2"]),
        ("kit up demo --nodes cl", ["cluster.yaml"]),
        ("kit up demo --nodes spark", ["spark2", "spark1", "spark3"]),
        ("kit up demo --nodes spark1,spark", ["spark1,spark2", "spark1,spark3"]),
        ("kit up demo --nodes=spark1,spark3,w", ["--nodes=spark1,spark3,workstation"]),
        ("kit up demo --nodes local,loc", ["local,local"]),
        ("kit up 'my.y", ["my.yaml"]),
        ("kit up ./f", ["./folder/"]),
        ("kit up ~/m", ["~/my.yaml"]),
        ("kit nonsense de", []),
        ("kit recipe list x", []),
    ],
)
def test_what_may_follow(line: str, expected: list[str], home: Path) -> None:
    assert words(line) == expected


def test_nodes_of_earlier_runs_come_first(home: Path) -> None:
    timings.remember(timings.Run("up", "demo", "far1,far2"), timings.Times({}, 1.0))
    assert [name for name, _ in candidates.nodes("")][:3] == ["local", "far1", "far2"]


def test_an_unreadable_home_has_no_candidates_and_no_traceback(home: Path) -> None:
    (home / ".ssh" / "config").unlink()
    (home / ".ssh" / "config").mkdir()
    (home / "bad.yaml").symlink_to("/nowhere")
    assert "spark1" not in words("kit up demo --nodes ")
    assert "bad.yaml" not in words("kit up ")


def test_tab_is_fast_and_loads_nothing_heavy() -> None:
    """Given a warm cache, then an answer takes under 0.3 s of CPU, and comes without pydantic, rich or docker."""
    program = "import sys; from exl3kit import cli\ntry: cli.main()\nexcept SystemExit: pass\n"
    program += "print([name for name in ('pydantic', 'docker', 'rich', 'yaml') if name in sys.modules])"
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        asked = [sys.executable, "-c", program, "completion", "words", "--", "up", "demo-t"]
        done = subprocess.run(asked, cwd=paths.REPO, capture_output=True, text=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.stdout.split("\t")[0] == "demo-tp2" and done.stdout.splitlines()[-1] == "[]", done
    assert min(seconds) < 0.3, seconds


def test_tab_never_makes_an_environment(tmp_path: Path) -> None:
    """Given a clone that was never started, when Tab is pressed, then nothing is installed."""
    shutil.copy(paths.REPO / "kit.py", tmp_path)
    shutil.copy(paths.REPO / "requirements.lock", tmp_path)
    asked = [sys.executable, tmp_path / "kit.py", "completion", "words", "--", "u"]
    done = subprocess.run(asked, capture_output=True, text=True, env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not list(tmp_path.glob(".venv*"))


# ---- real shells -----------------------------------------------------------------------------------------------------

PRESSES = {
    "kit recipe show demo-t": "kit recipe show demo-tp2 ",
    "kit pla": "kit plan ",
    "kit up demo --nodes spark2,works": "kit up demo --nodes spark2,workstation ",
    "kit up demo --nodes=works": "kit up demo --nodes=workstation ",
    "kit up fol": "kit up folder/",
    "./kit.py recipe show demo-t": "./kit.py recipe show demo-tp2 ",
}


@pytest.fixture
def program(home: Path) -> dict[str, str]:
    """The environment of a user who has `kit` on PATH, and kit.py in the current folder."""
    script = home / "bin" / "kit"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{paths.REPO}" exec "{sys.executable}" -m exl3kit.cli "$@"\n')
    script.chmod(0o755)
    (home / "kit.py").symlink_to(script)
    path = f"{script.parent}:{os.environ['PATH']}"
    return {"PATH": path, "HOME": str(home), "XDG_STATE_HOME": str(home), "TERM": "dumb", "PS1": "$ "}


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, argv: list[str], environment: dict[str, str]) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.execvpe(argv[0], argv, environment)

    def type(self, text: str, until: str, seconds: float = 20.0) -> str:
        """Type something; gives what the terminal shows from then on, once it matches or time is up."""
        os.write(self._fd, text.encode())
        shown, end = "", time.monotonic() + seconds
        while not re.search(until, shown) and (left := end - time.monotonic()) > 0:
            if not select.select([self._fd], [], [], left)[0]:
                break
            shown += os.read(self._fd, 1 << 16).decode(errors="replace").replace("\a", "")
        return shown


@contextmanager
def shell(argv: list[str], environment: dict[str, str], *setup: str) -> Iterator[Terminal]:
    terminal = Terminal(argv, environment)
    try:
        for number, line in enumerate(setup):
            terminal.type(f"{line}; echo 'done'{number}\n", f"done{number}")
        yield terminal
    finally:
        os.kill(terminal.pid, signal.SIGKILL)
        os.waitpid(terminal.pid, 0)


def test_bash_completes(program: dict[str, str]) -> None:
    with shell(["bash", "--norc", "--noprofile", "-i"], program, "source <(kit completion bash)") as bash:
        for typed, expected in PRESSES.items():
            assert expected in bash.type(f"{typed}\t", re.escape(expected)), typed
            bash.type("\x15", r"\$|\r")  # Ctrl-U: an empty line again


@pytest.mark.full
def test_zsh_completes(program: dict[str, str]) -> None:
    setup = ("autoload -Uz compinit", "compinit -u", "source <(kit completion zsh)")
    with shell(["zsh", "-f", "-i"], program, *setup) as zsh:
        for typed, expected in PRESSES.items():
            assert expected in zsh.type(f"{typed}\t", re.escape(expected)), typed
            zsh.type("\x15", r"\r|\$")


@pytest.mark.full
def test_fish_completes(program: dict[str, str]) -> None:
    for typed, expected in PRESSES.items():
        asked = ["fish", "--no-config", "-c", f"kit completion fish | source; complete -C '{typed}'"]
        done = subprocess.run(asked, env=program, capture_output=True, text=True, timeout=60)
        assert expected.split()[-1] in done.stdout.split("\n")[0].split("\t"), (typed, done)
