"""The stamp: the same for the same tree wherever and however it lies, another for any input that changed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from exl3kit import lock, paths, recipes
from exl3kit.errors import KitError

REPOSITORY = Path(__file__).resolve().parents[2]
NEEDED = (".gitattributes", ".gitignore", "Dockerfile", "exl3kit", "recipes", "models", "overlay", "locks", "compose")


def kit(tree: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The kit of `tree`, run there."""
    command = [sys.executable, "-m", "exl3kit.cli", *arguments]
    return subprocess.run(command, cwd=tree, env={**os.environ, **environment}, capture_output=True, text=True)


def plan(tree: Path, *arguments: str) -> dict[str, Any]:
    """What `kit build demo --dry-run --json` says in a tree."""
    done = kit(tree, "build", "demo", "--dry-run", "--json", *arguments, XDG_CACHE_HOME=str(tree.parent / "cache"))
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def stamp(tree: Path) -> str:
    return str(plan(tree)["stamp"])


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main"]
    done = subprocess.run(["git", *who, *arguments], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what the stamp may depend on and of the kit, outside git."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in NEEDED:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__", ".*cache"))
        else:
            shutil.copy(source, tree / name)
    return tree


# ---- the same stamp --------------------------------------------------------------------------------------------------


def other_path(tree: Path) -> Path:
    return Path(shutil.copytree(tree, tree.parent / "ein anderer Ordner/mit Abständen/x"))


def other_clock(tree: Path) -> Path:
    for file in tree.rglob("*"):
        os.utime(file, (1, 1))
    return tree


def other_umask(tree: Path) -> Path:
    for file in tree.rglob("*"):
        file.chmod(0o700 if file.is_dir() or file.stat().st_mode & 0o100 else 0o600)
    return tree


def other_order(tree: Path) -> Path:
    # Folders list their entries in the order of creation on some file systems: create them backwards.
    fresh = tree.parent / "backwards"
    for file in sorted(tree.rglob("*"), reverse=True):
        if file.is_file():
            (fresh / file.relative_to(tree)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, fresh / file.relative_to(tree))
    return fresh


def committed(tree: Path) -> Path:
    git(tree, "init", "-q")
    git(tree, "add", "-A")
    git(tree, "commit", "-q", "-m", "all")
    return tree


def git_worktree(tree: Path) -> Path:
    git(committed(tree), "worktree", "add", "-q", str(tree.parent / "worktree"))
    return tree.parent / "worktree"


def git_clone_with_windows_settings(tree: Path) -> Path:
    """A clone by somebody whose git writes CRLF and ignores modes: .gitattributes has the last word."""
    settings = ["-c", "core.autocrlf=true", "-c", "core.fileMode=false", "-c", "core.eol=crlf"]
    git(committed(tree).parent, *settings, "clone", "-q", str(tree), "clone")
    return tree.parent / "clone"


def zip_download_that_lost_its_modes(tree: Path) -> Path:
    archive = tree.parent / "download.zip"
    git(committed(tree), "archive", "--format=zip", "--prefix=exl3kit-main/", "-o", str(archive), "HEAD")
    with zipfile.ZipFile(archive) as download:
        download.extractall(tree.parent)  # Python's own extraction keeps no modes
    return tree.parent / "exl3kit-main"


def file_system_without_modes(tree: Path) -> Path:
    for file in tree.rglob("*"):
        file.chmod(0o777)
    return tree


def caches_and_backups(tree: Path) -> Path:
    package = tree / "overlay/exl3_vllm"
    for litter in (
        "__pycache__/linear.cpython-311.pyc",
        ".linear.py.swp",
        "linear.py~",
        "#linear.py#",
        ".mypy_cache/x.json",
    ):
        (package / litter).parent.mkdir(exist_ok=True)
        (package / litter).write_text("litter")
    (package / ".#linear.py").symlink_to("nowhere")
    (tree / "overlay/exl3_vllm.egg-info").mkdir()
    (tree / "overlay/exl3_vllm.egg-info/SOURCES.txt").write_text("litter")
    return tree


def what_is_not_built(tree: Path) -> Path:
    for name in ("tests/unit/test_new.py", "docs/new.md", "README.md", "compose/new.j2", "scripts/new.py", "kit.py"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("new\n")
    recipe = tree / "recipes/demo.yaml"
    recipe.write_text(recipe.read_text().replace("port: 8000", "port: 8001").replace("# The embedded", "# Another"))
    (tree / "models/demo-dense/README.md").write_text("new\n")
    return tree


@pytest.mark.parametrize(
    "arrange",
    [
        other_path,
        other_clock,
        other_umask,
        other_order,
        committed,
        git_worktree,
        git_clone_with_windows_settings,
        zip_download_that_lost_its_modes,
        file_system_without_modes,
        caches_and_backups,
        what_is_not_built,
    ],
)
def test_case_11_the_stamp_stays(tree: Path, arrange: Callable[[Path], Path]) -> None:
    """Given a tree, when it lies elsewhere, came another way, or changed outside the image, then its stamp stays."""
    before = stamp(tree)
    assert stamp(arrange(tree)) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_case_11_the_stamp_stays_for_another_user(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a tree that nobody may read, when nobody asks, then the stamp is that of root."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        readable = Path(shutil.copytree(tree, Path(folder, "tree")))
        monkeypatch.setattr(paths, "LOCKS", readable / "locks")
        recipe = recipes.load(str(readable / "recipes/demo.yaml"))
        assert as_nobody(lambda: lock.make_lock(recipe, repo=readable).stamp) == lock.make_lock(recipe, repo=tree).stamp


def as_nobody(ask: Callable[[], str]) -> str:
    """The answer of a child process that became the user nobody, with a umask of its own."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        os.umask(0o077)
        try:
            os.write(writer, ask().encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return answer


# ---- another stamp, and why ------------------------------------------------------------------------------------------


@pytest.fixture
def changed(tree: Path) -> Iterator[Callable[[], list[str]]]:
    """Call it after a change: the stamp must be another; gives the sentences that explain it."""
    before = stamp(tree)

    def explained() -> list[str]:
        said = plan(tree, "--since", before)
        assert said["stamp"] != before
        assert said["tag"] == f"exl3kit:{said['stamp'][:12]}"
        changes: list[str] = said["changes"]
        return changes

    yield explained


def test_one_byte_changes_the_stamp(tree: Path, changed: Callable[[], list[str]]) -> None:
    """Given a file of the overlay, when one byte of it changes, then the stamp does, and the file is named."""
    file = tree / "overlay/exl3_vllm/linear.py"
    content = bytearray(file.read_bytes())
    content[10] ^= 1
    file.write_bytes(content)
    assert changed() == ["overlay/exl3_vllm/linear.py changed"]


def test_the_executable_bit_changes_the_stamp(tree: Path, changed: Callable[[], list[str]]) -> None:
    (tree / "overlay/exl3_vllm/linear.py").chmod(0o755)
    assert changed() == ["overlay/exl3_vllm/linear.py became executable"]


def test_files_that_come_and_go_change_the_stamp(tree: Path, changed: Callable[[], list[str]]) -> None:
    """Given a file that git does not know, then it counts all the same: it would be built."""
    (tree / "overlay/exl3_vllm/extra.py").write_text("")
    (tree / "overlay/exl3_vllm/linear.py").unlink()
    assert changed() == ["overlay/exl3_vllm/extra.py added", "overlay/exl3_vllm/linear.py removed"]


def test_pins_change_the_stamp(tree: Path, changed: Callable[[], list[str]]) -> None:
    """Given the pins, when a wheel and a Debian package move, then both are named with their versions."""
    for file in tree.glob("locks/bookworm-vllm-cpu-*.json"):
        text = file.read_text().replace('"aiohttp", "version": "3.14.5"', '"aiohttp", "version": "3.14.6"')
        file.write_text(text.replace('"libnuma1": "2.0.16-1"', '"libnuma1": "2.0.16-2"'))
    told = changed()
    assert "wheel aiohttp changed from 3.14.5 to 3.14.6" in told
    assert "Debian package libnuma1 changed from 2.0.16-1 to 2.0.16-2" in told


def test_the_image_part_of_the_recipe_changes_the_stamp(tree: Path) -> None:
    """Given recipes for GPUs, when arch, rates or codebooks differ, then so does the lock."""
    base = json.loads(kit(tree, "lock", "demo", "--json").stdout)
    for key, value in (("arch", ["12.0"]), ("rates", [4]), ("codebooks", ["mcg"])):
        assert lock.explain(base, {**base, key: value}) == [f"{key} changed from [] to {json.dumps(value)}"]
        assert lock.Lock({**base, key: value}).stamp != lock.Lock(base).stamp


def test_case_2_a_changed_kernel_is_another_stamp_of_the_images_that_compile_it(tree: Path) -> None:
    """Given a change to a kernel, then an image with fat symbols gets another stamp, and a CPU image keeps its own."""
    cpu = recipes.load("demo")
    gpu = cpu.model_copy(
        update={"image": cpu.image.model_copy(update={"arch": ["12.1"], "rates": [4], "codebooks": ["mcg"]})}
    )
    cpu_before, gpu_before = lock.make_lock(cpu, repo=tree), lock.make_lock(gpu, repo=tree)
    (tree / "overlay/csrc/mainloop.cuh").write_text("// changed\n")
    assert lock.make_lock(cpu, repo=tree).stamp == cpu_before.stamp
    told = lock.explain(gpu_before.data, lock.make_lock(gpu, repo=tree).data)
    assert told == ["overlay/csrc/mainloop.cuh changed"]


def test_build_says_since_when_in_words(tree: Path, tmp_path: Path) -> None:
    """Given the lock of before in a file, when a kernel changed, then the human output names it."""
    old = tmp_path / "old.json"
    old.write_text(kit(tree, "lock", "demo", "--json").stdout)
    (tree / "overlay/pyproject.toml").open("a").write("\n")
    done = kit(tree, "build", "demo", "--dry-run", "--since", str(old))
    assert done.returncode == 0
    assert "1 input changed" in done.stdout and "overlay/pyproject.toml changed" in done.stdout


def test_an_unknown_old_stamp_is_a_sentence(tree: Path) -> None:
    done = kit(tree, "build", "demo", "--dry-run", "--since", "0" * 12)
    assert done.returncode == 2
    assert "no lock to compare with" in done.stderr and "Traceback" not in done.stderr


# ---- what cannot be stamped ------------------------------------------------------------------------------------------


def test_a_symbolic_link_is_refused(tree: Path) -> None:
    """Given a symbolic link in the build context, which archives do not carry alike, then it is named."""
    file = tree / "overlay/exl3_vllm/linear.py"
    file.rename(file.with_name("other.py"))
    file.symlink_to("other.py")
    done = kit(tree, "build", "demo", "--dry-run")
    assert done.returncode == 3
    assert "overlay/exl3_vllm/linear.py: a symbolic link in the build context" in done.stderr


def test_windows_line_endings_are_refused(tree: Path) -> None:
    file = tree / "overlay/exl3_vllm/linear.py"
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    done = kit(tree, "build", "demo", "--dry-run")
    assert done.returncode == 3
    assert "overlay/exl3_vllm/linear.py: Windows line endings" in done.stderr and "sed -i" in done.stderr


@pytest.mark.parametrize(
    "name", ["overlay/exl3_vllm/b\udcff.py", "overlay/exl3_vllm/a\nb.py", "overlay/exl3_vllm/\u202ea.py"]
)
def test_a_name_that_nobody_can_read_is_refused(name: str, tree: Path) -> None:
    (tree / name).write_text("")
    done = kit(tree, "build", "demo", "--dry-run")
    assert done.returncode == 3
    assert "a file name of the build context holds a character" in done.stderr


def test_a_context_without_its_beginning_is_refused(tree: Path) -> None:
    """Given a tree that lost its Dockerfile or its overlay, then it has no stamp."""
    for name in ("Dockerfile", "overlay"):
        (tree / name).rename(tree / "away")
        done = kit(tree, "build", "demo", "--dry-run")
        (tree / "away").rename(tree / name)
        assert done.returncode == 3
        assert done.stderr.startswith(f"kit: {name}: part of the build context cannot be read (No such file")


def test_what_cannot_be_read_is_not_passed_over(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a folder and a file that this user may not read, then there is no stamp of the rest."""
    walk, read = os.walk, Path.read_bytes
    denied = tree / "overlay/exl3_vllm"

    def no_folder(top: Path, onerror: Callable[[OSError], None]) -> Iterator[Any]:
        onerror(PermissionError(13, "Permission denied", str(denied)))
        return walk(top)

    def no_file(path: Path) -> bytes:
        if path.name == "__init__.py":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    for target, name, instead in ((os, "walk", no_folder), (Path, "read_bytes", no_file)):
        with monkeypatch.context() as patch, pytest.raises(KitError, match="cannot be read \\(Permission denied"):
            patch.setattr(target, name, instead)
            lock.context_files(tree)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "[]", "{}", '{"lock": 1, "files": [1]}', '{"lock": 1, "base": 1}', "\0"]
)
def test_a_file_that_is_no_lock_is_a_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text(text)
    with pytest.raises(KitError, match=r"this is not a lock|this lock cannot be read"):
        lock.recall(str(tmp_path / "old.json"))


def test_a_cache_that_cannot_be_made_costs_no_stamp(tree: Path) -> None:
    """Given a cache below a file, then the plan is made all the same, and looking back names the way out."""
    done = kit(tree, "build", "demo", "--dry-run", XDG_CACHE_HOME="/dev/null/cache")
    assert done.returncode == 0, done.stderr
    done = kit(tree, "build", "demo", "--dry-run", "--since", "0" * 64, XDG_CACHE_HOME="/dev/null/cache")
    assert (done.returncode, "set XDG_CACHE_HOME" in done.stderr) == (3, True)


def test_an_unknown_pin_is_refused_with_the_command(tree: Path) -> None:
    """Given a wheel whose hash nobody could look up, then there is no stamp, and `kit lock --update` is named."""
    for file in tree.glob("locks/bookworm-vllm-cpu-*.json"):
        data = json.loads(file.read_text())
        data["wheels"][3]["sha256"] = None
        file.write_text(json.dumps(data))
    done = kit(tree, "build", "demo", "--dry-run", "--json")
    assert done.returncode == 3
    assert json.loads(done.stdout)["exit_code"] == 3
    assert "kit lock --update demo" in done.stderr and "Traceback" not in done.stderr


# ---- the form of the lock --------------------------------------------------------------------------------------------


def test_the_lock_is_canonical_json_and_its_hash_the_stamp(tree: Path) -> None:
    """Given the lock as printed, when anybody canonicalises and hashes it, then the stamp comes out."""
    printed = json.loads(kit(tree, "lock", "demo", "--json").stdout)
    assert lock.Lock(printed).stamp == stamp(tree)
    assert json.loads(lock.canonical(printed)) == printed
    assert not any(str(tree) in text for text in (json.dumps(printed), lock.canonical(printed).decode()))


def test_the_order_of_a_list_is_no_input() -> None:
    """Given the same capabilities, rates and codebooks in another order, then the build arguments are the same."""
    said = []
    for order in (1, -1):
        arch, rates, books = ["9.0", "12.0", "12.1"][::order], [2, 3.5][::order], ["mcg", "mul1"][::order]
        gpu = f"image={{base: 'a:b', vllm: 0.33.0, arch: {arch}, rates: {rates}, codebooks: {books}}}"
        image = recipes.load("demo", ["image.base=null", gpu]).image
        said.append((lock.build_args(image), lock.sorted_arch(image)))
    assert said[0] == said[1]
    assert said[0][0] == {"EXL3_ARCH": "9.0;12.0;12.1", "EXL3_RATES": "2;3.5", "EXL3_CODEBOOKS": "mcg;mul1"}


def test_two_recipes_with_one_image_part_share_a_stamp(tree: Path) -> None:
    other = json.loads(kit(tree, "build", "demo-tp2", "--dry-run", "--json").stdout)
    assert other["stamp"] == stamp(tree)
