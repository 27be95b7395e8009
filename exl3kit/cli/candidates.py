"""What may stand in a command line: recipes, their files, nodes. Found without YAML and ssh: Tab must be fast."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

MOST = 200  # files or names that are worth showing
DEPTH = 3  # of files that an ssh configuration includes

Candidate = tuple[str, str]  # the word, and what is said of it


def recipes(incomplete: str) -> list[Candidate]:
    """Shipped recipes with their first comment line, then recipe files and folders that begin like this."""
    from exl3kit import paths

    found = []
    for path in sorted(paths.RECIPES.glob("*.yaml")):
        if path.stem.startswith(incomplete):
            first = path.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
            found.append((path.stem, first.removeprefix("#").strip() if first.startswith("#") else ""))
    return found + files(incomplete, "recipe:")


def nodes(incomplete: str) -> list[Candidate]:
    """`local`, nodes of earlier runs, hosts that ssh knows, and cluster files; after a comma one more name."""
    before, comma, begun = incomplete.rpartition(",")
    named = before.split(",") if comma else []
    known = {"local": "this machine"}
    for name in islice((*used_before(), *ssh_hosts(), *known_hosts()), MOST):
        known.setdefault(name, "")
    found = [(f"{before}{comma}{name}", said) for name, said in known.items()
             if name.startswith(begun) and (name not in named or name == "local")]  # fmt: skip
    return found if comma else found + files(incomplete, "cluster:")


def files(incomplete: str, key: str) -> list[Candidate]:
    """YAML files with a line that begins with `key`, and folders (ending in /), that begin like `incomplete`."""
    folder, slash, begun = incomplete.rpartition("/")
    found = []
    try:
        with os.scandir(os.path.expanduser(folder + slash) or ".") as entries:  # noqa: PTH111 - `~` keeps its spelling
            for entry in sorted(islice(entries, 10 * MOST), key=lambda entry: entry.name):
                if not entry.name.startswith(begun) or (entry.name.startswith(".") and not begun):
                    continue
                if entry.is_dir():
                    found.append((f"{folder}{slash}{entry.name}/", ""))
                elif entry.name.endswith((".yaml", ".yml")) and _holds(Path(entry.path), key):
                    found.append((f"{folder}{slash}{entry.name}", ""))
    except OSError:
        return []
    return found[:MOST]


def _holds(path: Path, key: str) -> bool:
    try:
        with path.open("rb") as file:
            return re.search(rb"^" + key.encode(), file.read(1 << 14), re.MULTILINE) is not None
    except OSError:
        return False


def used_before() -> Iterator[str]:
    """Names of nodes in the times of earlier runs, which `exl3kit.timings` keeps."""
    from exl3kit import timings

    for named in timings.nodes_named():
        if not named.endswith((".yaml", ".yml")):
            yield from named.split(",")


def ssh_hosts() -> Iterator[str]:
    """Names in the ssh configuration, patterns left out."""
    home = Path.home() / ".ssh"
    yield from _hosts_of(Path(os.environ.get("EXL3KIT_SSH_CONFIG") or home / "config"), home, DEPTH)


def _hosts_of(path: Path, home: Path, depth: int) -> Iterator[str]:
    for line in _lines(path):
        key, _, rest = line.replace("=", " ", 1).strip().partition(" ")
        if key.lower() == "host":
            yield from (name for name in rest.split() if not re.search(r"[*?!\"]", name))
        elif key.lower() == "include" and depth > 0:
            for pattern in rest.split():
                for included in sorted(home.glob(pattern)) if not pattern.startswith(("/", "~")) else ():
                    yield from _hosts_of(included, home, depth - 1)


def known_hosts() -> Iterator[str]:
    """Names in ssh's known_hosts that are not hashed."""
    for line in _lines(Path.home() / ".ssh" / "known_hosts"):
        names = line.partition(" ")[0]
        yield from (name for name in names.split(",") if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*", name))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
