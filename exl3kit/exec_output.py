"""What a program in a container prints, whole.

docker-py reads it from the bare socket, behind the buffer that took the head of the engine's response: on a busy
machine, where head and output had come in one piece, the output was lost and the program seemed to have said nothing.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from docker import APIClient

HEAD = struct.Struct(">BxxxL")  # of a piece: 1 for stdout, 2 for stderr, and its length in bytes
STDOUT = 1

Piece = tuple[bytes | None, bytes | None]


def of(api: APIClient, container: str, argv: Sequence[str]) -> Iterator[Piece]:
    """Run a program in a running container: pieces of its stdout and of its stderr as they come, one of the two each.

    Raises what docker-py raises, and `OSError` when nothing comes for as long as the client's timeout.
    """
    started = api.exec_create(container, list(argv))
    bare: Any = api.exec_start(started["Id"], socket=True)
    response = bare._response
    reader = response.raw._fp.fp
    with contextlib.closing(response):
        while head := reader.read(HEAD.size):
            kind, size = HEAD.unpack(head) if len(head) == HEAD.size else (0, 0)
            if kind in (1, 2):
                data = reader.read(size)
                yield (data, None) if kind == STDOUT else (None, data)
            else:  # a program that could not be started: the engine says so in plain text
                yield None, head + reader.read()
