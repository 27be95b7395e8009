"""How the kit prints: people on stdout (stderr under `--json`), one JSON object on stdout for programs."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from exl3kit import run_log
from exl3kit.errors import MEANINGS, ExitCode

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
    from rich.console import Console

    from exl3kit.errors import KitError
    from exl3kit.progress import Progress
    from exl3kit.timings import Run

READER_LEFT = 141  # what a shell shows of a program that SIGPIPE ended, as `cat` in `cat FILE | head -1`
LEAST_COLUMN = 24  # columns in which words still make lines

_refused = False  # whether an error was told in this run


class _Stdout(io.FileIO):
    """The file below stdout; it remembers its failure, because the layers above drop what they could not write."""

    lost: OSError | None = None

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            _Stdout.lost = error
            raise


def prepare() -> None:
    """Make stdout and stderr streams that take any text: the caller may have closed them, or chosen ASCII."""
    global _refused
    _refused = False
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 - for the life of the process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout is sys.__stdout__:
        by_line = sys.stdout.line_buffering or sys.stdout.write_through
        file = io.BufferedWriter(_Stdout(sys.stdout.fileno(), "wb", closefd=False))
        sys.stdout = io.TextIOWrapper(file, encoding=sys.stdout.encoding, line_buffering=by_line)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without UTF-8 must not end a verb


def is_lost() -> bool:
    """Whether stdout takes nothing any more."""
    return _Stdout.lost is not None


def settle(status: int) -> int:
    """The exit code, once all output is out: a reader that left ends the kit quietly, a full disk with a sentence."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    if isinstance(_Stdout.lost, BrokenPipeError):
        status = READER_LEFT
    elif _Stdout.lost is not None:
        status = int(ExitCode.FAULT)
        _tell(f"kit: stdout cannot be written ({_Stdout.lost.strerror})")
    if _Stdout.lost is not None:
        _silence(1)
    try:
        sys.stderr.flush()
    except OSError:
        _silence(2)
    return status


def _silence(descriptor: int) -> None:
    """Let what is left in a stream's buffer go nowhere: Python writes it once more when it ends, and would complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def _tell(sentence: str) -> None:
    with contextlib.suppress(OSError):  # the exit code still says it
        print(sentence, file=sys.stderr, flush=True)


def console(*, as_json: bool = False) -> Console:
    """The console for people: stdout, or stderr when stdout carries JSON."""
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            raise  # called while handling it; rich's own would end the process here

    return Plain(stderr=as_json, highlight=False, soft_wrap=True)


def hung(line: str, hang: int) -> str:
    """The line as it is for a pipe; for a terminal that is too narrow in several, the later ones indented by `hang`.

    Where that leaves too little, what stands behind `hang` begins a line of its own.
    """
    import shutil
    import textwrap

    width = shutil.get_terminal_size().columns
    if not sys.stdout.isatty() or len(line) <= width:
        return line
    head = ""
    if width - hang < LEAST_COLUMN and line[hang - 1 : hang] == " ":
        head, line = f"{line[:hang].rstrip()}\n".lstrip("\n"), f"    {line[hang:]}"
    indent = " " * (hang if width - hang >= LEAST_COLUMN else 4)
    return head + textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def progress(run: Run | None = None, *, as_json: bool = False) -> Progress:
    """The reporter of a long verb; with `run` its summary holds the seconds against those of the last such run."""
    from exl3kit.progress import Progress

    return Progress(console(as_json=as_json), run=run)


def emit(fields: Mapping[str, object]) -> None:
    """Print the one JSON object of a `--json` run."""
    print(json.dumps(fields, indent=2, sort_keys=True, default=str))


def refuse(error: KitError, *, as_json: bool) -> int:
    """Say why the kit stops: a sentence on stderr, and the same as JSON on stdout when asked; returns the exit code."""
    global _refused
    _refused = True
    run_log.record(error)
    log = run_log.place()
    if as_json:
        emit(error.as_json() | ({"log": log} if log else {}))
    _tell(f"kit: {error}" + (f"\n  log: {log}" if log else ""))
    return int(error.code)


def verdict(status: int) -> int:
    """Say what an exit code means that is a verdict and not an error, and where the log is; gives it back."""
    log = run_log.place()
    if status in MEANINGS and status != ExitCode.OK and log and not (_refused or is_lost()):
        _tell(f"kit: exit code {status}: {MEANINGS[ExitCode(status)]}\n  log: {log}")
    return status


def version(asked: bool) -> None:
    """Print the kit's version and end, when asked to."""
    if asked:
        from exl3kit import __version__

        print(f"kit {__version__}")
        raise SystemExit(0)
