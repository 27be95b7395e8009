"""A stand-in for the Hugging Face hub: a real HTTP server that speaks as much of its API as a download needs.

Written from what `huggingface_hub` asks for: the list of a commit's files, and each file by HEAD, then by GET.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What is served, and what was asked for. `cut` breaks the first answer to that file off after so many bytes."""

    repo: str
    files: dict[str, bytes]
    token: str | None = None
    cut: dict[str, int] = field(default_factory=dict)
    served: list[tuple[str, str, int]] = field(default_factory=list)  # method, path, first byte
    url: str = ""

    def digest(self, name: str) -> str:
        return hashlib.sha256(self.files[name]).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> Hub:
        found: Hub = self.server.hub  # type: ignore[attr-defined]
        return found

    def log_message(self, format: str, *args: object) -> None:
        return

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.served.append((self.command, path, self._first()))
        if self.hub.token is not None and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            known = "Authorization" in self.headers
            self._plain(403 if known else 401, b"{}", {"X-Error-Code": "GatedRepo"}, body)
        elif path == f"/api/models/{self.hub.repo}/revision/{COMMIT}":
            listed = [{"rfilename": name, "size": len(data), "blobId": "b", "lfs": self._lfs(name)}
                      for name, data in self.hub.files.items()]  # fmt: skip
            self._plain(200, json.dumps({"id": self.hub.repo, "sha": COMMIT, "siblings": listed}).encode(), {}, body)
        elif path.startswith(f"/api/models/{self.hub.repo}/tree/{COMMIT}"):
            tree = [{"type": "file", "path": name, "size": len(data), "oid": "b", "lfs": self._lfs(name)}
                    for name, data in self.hub.files.items()]  # fmt: skip
            self._plain(200, json.dumps(tree).encode(), {}, body)
        elif path.removeprefix(f"/{self.hub.repo}/resolve/{COMMIT}/") in self.hub.files:
            self._file(path.removeprefix(f"/{self.hub.repo}/resolve/{COMMIT}/"), body)
        else:
            self._plain(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)

    def _lfs(self, name: str) -> dict[str, object]:
        return {"sha256": self.hub.digest(name), "oid": self.hub.digest(name), "size": len(self.hub.files[name]),
                "pointerSize": 130}  # fmt: skip

    def _first(self) -> int:
        return int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0] or 0)

    def _plain(self, status: int, data: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def _file(self, name: str, body: bool) -> None:
        data, first = self.hub.files[name], self._first()
        self.send_response(206 if first else 200)
        headers = {
            "Content-Length": len(data) - first,
            "Accept-Ranges": "bytes",
            "ETag": f'"{self.hub.digest(name)}"',
            "X-Linked-Etag": f'"{self.hub.digest(name)}"',
            "X-Linked-Size": len(data),
            "X-Repo-Commit": COMMIT,
        }
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        for key, value in headers.items():
            self.send_header(key, str(value))
        self.end_headers()
        if not body:
            return
        cut = self.hub.cut.pop(name, None)
        if cut is not None:
            self.wfile.write(data[first:cut])
            self.wfile.flush()
            self.connection.close()
            return
        self.wfile.write(data[first:])


@contextmanager
def serving(hub: Hub, address: str = "127.0.0.1") -> Iterator[Hub]:
    """The hub while it serves; `url` of it is set."""
    server = ThreadingHTTPServer((address, 0), _Handler)
    server.hub = hub  # type: ignore[attr-defined]
    hub.url = f"http://{address}:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
