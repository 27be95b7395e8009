"""Lets the rank's supervisor know that the overlay itself refused, and why.

vLLM packs what a plugin raises into an error of its own ("Engine core initialization failed") and ends with status 1,
which says neither that nothing was ever served nor what to do. So a refusal also goes into a file beside the rank's
status, and `exl3_vllm.rank` ends with its sentence and exit code 5.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from exl3_vllm.errors import Exl3Error

FILE = "refusal.json"
RUN_DIR = "EXL3_RUN_DIR"


@contextlib.contextmanager
def told() -> Iterator[None]:
    """A refusal that leaves the block is written down; the first one of a start stays."""
    try:
        yield
    except Exl3Error as error:
        directory = os.environ.get(RUN_DIR)
        if directory:
            fields = {"sentence": str(error), "where": error.where, "what": error.what, "next": error.next_step}
            with contextlib.suppress(OSError), (Path(directory) / FILE).open("x") as file:
                json.dump(fields, file)
        raise


def read(directory: Path) -> str | None:
    """The sentence of a refusal that was written down in a rank's folder, or None."""
    try:
        return str(json.loads((directory / FILE).read_bytes())["sentence"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def tell_refusals() -> None:
    """Wrap vLLM's loading of a model, in which most refusals come up; a second call changes nothing."""
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    original = BaseModelLoader.load_model
    if original.__module__ == __name__:
        return

    @functools.wraps(original)
    def load_model(self: BaseModelLoader, *arguments: Any, **named: Any) -> Any:
        with told():
            return original(self, *arguments, **named)

    load_model.__module__ = __name__
    BaseModelLoader.load_model = load_model  # type: ignore[method-assign]
