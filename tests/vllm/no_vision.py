"""Stands in for torchvision, which the image leaves out: Qwen3.5's text model imports it for pictures it never sees.

vLLM defines that text model in the same module as its vision model, so the module does not import without it. Every
name of the stand-in exists and does nothing; a test that came to use one would fail on the shapes it gets.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Nothing:
    """Any class, function or constant of torchvision."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return Nothing()

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return Nothing()


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Nothing,), {})


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] == "torchvision" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


def install() -> None:
    """From now on `import torchvision` works in this process, and vLLM inspects models in it."""
    from exl3_vllm.modelinfo import here
    from vllm.model_executor.models import registry

    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
    registry._run_in_subprocess = here
