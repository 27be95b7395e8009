"""What a definition looks like from outside (kind, signature) and inside (a hash of its normalised syntax tree)."""

from __future__ import annotations

import ast
import copy
import hashlib
import json
from typing import Any

from patches.sources import Definition


def kind_of(node: Definition) -> str:
    """`class`, `function` or `value`."""
    if isinstance(node, ast.ClassDef):
        return "class"
    return "function" if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else "value"


def signature_of(node: Definition) -> str:
    """What users of the definition depend on: parameters without annotations and how it is called, bases, or value."""
    if isinstance(node, ast.ClassDef):
        return f"class({', '.join(ast.unparse(base) for base in node.bases)})"
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        arguments = copy.deepcopy(node.args)
        for one in ast.walk(arguments):
            if isinstance(one, ast.arg):
                one.annotation = None
        called = [name for name in map(ast.unparse, node.decorator_list) if name in _CALLING]
        return f"{' '.join([*called, ''])}({ast.unparse(arguments)})"
    return "= " + (ast.unparse(node.value) if node.value else "")


_CALLING = ("staticmethod", "classmethod", "property", "cached_property")
"""Decorators that change how a function is called."""


def digest(node: ast.AST) -> str:
    """sha256 of the tree without positions, comments and docstrings; the same under Python 3.11 to 3.14."""
    text = json.dumps(_plain(node), separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, ast.Constant):
        return ["Constant", type(value.value).__name__, repr(value.value)]
    if not isinstance(value, ast.AST):
        return repr(value)
    fields = dict(ast.iter_fields(value))
    if isinstance(value, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)):
        fields["body"] = _without_docstring(value.body)
    # Fields that a newer Python added are empty in source that an older one reads, so empty ones are left out.
    kept = {name: _plain(one) for name, one in fields.items() if one is not None and one != [] and name != "ctx"}
    return [type(value).__name__, kept]


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0] if body else None
    said = first.value if isinstance(first, ast.Expr) else None
    return body[1:] if isinstance(said, ast.Constant) and isinstance(said.value, str) else body
