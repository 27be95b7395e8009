"""How processes ended, and what that makes of the rank's own exit code."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable, Mapping
from typing import Any

from exl3_vllm.rank_settings import EXIT_SERVING, EXIT_VERIFICATION

MAIN = ("API server", "launcher")  # the supervisor's own child, on the head and on the others
EXIT_CODE_SAID = re.compile(r"exit code:? (-?\d+)")

STOP_SAID = "[shutdown] API server: shutdown triggered"  # by a signal, never by the end of another process


def exit_words(status: int) -> tuple[int | None, str | None]:
    """Exit code or name of the signal, of a wait status."""
    code = os.waitstatus_to_exitcode(status)
    return (code, None) if code >= 0 else (None, signal.Signals(-code).name)


def said_exit_code(lines: Iterable[str]) -> tuple[int | None, str | None]:
    """Exit code or signal of a worker as its parent logged it: `Worker proc VllmWorker-0 died (exit code: -9)`."""
    for line in reversed(list(lines)):
        found = EXIT_CODE_SAID.search(line)
        if found:
            code = int(found[1])
            return (code, None) if code >= 0 else (None, signal.Signals(-code).name)
    return None, None


def began_to_stop(lines: Iterable[str]) -> bool:
    """Whether vLLM's server said that it ends: it then kills its engine, whose end tells nothing."""
    return any(STOP_SAID in line for line in lines)


def exit_code(death: Mapping[str, Any]) -> int:
    """Exit code of the rank: that of a refused checkpoint, vLLM's own where that is one, 128 + n for a signal, else a
    failed service's."""
    if death["kind"] == "unfit":
        return EXIT_VERIFICATION
    if death.get("signal") and death["process"] in MAIN:
        return 128 + int(signal.Signals[str(death["signal"])])
    if death["kind"] == "exit" and death["process"] in MAIN:
        return int(death["exit_code"] or 1)
    return EXIT_SERVING
