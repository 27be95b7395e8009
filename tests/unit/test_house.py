"""The house rules that a machine can check: lint, types, sizes, line endings, and nothing of the machine at hand."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from exl3kit import lock

REPOSITORY = Path(__file__).resolve().parents[2]


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), cwd=REPOSITORY, capture_output=True, text=True)


def tracked() -> list[str]:
    """Every file that git would hand on: committed ones, and new ones that it does not ignore."""
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if listed.returncode != 0:
        pytest.skip("not a git checkout: which files belong to the repository is not known")
    return [name for name in listed.stdout.split("\0") if name and (REPOSITORY / name).is_file()]


def texts() -> list[tuple[str, bytes]]:
    contents = [(name, (REPOSITORY / name).read_bytes()) for name in tracked()]
    return [(name, content) for name, content in contents if b"\0" not in content[:8000]]


def test_ruff_is_clean() -> None:
    done = run(sys.executable, "-m", "ruff", "check", "--quiet", "--output-format=concise", ".")
    assert done.returncode == 0, done.stdout + done.stderr


def test_mypy_strict_is_clean() -> None:
    done = run(sys.executable, "-m", "mypy")
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_of_the_machine_is_in_the_repository() -> None:
    """Given what this machine is configured with, then no mirror, registry or path of it stands in any text file.

    Lock files of Python requirements are left out: their hashes are checked, and they name no index.
    """
    pattern = re.compile("|".join(sorted(machine_marks())).encode())
    found = [
        f"{name}:{content.count(bytes([10]), 0, match.start()) + 1}: {match.group().decode()}"
        for name, content in texts()
        if not name.endswith(".lock")
        for match in pattern.finditer(content)
    ]
    assert not found, found


def machine_marks() -> set[str]:
    """Patterns for hosts and folders that are this machine's own."""
    settings = [
        *Path("/etc/apt").glob("sources.list*"),
        *Path("/etc/apt").glob("sources.list.d/*"),
        Path("/etc/pip.conf"),
    ]
    settings += [
        Path.home() / name for name in (".pip/pip.conf", ".config/pip/pip.conf", ".config/uv/uv.toml", ".npmrc")
    ]
    text = "\n".join(file.read_text(errors="replace") for file in settings if file.is_file())
    text += "\n".join(value for key, value in os.environ.items() if key.startswith(("PIP_", "UV_", "NPM_CONFIG")))
    hosts = set(re.findall(r"https?://(?:[^/@\s]*@)?([A-Za-z0-9.-]+\.[A-Za-z]+)", text))
    folders = set(re.findall(r"(?:file://|[=\s])(/[\w.+-]+/[\w.+/-]+)", text))
    folders = {folder for folder in folders if not folder.startswith(("/etc/", "/usr/share/"))} | {
        str(REPOSITORY) + "/"
    }
    if Path.home() != Path("/root"):  # every container has that one
        folders.add(f"{Path.home()}/")
    return {re.escape(mark) for mark in hosts | folders}


def test_the_machine_check_would_find_something() -> None:
    """Given the check above, then it looks for at least this checkout's own folder."""
    assert re.escape(str(REPOSITORY) + "/") in machine_marks()


def test_only_models_are_large() -> None:
    large = [name for name in tracked() if (REPOSITORY / name).stat().st_size > 1_000_000]
    assert [name for name in large if not name.startswith("models/")] == []


def test_text_has_unix_line_endings_and_ends_with_one() -> None:
    for name, content in texts():
        assert b"\r" not in content, f"{name} has a carriage return"
        assert not content or content.endswith(b"\n") or name.endswith(".json"), f"{name} does not end with a newline"


def test_no_file_of_the_build_context_is_executable() -> None:
    """Given downloads that lose modes (zip), then the stamp cannot depend on them: no file of the context has one."""
    assert [entry.path for entry in lock.context_files() if entry.executable] == []


def test_every_tracked_file_of_the_overlay_is_built_or_known_not_to_be() -> None:
    """Given a new kind of file in overlay/, then the build context lets it in, or it is documentation."""
    built = {entry.path for entry in lock.context_files()}
    outside = {name for name in tracked() if name.startswith("overlay/")} - built
    assert {name for name in outside if not name.endswith(".md")} == set()


def test_direct_dependencies_stay_few_and_are_all_locked() -> None:
    """Given pyproject.toml, then it has ten direct dependencies at most, each pinned with hashes in the lock."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    names = [re.split(r"[<>=!~\[; ]", text)[0] for text in project["project"]["dependencies"]]
    assert len(names) <= 10
    for file in ("requirements.lock", "requirements-dev.lock"):
        entries = re.split(r"\n(?=\S)", (REPOSITORY / file).read_text())
        locked = {
            re.sub(r"[-_.]+", "-", entry.partition("==")[0].lower()) for entry in entries if "--hash=sha256:" in entry
        }
        assert set(names) <= locked
        assert all("--hash=sha256:" in entry for entry in entries if "==" in entry)
        assert "://" not in (REPOSITORY / file).read_text()


def test_modules_of_suites_that_run_in_one_session_have_names_of_their_own() -> None:
    """Given pytest's imports by base name, then no two test modules of unit, rig and gpu share one."""
    modules = [path for suite in ("unit", "rig", "gpu") for path in (REPOSITORY / "tests" / suite).rglob("*.py")]
    names = [path.name for path in modules if path.name != "conftest.py"]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []


def test_start_up_imports_nothing_heavy() -> None:
    """Given `kit --help`, then pydantic, docker, pillow and yaml are not imported for it: that keeps it under 0.3 s."""
    program = (
        "import sys; sys.argv = ['kit', '--help']\nfrom exl3kit.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print([name for name in ('pydantic', 'docker', 'PIL', 'yaml', 'jinja2') if name in sys.modules])"
    )
    done = run(sys.executable, "-c", program)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout[-300:] + done.stderr


def test_no_shell_in_the_kit() -> None:
    """Given the kit's own modules, then none runs a command through a shell: argv lists end to end."""
    for path in [REPOSITORY / "kit.py", *(REPOSITORY / "exl3kit").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                shell = [word for word in node.keywords if word.arg == "shell"]
                assert called not in ("os.system", "os.popen", "subprocess.getoutput") and not shell, (
                    f"{path}: {called}"
                )
