"""On the node that has the image: its layers over HTTP, with ranges, read where the engine keeps them unpacked.

`docker save` would first write every layer to disk once more (a third of the time of a copy). The engine's `tar-split`
record of a layer holds everything of its tar but the files' contents, so the same bytes can be had from the unpacked
files; the other engine checks them against the layer's digest.

Serves one image, under a path that holds a random token, and ends when nobody has asked for half a minute.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import importlib
import json
import os
import secrets
import socket
import struct
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO

IDLE_SECONDS = 30.0
STALLED_SECONDS = 20.0  # a reader that takes nothing for so long is gone
BUFFER = 1 << 20
SENDFILE_FROM = 1 << 16  # smaller files are cheaper to copy into the buffer
STORE = Path("/store")
DRIVER = next((path for path in STORE.glob("*") if path.name != "image"), STORE / "overlay2")  # of the engine's storage


class Layer:
    """One unpacked layer, readable as the tar it came from."""

    def __init__(self, record: Path) -> None:
        """`record` is the layer's folder in the engine's database."""
        self._split = record / "tar-split.json.gz"
        self._files = DRIVER / (record / "cache-id").read_text().strip() / "diff"
        self._size: int | None = None
        self._sizing = threading.Lock()

    @property
    def size(self) -> int:
        """Bytes of the tar."""
        with self._sizing:
            if self._size is None:
                self._size = sum(map(part_length, self._entries()))
            return self._size

    def _entries(self) -> Iterator[dict[str, Any]]:
        with gzip.open(self._split) as lines:
            yield from map(json.loads, lines)

    def parts(self) -> Iterator[tuple[int, bytes | str]]:
        """(length, bytes or path of a file) of each part of the tar, in order; there may be 100,000."""
        folder = f"{self._files}/"
        for entry in self._entries():
            length = part_length(entry)
            if entry["type"] == 2:
                yield length, base64.b64decode(entry["payload"])
            elif length:
                raw = os.fsdecode(base64.b64decode(entry["name_raw"])) if "name_raw" in entry else entry["name"]
                yield length, folder + raw.lstrip("/")

    def send(self, out: Sender, start: int) -> None:
        """Send the tar from byte `start` on."""
        position = 0
        for length, content in self.parts():
            skip, position = max(0, start - position), position + length
            if skip >= length:
                continue
            if isinstance(content, bytes):
                out.write(content[skip:])
            else:
                out.write_file(content, skip, length - skip)
        out.flush()


def part_length(entry: dict[str, Any]) -> int:
    """Bytes that an entry of the record stands for: of the tar's own, in base64, or of a file."""
    if entry["type"] != 2:
        return int(entry.get("size", 0))
    text: str = entry["payload"]
    return len(text) // 4 * 3 - text[-2:].count("=")


class Sender:
    """A connection: small pieces are gathered, large files go from disk to network inside the kernel."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._waiting = bytearray()

    def write(self, piece: bytes) -> None:
        """Send a piece, sooner or later."""
        self._waiting += piece
        if len(self._waiting) >= BUFFER:
            self.flush()

    def write_file(self, path: str, offset: int, count: int) -> None:
        """Send part of a file; raises `EOFError` when it is shorter than the record says."""
        if count >= SENDFILE_FROM:
            self.flush()
            with Path(path).open("rb", buffering=0) as file:
                sent = self._connection.sendfile(file, offset, count)
        else:
            opened = os.open(path, os.O_RDONLY)
            try:
                piece = os.pread(opened, count, offset)
            finally:
                os.close(opened)
            sent = len(piece)
            self.write(piece)
        if sent != count:
            raise EOFError(f"{path} is shorter than its layer's record says")

    def flush(self) -> None:
        """Send what waits."""
        self._connection.sendall(self._waiting)
        self._waiting.clear()


def open_image(image: str) -> tuple[bytes, list[Layer]]:
    """(configuration as the engine keeps it, layers from the lowest) of an image id."""
    database = STORE / "image" / DRIVER.name
    config = (database / "imagedb/content/sha256" / image).read_bytes()
    layers, chain = [], ""
    for digest in json.loads(config)["rootfs"]["diff_ids"]:
        chain = f"sha256:{hashlib.sha256(f'{chain} {digest}'.encode()).hexdigest()}" if chain else digest
        layers.append(Layer(database / "layerdb/sha256" / chain.removeprefix("sha256:")))
    return config, layers


# ---- what runs the loader on a node that has no image with Python yet ------------------------------------------------


def toolbox(modules: list[str], out: BinaryIO) -> None:
    """Write a root file system with this interpreter and the modules (15 to 40 MB), as a tar that an engine can import.

    It is not compressed: that takes longer than a fabric needs for it.
    """
    for name in modules:
        importlib.import_module(name)
    interpreter = Path(sys.executable).resolve()
    files = {interpreter, _loader_of(interpreter), Path("/etc/ld.so.cache")}
    files |= {Path(str(module.__file__)) for module in list(sys.modules.values()) if getattr(module, "__file__", None)}
    for line in Path("/proc/self/maps").read_text().splitlines():
        mapped = Path(line.split(maxsplit=5)[-1])
        if ".so" in mapped.name:
            files |= {mapped, *_aliases(mapped)}
    with tarfile.open(fileobj=out, mode="w|", bufsize=BUFFER) as archive:
        for link in ("/bin", "/lib", "/lib64"):
            if Path(link).is_symlink():
                archive.add(link)
        # Under their real folders: of the links on the way only those of the root are in the archive.
        for path in sorted({file.parent.resolve() / file.name for file in files if file.exists()}):
            archive.add(path)
        alias = tarfile.TarInfo("usr/bin/python3")
        alias.type, alias.linkname = tarfile.SYMTYPE, str(interpreter)
        if interpreter != Path("/usr/bin/python3"):
            archive.addfile(alias)


def _aliases(library: Path) -> list[Path]:
    """Links beside a library that lead to it, such as its soname."""
    if not library.exists():
        return []
    stem = library.name.partition(".so")[0]
    alike = (path for path in library.parent.iterdir() if path.name.startswith(stem))  # of thousands
    return [path for path in alike if path.is_symlink() and path.resolve() == library]


def _loader_of(interpreter: Path) -> Path:
    """The dynamic loader that an ELF executable of 64 bits names."""
    with interpreter.open("rb") as file:
        head = file.read(4096)
    table, width, count = struct.unpack_from("<Q", head, 32)[0], *struct.unpack_from("<HH", head, 54)
    for index in range(count):
        kind, _, offset, _, _, size = struct.unpack_from("<IIQQQQ", head, table + index * width)
        if kind == 3:  # PT_INTERP
            return Path(head[offset : offset + size - 1].decode())
    return interpreter


# ---- HTTP ------------------------------------------------------------------------------------------------------------


class Server(ThreadingHTTPServer):
    """The server of one image; `asked` is when it last had something to do."""

    daemon_threads = True

    def __init__(self, address: str, image: str, modules: list[str]) -> None:
        self.address_family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
        super().__init__((address, 0), Handler)
        self.token = secrets.token_hex(16)
        self.config, self.layers = open_image(image)
        self.modules = modules
        self.active, self.asked = 0, time.monotonic()

    def end_when_idle(self) -> None:
        """Return when nobody has asked for anything for half a minute."""
        while self.active or time.monotonic() - self.asked < IDLE_SECONDS:
            time.sleep(1)


class Handler(BaseHTTPRequestHandler):
    """GET /TOKEN/{toolbox,config}, /TOKEN/sizes/FIRST and /TOKEN/layer/NUMBER, the last with `Range: bytes=START-`."""

    server: Server
    wfile: BinaryIO  # type: ignore[assignment]
    timeout = STALLED_SECONDS

    def do_GET(self) -> None:
        self.server.active += 1
        try:
            self._answer(self.path.strip("/").split("/"))
        except OSError:
            self.close_connection = True  # the other side left; it asks again for the rest
        finally:
            self.server.active -= 1
            self.server.asked = time.monotonic()

    def _answer(self, path: list[str]) -> None:
        served = self.server
        if not secrets.compare_digest(path[0], served.token):
            self.send_error(404)
        elif path[1:] == ["toolbox"]:
            self._head(200)
            toolbox(served.modules, self.wfile)
        elif path[1:] == ["config"]:
            self._send(served.config)
        elif path[1] == "sizes":
            self._send(json.dumps([layer.size for layer in served.layers[int(path[2]) :]]).encode())
        else:
            self._send_layer(served.layers[int(path[2])])

    def _send(self, body: bytes) -> None:
        self._head(200, len(body))
        self.wfile.write(body)

    def _send_layer(self, layer: Layer) -> None:
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        self._head(206 if start else 200, layer.size - start)
        self.wfile.flush()
        layer.send(Sender(self.connection), start)

    def _head(self, status: int, length: int | None = None) -> None:
        self.send_response(status)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def log_message(self, *words: Any) -> None:
        """Nobody reads it."""


def main() -> None:
    """argv: address to listen on, image id (64 hex digits), modules for the toolbox (a,b,c), first layer wanted."""
    server = Server(sys.argv[1], sys.argv[2], sys.argv[3].split(","))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(json.dumps({"port": server.server_address[1], "token": server.token}), flush=True)
    for layer in server.layers[int(sys.argv[4]) :]:
        _ = layer.size  # counted while the loader is on its way up
    server.end_when_idle()


if __name__ == "__main__":
    main()
