"""The patches of one vLLM version: rendered, placed in the functions that they are anchored to, and proven."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError

from patches import diffs, shapes
from patches.diffs import DiffError, FileDiff
from patches.sources import SourceError, Sources

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Anchor:
    """A function that a patch changes: the hash of its tree before, and after."""

    module: str
    name: str
    sha256: str
    patched: str


@dataclass(frozen=True)
class Patch:
    """One concern: its diff's template and the functions that the diff touches, one file's hunks in their order."""

    file: str
    concern: str
    why: str
    anchors: tuple[Anchor, ...]


@dataclass(frozen=True)
class PatchSet:
    """A folder `vllm-X.Y.Z`: what its manifest says. `without_patch`: concerns that are met in another way, and how."""

    folder: Path
    version: str
    variables: Mapping[str, str]
    patches: tuple[Patch, ...]
    without_patch: Mapping[str, str]

    def render(self, patch: Patch) -> str:
        """The unified diff of one patch.

        Raises
        ------
        DiffError: the template cannot be rendered.
        """
        environment = Environment(
            loader=FileSystemLoader(self.folder), undefined=StrictUndefined, keep_trailing_newline=True
        )
        try:
            return environment.get_template(patch.file).render(vllm=self.version, **self.variables)
        except TemplateError as error:
            raise DiffError(f"{patch.file} cannot be rendered ({error})") from error


def versions() -> list[str]:
    """Versions of vLLM that there is a set for, oldest first."""
    folders = [path.name.removeprefix("vllm-") for path in HERE.glob("vllm-*") if (path / "manifest.yaml").is_file()]
    return sorted(folders, key=lambda version: [int(part) for part in re.findall(r"\d+", version)])


def load(version: str) -> PatchSet:
    """The set of one version; it must be one of `versions()`."""
    folder = HERE / f"vllm-{version}"
    said = yaml.safe_load((folder / "manifest.yaml").read_text(encoding="utf-8"))
    patches = tuple(_patch(one) for one in said["patches"])
    without = {one["concern"]: one["why"] for one in said["without_patch"]}
    return PatchSet(folder, str(said["vllm"]), dict(said["variables"]), patches, without)


def _patch(said: Mapping[str, Any]) -> Patch:
    anchors = tuple(Anchor(**one) for one in said["anchors"])
    return Patch(said["file"], said["concern"], said["why"], anchors)


# ---- checking and applying -------------------------------------------------------------------------------------------


def problem_of(sources: Sources, patch: Patch, diff: str) -> tuple[str, str]:
    """(same | moved | changed | missing, why) of one patch against one vLLM."""
    for anchor in patch.anchors:
        found = sources.find(anchor.module, anchor.name)
        where = f"{anchor.module}:{anchor.name}"
        if found is None or found.module != anchor.module:
            others = sources.elsewhere(anchor.name)
            if others:
                return "moved", f"{where} is now in {', '.join(other.module for other in others)}"
            return "missing", f"{where} is gone"
        if shapes.digest(found.node) != anchor.sha256:
            return "changed", f"{where} is not the function that the patch was made for"
    try:
        patched_files(sources, patch, diff)
    except DiffError as error:
        return "changed", str(error)
    return "same", ""


def patched_files(sources: Sources, patch: Patch, diff: str) -> dict[str, bytes]:
    """Path -> content of every file that the patch changes, as it is afterwards.

    Raises
    ------
    DiffError: a hunk does not fit, or something else than the anchored functions would change.
    """
    changed = {}
    for file in diffs.parse(diff):
        anchors = [anchor for anchor in patch.anchors if sources.file_of(anchor.module) == file.path]
        if not anchors:
            raise DiffError(f"{patch.file} changes {file.path}, and none of its anchors lies there")
        before = sources.read(file.path).decode("utf-8")
        after = _apply(before, file, anchors, patch.file)
        _prove(before, after, anchors, patch.file)
        changed[file.path] = after.encode("utf-8")
    return changed


def _apply(before: str, file: FileDiff, anchors: Sequence[Anchor], name: str) -> str:
    lines = before.split("\n")
    for hunk in reversed(file.hunks):
        fits = []
        for anchor in anchors:
            begin, end = _span(before, anchor.name)
            try:
                fits.append(diffs.place(lines, hunk, begin, end))
            except DiffError as error:
                refusal = error
        if len(fits) != 1:
            raise DiffError(f"{name}: {refusal if not fits else 'a hunk fits in two functions'}")
        lines[fits[0] : fits[0] + len(hunk.old)] = hunk.new
    return "\n".join(lines)


def _span(text: str, name: str) -> tuple[int, int]:
    node = _function(ast.parse(text), name)
    return min([node.lineno, *(one.lineno for one in node.decorator_list)]) - 1, node.end_lineno or node.lineno


def _function(tree: ast.Module, name: str) -> ast.FunctionDef:
    body: list[ast.stmt] = tree.body
    node: ast.stmt | None = None
    for part in name.split("."):
        named = [one for one in body if isinstance(one, (ast.ClassDef, ast.FunctionDef)) and one.name == part]
        node = named[0] if named else None
        body = getattr(node, "body", [])
    if not isinstance(node, ast.FunctionDef):
        raise DiffError(f"there is no function {name}")
    return node


def _prove(before: str, after: str, anchors: Sequence[Anchor], name: str) -> None:
    """The file still compiles, the anchored functions became what the manifest says, and nothing else changed."""
    try:
        tree = ast.parse(after)
    except SyntaxError as error:
        raise DiffError(f"{name} leaves no valid Python behind (line {error.lineno})") from error
    for anchor in anchors:
        got = shapes.digest(_function(tree, anchor.name))
        if got != anchor.patched:
            raise DiffError(f"{name} makes {anchor.name} into {got[:12]}, the manifest says {anchor.patched[:12]}")
    names = [anchor.name for anchor in anchors]
    if _blanked(ast.parse(before), names) != _blanked(tree, names):
        raise DiffError(f"{name} changes more of the file than the functions it is anchored to")


def _blanked(tree: ast.Module, names: Sequence[str]) -> str:
    """The hash of a module without the bodies of the named functions."""
    for name in names:
        _function(tree, name).body = [ast.Pass()]
    return shapes.digest(tree)


def is_applied(sources: Sources, patch: Patch) -> bool:
    """Whether every function of the patch is already what the patch makes of it."""
    founds = [(anchor, sources.find(anchor.module, anchor.name)) for anchor in patch.anchors]
    return all(found is not None and shapes.digest(found.node) == anchor.patched for anchor, found in founds)


def apply(root: Path, chosen: PatchSet) -> Iterator[tuple[str, list[str]]]:
    """Change the vLLM in `root`, patch after patch; gives (patch, files), no files where it was applied before.

    Raises
    ------
    DiffError, SourceError: a patch does not fit; files of earlier patches are changed, that patch's are not.
    """
    for patch in chosen.patches:
        sources = Sources(root)
        if is_applied(sources, patch):
            yield patch.file, []
            continue
        diff = chosen.render(patch)
        status, why = problem_of(sources, patch, diff)
        if status != "same":
            raise SourceError(f"{patch.file} does not fit: {why}")
        contents = patched_files(sources, patch, diff)
        for file, content in contents.items():
            (root / file).write_bytes(content)
        yield patch.file, sorted(contents)
