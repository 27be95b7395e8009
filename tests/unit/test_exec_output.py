"""What a program in a container printed is read whole, however the engine's bytes come together."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import BinaryIO

import docker
import pytest

from exl3kit import exec_output

UPGRADED = (
    b"HTTP/1.1 101 UPGRADED\r\nContent-Type: application/vnd.docker.multiplexed-stream\r\n"
    b"Connection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
)
CREATED = (
    b"HTTP/1.1 201 Created\r\nContent-Type: application/json\r\nContent-Length: 14\r\nConnection: close\r\n\r\n"
    b'{"Id": "abcd"}'
)


def piece(kind: int, data: bytes) -> bytes:
    return exec_output.HEAD.pack(kind, len(data)) + data


def request(asked: BinaryIO) -> None:
    """Read one request, head and body."""
    length = 0
    while (line := asked.readline()) not in (b"\r\n", b""):
        name, _, value = line.partition(b":")
        length = int(value) if name.lower() == b"content-length" else length
    asked.read(length)


def engine(path: Path, parts: list[bytes]) -> docker.APIClient:
    """An engine that answers a start with these parts, each in one write, and a pause between them."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.listen()

    def serve() -> None:
        with listening:
            for answer in ([CREATED], parts):
                connection, _ = listening.accept()
                with connection, connection.makefile("rb") as asked:
                    request(asked)
                    for part in answer:
                        connection.sendall(part)
                        time.sleep(0.05)

    threading.Thread(target=serve, daemon=True).start()
    return docker.APIClient(base_url=f"unix://{path}", version="1.41", timeout=10)


SAID = piece(1, b"one\n") + piece(2, b"two\n") + piece(1, b"three\n")
WHOLE = [(b"one\n", None), (None, b"two\n"), (b"three\n", None)]


@pytest.mark.parametrize(
    "parts",
    [[UPGRADED + SAID], [UPGRADED, SAID], [UPGRADED + SAID[:5], SAID[5:17], SAID[17:]]],
    ids=["in one", "head alone", "cut anywhere"],
)
def test_output_is_whole_however_it_comes(parts: list[bytes], tmp_path: Path) -> None:
    assert list(exec_output.of(engine(tmp_path / "s", parts), "c", ["true"])) == WHOLE


def test_what_the_engine_says_of_a_program_that_cannot_start_is_kept(tmp_path: Path) -> None:
    said = b"OCI runtime exec failed: no such file\r\n"
    assert list(exec_output.of(engine(tmp_path / "s", [UPGRADED + said]), "c", ["nothing"])) == [(None, said)]
    assert list(exec_output.of(engine(tmp_path / "t", [UPGRADED]), "c", ["true"])) == []
