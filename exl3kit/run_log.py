"""The log of a run: one file with what the screen leaves out, readable for its owner alone, the newest fifty kept.

`$XDG_STATE_HOME/exl3kit/runs/TIME-VERB-PROCESS.log`, else below `~/.local/state`. Modules write to it through Python's
`logging`; the engine's client and `urllib3` do so by themselves. No secret comes in: those that the kit reads are
registered here and masked wherever they turn up, and so is what looks like one (`exl3kit.redaction`).
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from exl3kit.errors import KitError

if TYPE_CHECKING:
    import logging

    from exl3kit.redaction import Redactor

KEPT = 50
KEPT_OF_A_VERB = 10  # so that a `status` every minute leaves the log of the `up` before it alone
LONGEST_LINE = 4000
LONGEST_LOG = 10_000_000  # characters, after which details are left out: a page that is watched for days asks on and on

# Files of the frames between `main` and a verb.
_ABOVE_VERBS = ("cli/__init__.py", "cli/teaching.py", "cli/args.py", "typer/main.py", "typer/core.py", "_click/core.py")

_secrets: set[str] = set()
_open: _Run | None = None


class _Run:
    """The log that is being written, or why none is."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self.refusal = ""
        self.handler: logging.Handler | None = None
        self.level_before = 0
        self.started = time.monotonic()


def keep_secret(value: str) -> str:
    """Mask a secret in every line that is logged from now on; gives it back."""
    _secrets.add(value)
    _redactor.cache_clear()
    return value


@cache
def _redactor() -> Redactor:
    from exl3kit.redaction import Redactor

    return Redactor(_secrets)


def begin(verb: str) -> None:
    """Open the log of a run of a verb (`bench prefill`); a state directory that cannot be written stops no verb."""
    global _open
    if _open is not None:  # one verb that calls another
        return
    _open = _Run()
    try:
        folder = _folder()
        name = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{verb.replace(' ', '-')}-{os.getpid()}.log"
        path = folder / name
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        _attach(path, _open)
    except (OSError, KitError) as error:
        _open.refusal = error.why or error.what if isinstance(error, KitError) else error.strerror or str(error)
        return
    _open.path = path
    _head()
    _prune(folder)


def record(error: BaseException) -> None:
    """Write an error with all that led to it, from the verb on."""
    if _open is not None and _open.path is not None:
        import logging

        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename.endswith(_ABOVE_VERBS):
            trace = trace.tb_next
        logging.getLogger("exl3kit").error(f"{error}", exc_info=(type(error), error, trace))


def end(status: int) -> None:
    """Say with which exit code the run ended, and close its log."""
    global _open
    if _open is not None and _open.handler is not None:
        import logging

        logging.getLogger("exl3kit").info(f"exit code {status} after {time.monotonic() - _open.started:.1f} s")
        root = logging.getLogger()
        root.removeHandler(_open.handler)
        root.setLevel(_open.level_before)
        logging.captureWarnings(False)
        with suppress(OSError):  # no room for the last line
            _open.handler.close()
    _open = None


def place() -> str | None:
    """Where the log of this run is, or why there is none; None when the verb keeps none."""
    if _open is None:
        return None
    return str(_open.path) if _open.path is not None else f"none ({_open.refusal})"


def logs() -> list[Path]:
    """Every log that is kept, the oldest first."""
    return sorted(_folder().glob("*.log"))


def _folder() -> Path:
    from exl3kit import paths

    return paths.state_dir("runs")


def _attach(path: Path, run: _Run) -> None:
    """Let everything that modules log go into the file."""
    import logging

    class Plain(logging.Formatter):
        """Lines with UTC to the millisecond, without secrets or control characters."""

        converter = staticmethod(time.gmtime)
        default_time_format, default_msec_format = "%Y-%m-%dT%H:%M:%S", "%s.%03dZ"

        def format(self, record: logging.LogRecord) -> str:
            lines = _redactor().text(super().format(record)).splitlines() or [""]
            shown = ("".join(c if c.isprintable() or c == "\t" else "?" for c in line) for line in lines)
            return "\n    ".join(line[:LONGEST_LINE] for line in shown)

    class Bounded(logging.FileHandler):
        """A full disk under the log stops no verb, and no verb fills the disk."""

        written = 0

        def filter(self, record: logging.LogRecord) -> bool:
            return _tells_something(record) and (self.written < LONGEST_LOG or record.levelno >= logging.INFO)

        def format(self, record: logging.LogRecord) -> str:
            text = super().format(record)
            self.written += len(text)
            return text

        def handleError(self, record: logging.LogRecord) -> None:
            return

    handler = Bounded(path, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(Plain("%(asctime)s %(name)s: %(message)s"))
    root = logging.getLogger()
    run.handler, run.level_before = handler, root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    logging.captureWarnings(True)


def _tells_something(record: logging.LogRecord) -> bool:
    """Whether a record is worth a line: looking at a container every half second and finding it there is not."""
    if record.name.startswith("urllib3.connectionpool") and isinstance(record.args, tuple) and len(record.args) == 8:
        method, status = record.args[3], record.args[6]
        return method != "GET" or not isinstance(status, int) or status >= 400
    return True


def _head() -> None:
    import logging
    import platform
    import shlex

    from exl3kit import __version__, paths

    log = logging.getLogger("exl3kit")
    log.info(f"kit {shlex.join(sys.argv[1:])}")
    log.info(f"kit {__version__} of {paths.REPO}, Python {platform.python_version()}, {platform.platform()}")
    log.info(f"in {os.getcwd()}, process {os.getpid()}")  # noqa: PTH109


def _prune(folder: Path) -> None:
    """Keep the newest logs: `KEPT` in all, `KEPT_OF_A_VERB` of one verb."""
    kept: list[str] = []
    for path in sorted(folder.glob("*.log"), reverse=True):
        verb = path.name.partition("-")[2].rpartition("-")[0]
        if len(kept) < KEPT and kept.count(verb) < KEPT_OF_A_VERB:
            kept.append(verb)
            continue
        with suppress(OSError):
            path.unlink()
