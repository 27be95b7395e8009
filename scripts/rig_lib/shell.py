"""Running programs, and the one error type of the rig."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

USAGE, PREFLIGHT, BUILD, UNREACHABLE = 2, 3, 4, 6  # the kit's exit codes


class RigError(Exception):
    """A sentence for the user, and the exit code that goes with it."""

    def __init__(self, message: str, code: int = PREFLIGHT) -> None:
        super().__init__(message)
        self.code = code


def run(*argv: str, stdin: str | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a program to its end and return what it printed.

    Raises:
        RigError: with the program's own last words, when it fails and `check` is set.
    """
    done = subprocess.run(argv, input=stdin, capture_output=True, text=True)
    if check and done.returncode:
        words = (done.stderr.strip() or done.stdout.strip() or "it printed nothing").splitlines()[-1]
        raise RigError(f"`{' '.join(argv)}` failed with exit code {done.returncode}: {words}")
    return done


def tail(text: str, lines: int = 5) -> str:
    """The last lines of a log, indented for an error message."""
    return "\n".join("    " + line for line in text.splitlines()[-lines:]) or "    (its log is empty)"


def names(words: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
