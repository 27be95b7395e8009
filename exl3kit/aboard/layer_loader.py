"""On the node that lacks the image: fetches the missing layers and hands them to the engine as one `docker load`.

Whatever arrived is kept until all of it is there, so a copy that was cut goes on where it stopped. That costs no second
write: the file in which the engine spools a layer gets another name, which stays when the engine drops its own.
Prints JSON lines: `{"done": BYTES, "fetched": BYTES, "of_all": BYTES}` now and then, at last `{"loaded": true}` or
`{"error": SENTENCE, "of": "way" | "link" | "engine"}`, the first when the server was never reached.
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
    "glob",
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
SPOOLED_SECONDS = 1.0  # how long an engine may take to begin the file of a layer that is being sent to it
BUFFER = 1 << 20
BLOCK = 512
TEMPORARY = Path("/engine-tmp")  # the engine's folder for what is under way; emptied when it starts
INCOMING = TEMPORARY / "kit-incoming"
ENGINE = "/engine.sock"


class LinkError(Exception):
    """The server of the layers is silent."""


class WayError(LinkError):
    """The server never answered: there is no way to it from here."""


class EngineError(Exception):
    """The engine refused what it was given."""


class Source:
    """The layer server, at http://HOST:PORT/TOKEN."""

    def __init__(self, host: str, port: int, token: str) -> None:
        self._host, self._port, self._token = host, port, token
        self._buffer = memoryview(bytearray(BUFFER))
        self.fetched = 0

    def read(self, path: str) -> bytes:
        """A small answer, whole."""
        return b"".join(map(bytes, self.stream(path, 0)))

    def stream(self, path: str, start: int) -> Iterator[memoryview]:
        """The answer from byte `start` on; a connection that breaks is made anew while bytes still come.

        A piece is good until the next one is asked for.
        """
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

    def _once(self, path: str, start: int) -> Iterator[memoryview]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=SILENT_SECONDS)
        try:
            connection.request("GET", f"/{self._token}/{path}", headers={"Range": f"bytes={start}-"})
            answer = connection.getresponse()
            if answer.status not in (200, 206):
                raise LinkError(f"{self._host} answers {answer.status}: another copy has begun there")
            left = int(answer.headers["Content-Length"])
            while left:
                count = answer.readinto(self._buffer)
                if not count:
                    raise http.client.IncompleteRead(b"", left)
                left -= count
                yield self._buffer[:count]
        finally:
            connection.close()


class Load:
    """One `POST /images/load` on the engine's socket, with a body of `length` bytes."""

    def __init__(self, length: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(ENGINE)
        head = "POST /images/load?quiet=1 HTTP/1.1\r\nHost: docker\r\nContent-Type: application/x-tar\r\n"
        self._socket.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode())

    def write(self, piece: bytes | memoryview) -> None:
        """Send a piece of the body; raises `EngineError` with the engine's words when it takes no more."""
        try:
            self._socket.sendall(piece)
        except OSError as error:
            raise EngineError(self._answer() or str(error)) from error

    def finish(self) -> None:
        """Wait for the engine to have unpacked it."""
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


class Kept:
    """What has arrived of each layer, in a file named after its digest."""

    def __init__(self) -> None:
        self._spooled = True  # until an engine is seen to have no such file

    def read(self, digest: str) -> Iterator[bytes]:
        """The bytes kept from an earlier try."""
        with suppress(FileNotFoundError), (INCOMING / digest).open("rb", buffering=0) as file:
            while piece := file.read(BUFFER):
                yield piece

    def open(self, digest: str, member: str) -> io.FileIO | None:
        """Keep what comes of a layer from now on: None when the engine's own file does, else the one to write to."""
        INCOMING.mkdir(mode=0o700, exist_ok=True)
        if self._spooled and (spool := self._spool(member)):
            again = INCOMING / "again"
            again.unlink(missing_ok=True)
            os.link(spool, again)
            again.replace(INCOMING / digest)
            return None
        self._spooled = False
        return (INCOMING / digest).open("ab", buffering=0)

    def _spool(self, member: str) -> Path | None:
        deadline = time.monotonic() + SPOOLED_SECONDS
        while time.monotonic() < deadline:
            for path in TEMPORARY.glob(f"docker-import-*/{member}"):
                return path
            time.sleep(0.01)
        return None


def load(job: dict[str, Any]) -> None:
    """Fetch and load one image; job: host, port, token, tag, digests (of all layers), known (how many are there)."""
    source, kept, known = Source(job["host"], job["port"], job["token"]), Kept(), job["known"]
    try:
        config = source.read("config")
    except LinkError as error:
        raise WayError(str(error)) from error
    sizes = json.loads(source.read(f"sizes/{known}"))
    source.fetched = 0
    names = [f"kit-{job['token']}/{number}" for number in range(len(job["digests"]))]
    index = json.dumps([{"Config": "config.json", "RepoTags": [job["tag"]], "Layers": names}]).encode()
    lengths = [len(config), len(index), *sizes]
    report = Report(source, sum(sizes))
    engine = Load(sum(BLOCK + size + len(padding(size)) for size in lengths) + 2 * BLOCK)
    for name, content in (("config.json", config), ("manifest.json", index)):
        engine.write(member(name, len(content)) + content + padding(len(content)))
    forget(set(job["digests"]))
    for number, size in enumerate(sizes, start=known):
        engine.write(member(names[number], size))
        for piece in whole(kept, source, number, job["digests"][number], names[number]):
            engine.write(piece)
            report.advance(len(piece))
        engine.write(padding(size))
    forget(set())  # the engine has it all, and needs the room to unpack it
    report.say()
    engine.write(bytes(2 * BLOCK))
    engine.finish()


def whole(kept: Kept, source: Source, number: int, digest: str, name: str) -> Iterator[bytes | memoryview]:
    """A layer's bytes: those kept from an earlier try, then the others as they come, which are kept meanwhile."""
    have = 0
    for old in kept.read(digest):
        have += len(old)
        yield old
    file, first = None, True
    try:
        for piece in source.stream(f"layer/{number}", have):
            yield piece
            if first:  # now the engine has begun its file
                file, first = kept.open(digest, name), False
            if file:
                file.write(piece)
    finally:
        if file:
            file.close()


def forget(digests: set[str]) -> None:
    """Remove what is kept of layers but these."""
    with suppress(FileNotFoundError):
        for path in INCOMING.iterdir():
            if path.name not in digests:
                path.unlink()
    with suppress(OSError):  # something is left in it
        INCOMING.rmdir()


def alone() -> int:
    """Hold the lock on the engine's folder; a loader whose link was cut lets go of it by itself."""
    lock = os.open(TEMPORARY, os.O_RDONLY)
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except OSError as error:
            if time.monotonic() > deadline:
                raise OSError("another copy to this node is under way") from error
            time.sleep(0.3)


def main() -> None:
    """argv: the job as JSON."""
    try:
        alone()
        load(json.loads(sys.argv[1]))
        tell({"loaded": True, "memory_kb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss})
    except LinkError as error:
        tell({"error": str(error), "of": "way" if isinstance(error, WayError) else "link"})
    except EngineError as error:
        forget(set())  # whatever was wrong with it is not to be sent again
        tell({"error": str(error), "of": "engine"})
    except OSError as error:
        tell({"error": str(error), "of": "engine"})


if __name__ == "__main__":
    main()
