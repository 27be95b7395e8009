"""When the kit itself is at fault: one sentence for the operator, the whole story in a file for whoever repairs it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from exl3kit.errors import ExitCode, KitError
from exl3kit.faults import printable


def report(error: Exception) -> KitError:
    """The sentence for an exception that no verb expected; its traceback goes to a file that only the user may read."""
    if isinstance(error, ImportError) and not (error.name or "").startswith("exl3kit"):
        what = printable(f"the kit's environment is damaged: {error}")
        return KitError(what, next_step=f"rm -r {sys.prefix}, then start kit.py again", code=ExitCode.PREFLIGHT)
    told = KitError(printable(f"the kit failed: {type(error).__name__}: {error}".rstrip(": ")), code=ExitCode.FAULT)
    told.__cause__ = error
    try:
        told.next_step = f"this is a fault of the kit; please report it: `kit report` packs {_write(error)}"
    except (OSError, KitError) as refused:
        told.why = f"and its log could not be written: {refused}"
    return told


def _write(error: Exception) -> Path:
    import traceback

    from exl3kit import __version__, paths

    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    log = paths.cache_dir("crashes") / f"{stamp}-{os.getpid()}.log"
    # Values of arguments stay out: they may name what its owner would not send to a stranger.
    verb = " ".join(word for word in sys.argv[1:3] if not word.startswith("-"))
    head = f"kit {__version__} on Python {sys.version.split()[0]}, {sys.platform}: {verb}\n\n"
    log.touch(0o600, exist_ok=False)
    log.write_text(head + "".join(traceback.format_exception(error)), encoding="utf-8", errors="replace")
    return log
