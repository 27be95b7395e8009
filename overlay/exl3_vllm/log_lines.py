"""Lines of a program's output, each as soon as it stands there: every state of a progress bar is one.

A bar paints over its line with carriage returns and ends the line when it is done. An engine stamps whole lines, so in
its log a bar of minutes would come after all that was said meanwhile, in one piece.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

LONGEST = 65536  # bytes that are held back for the end of their line
_END = re.compile(rb"(\r\n|\r|\n)")
_NAME = re.compile(rb"\S*\(\S+ pid=\d+\)\S* ")  # vLLM's name of the process, before the first state of a bar


class Lines:
    """What comes through one pipe, line by line."""

    def __init__(self) -> None:
        self._rest = b""
        self._painted = False  # whether a carriage return began what comes next
        self._shown = False  # whether a state of this line was given
        self._name = b""

    def feed(self, chunk: bytes) -> Iterator[tuple[bytes, bool]]:
        """(line without its end, whether it stands in the place of the one before), for all that stands there now."""
        *whole, rest = _END.split(self._rest + chunk)
        for text, end in zip(whole[::2], whole[1::2], strict=True):
            if end == b"\r" and not self._painted and _NAME.fullmatch(text):
                self._name = text
            elif text.strip() or not (self._painted or end == b"\r"):
                yield self._line(text, bar=self._painted or end == b"\r")
            self._painted = end == b"\r"
            if not self._painted:
                self._shown, self._name = False, b""
        self._rest = rest
        if rest.strip() and (self._painted or len(rest) > LONGEST):
            self._rest = b""
            yield self._line(rest, bar=self._painted)

    def end(self) -> Iterator[tuple[bytes, bool]]:
        """What is left at the pipe's end."""
        rest, self._rest = self._rest, b""
        if rest:
            yield self._line(rest, bar=self._painted)

    def _line(self, text: bytes, *, bar: bool) -> tuple[bytes, bool]:
        again, self._shown = self._shown, bar
        return self._name + text, again
