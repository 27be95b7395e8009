"""On the node that lacks the image: fetches the missing layers and hands them to the engine as one `docker load`.

Whatever arrived is also kept in a volume until all of it is there, so a copy that was cut goes on where it stopped.
Prints JSON lines: `{"done": BYTES, "fetched": BYTES, "of_all": BYTES}` now and then, at last `{"loaded": true}` or
`{"error": SENTENCE, "of": "link" | "engine"}`.
"""

from __future__ import annotations

import fcntl
import http.client
import io
import json
import os
import resource
import socket
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

MODULES = (
    "encodings.idna",
    "fcntl",
    "http.client",
    "io",
    "json",
    "resource",
    "socket",
    "tarfile",
    "time",
    "contextlib",
    "pathlib",
)
SILENT_SECONDS = 6.0  # without a byte of a layer for so long, the link is given up
BUSY_SECONDS = 20.0  # how long a loader that was left behind may take to notice that it is alone
BUFFER = 1 << 20
BLOCK = 512
INCOMING = Path("/incoming")
ENGINE = "/engine.sock"


class LinkError(Exception):
    """The server of the layers is silent."""


class EngineError(Exception):
    """The engine refused what it was given."""


class Source:
    """The layer server, at http://HOST:PORT/TOKEN."""

    def __init__(self, host: str, port: int, token: str) -> None:
        self._host, self._port, self._token = host, port, token
        self.fetched = 0

    def read(self, path: str) -> bytes:
        """A small answer, whole."""
        return b"".join(self.stream(path, 0))

    def stream(self, path: str, start: int) -> Iterator[bytes]:
        """The answer from byte `start` on; a connection that breaks is made anew while bytes still come."""
        last = time.monotonic()
        while True:
            try:
                for piece in self._once(path, start):
                    start, last = start + len(piece), time.monotonic()
                    self.fetched += len(piece)
                    yield piece
                return
            except (OSError, http.client.HTTPException) as error:
                if time.monotonic() - last >= SILENT_SECONDS:
                    raise LinkError(f"{self._host} does not answer: {error}") from error
                time.sleep(0.3)

    def _once(self, path: str, start: int) -> Iterator[bytes]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=SILENT_SECONDS)
        try:
            connection.request("GET", f"/{self._token}/{path}", headers={"Range": f"bytes={start}-"})
            answer = connection.getresponse()
            if answer.status not in (200, 206):
                raise LinkError(f"{self._host} answers {answer.status}: another copy has begun there")
            left = int(answer.headers["Content-Length"])
            while left:
                piece = answer.read1(BUFFER)
                if not piece:
                    raise http.client.IncompleteRead(b"", left)
                left -= len(piece)
                yield piece
        finally:
            connection.close()


class Load:
    """One `POST /images/load` on the engine's socket, its body sent in chunks."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(ENGINE)
        head = "POST /images/load?quiet=1 HTTP/1.1\r\nHost: docker\r\nContent-Type: application/x-tar\r\n"
        self._socket.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())

    def write(self, piece: bytes | memoryview) -> None:
        """Send a piece of the body; raises `EngineError` with the engine's words when it takes no more."""
        if not len(piece):
            return
        try:
            self._socket.sendall(b"%x\r\n" % len(piece))
            self._socket.sendall(piece)
            self._socket.sendall(b"\r\n")
        except OSError as error:
            raise EngineError(self._answer() or str(error)) from error

    def finish(self) -> None:
        """End the body and wait for the engine to have unpacked it."""
        self._socket.sendall(b"0\r\n\r\n")
        if said := self._answer():
            raise EngineError(said)

    def _answer(self) -> str:
        """The engine's error; empty when it has none."""
        answer = http.client.HTTPResponse(self._socket)
        try:
            answer.begin()
            body = answer.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            return str(error) or "the engine hung up"
        for line in body.splitlines():
            with suppress(ValueError):
                said: dict[str, Any] = json.loads(line)
                if "error" in said or answer.status >= 400:
                    return str(said.get("error") or said.get("message"))
        return "" if answer.status < 400 else body


class Report:
    """Progress lines, two a second at most."""

    def __init__(self, source: Source, total: int) -> None:
        self._source, self._total = source, total
        self._done, self._last = 0, 0.0

    def advance(self, count: int) -> None:
        self._done += count
        if time.monotonic() - self._last > 0.5:
            self.say()

    def say(self) -> None:
        self._last = time.monotonic()
        tell({"done": self._done, "fetched": self._source.fetched, "of_all": self._total})


def tell(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def member(name: str, size: int) -> bytes:
    """The header of an archive's member."""
    head = tarfile.TarInfo(name)
    head.size = size
    return head.tobuf(tarfile.GNU_FORMAT)


def padding(size: int) -> bytes:
    return bytes(-size % BLOCK)


def load(job: dict[str, Any]) -> None:
    """Fetch and load one image; job: host, port, token, tag, digests (of all layers), missing (their numbers)."""
    source = Source(job["host"], job["port"], job["token"])
    config, sizes = source.read("config"), json.loads(source.read("sizes"))
    source.fetched = 0
    report, engine = Report(source, sum(sizes[number] for number in job["missing"])), Load()
    names = [f"{number}/layer.tar" for number in range(len(sizes))]
    index = json.dumps([{"Config": "config.json", "RepoTags": [job["tag"]], "Layers": names}]).encode()
    for name, content in (("config.json", config), ("manifest.json", index)):
        engine.write(member(name, len(content)) + content + padding(len(content)))
    forget(set(job["digests"]))
    for number in job["missing"]:
        engine.write(member(names[number], sizes[number]))
        with kept(job["digests"][number]) as file:
            for piece in whole(file, source, number):
                engine.write(piece)
                report.advance(len(piece))
        engine.write(padding(sizes[number]))
    forget(set())  # the engine has it all beside this, and needs the room to unpack it
    report.say()
    engine.write(bytes(2 * BLOCK))
    engine.finish()


def kept(digest: str) -> io.FileIO:
    """The file of the volume that a layer is kept in."""
    return io.FileIO(os.open(INCOMING / digest, os.O_RDWR | os.O_CREAT, 0o600), "r+b")


def whole(file: io.FileIO, source: Source, number: int) -> Iterator[bytes | memoryview]:
    """A layer's bytes: those kept from an earlier try, then the others as they come, which are kept meanwhile."""
    have = 0
    while piece := file.read(BUFFER):
        have += len(piece)
        yield piece
    for piece in source.stream(f"layer/{number}", have):
        file.write(piece)
        yield piece


def forget(digests: set[str]) -> None:
    """Remove what is kept of layers but these."""
    for path in INCOMING.iterdir():
        if path.name != "lock" and path.name not in digests:
            path.unlink()


def alone() -> io.FileIO:
    """Hold the volume's lock; a loader whose link was cut lets go of it by itself."""
    lock = io.FileIO(os.open(INCOMING / "lock", os.O_RDWR | os.O_CREAT, 0o600), "r+b")
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except OSError as error:
            if time.monotonic() > deadline:
                raise EngineError("another copy to this node is under way") from error
            time.sleep(0.3)


def main() -> None:
    """argv: the job as JSON."""
    try:
        with alone():
            load(json.loads(sys.argv[1]))
        tell({"loaded": True, "memory_kb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss})
    except LinkError as error:
        tell({"error": str(error), "of": "link"})
    except EngineError as error:
        forget(set())  # whatever was wrong with it is not to be sent again
        tell({"error": str(error), "of": "engine"})
    except OSError as error:
        tell({"error": str(error), "of": "engine"})


if __name__ == "__main__":
    main()
