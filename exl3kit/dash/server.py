"""The server of `kit dash`: four addresses on this machine's loopback, read-only, for browsers of this machine alone.

A site that has a name of its own lead to 127.0.0.1 (DNS rebinding) is told apart by the Host header; any other site may
ask for the page, and cannot read it, for no answer allows that.
"""

from __future__ import annotations

import json
import socketserver
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from exl3kit.dash import view
from exl3kit.errors import ExitCode, KitError

if TYPE_CHECKING:
    from exl3kit.dash.gather import Gatherer

LOOPBACK = "127.0.0.1"
PORT = 8787  # unless it is taken, or another is asked for
NAMES = ("127.0.0.1", "localhost")
PATIENCE = 3.0  # seconds that a page waits for facts of now
HEARTBEAT = 15.0  # a stream says something at least so often, so that a reader that left is noticed
FILES = {
    "/dash.css": ("dash.css", "text/css; charset=utf-8"),
    "/dash.js": ("dash.js", "text/javascript; charset=utf-8"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Server(ThreadingHTTPServer):
    """Listens on loopback from the moment it is made; a thread for each reader, none of which outlives the process.

    Raises `KitError` (preflight) when the port is taken; without a `port`, `PORT` or else any free one is taken.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, gatherer: Gatherer, port: int | None = None) -> None:
        self.gatherer = gatherer
        try:
            super().__init__((LOOPBACK, PORT if port is None else port), Handler)
        except OSError as error:
            if port is not None:
                raise KitError(
                    f"port {port} cannot be had", where=LOOPBACK, why=error.strerror or str(error),
                    next_step="name another with --port, or none: a free one is taken then", code=ExitCode.PREFLIGHT,
                ) from error  # fmt: skip
            super().__init__((LOOPBACK, 0), Handler)

    def server_bind(self) -> None:
        """Without the base class's look for the machine's own name, which may take a name server's whole patience."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = LOOPBACK, self.server_address[1]

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that left is nobody's fault; of anything else one line says what it was, and the server goes on."""
        error = sys.exc_info()[1]
        if not isinstance(error, (ConnectionError, TimeoutError)):
            print(f"kit: the page failed for one reader: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


class Handler(BaseHTTPRequestHandler):
    """One connection of a reader."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "kit-dash", ""
    timeout = 30.0  # of a reader that sends no request, or takes no answer

    def do_GET(self) -> None:
        if not self._named_rightly():
            return
        path = self.path.partition("?")[0]
        if path == "/":
            _, facts = self.server.gatherer.now(PATIENCE)
            self._answer(HTTPStatus.OK, "text/html; charset=utf-8", view.page(facts).encode())
        elif path == "/events":
            self._stream()
        elif path in FILES:
            name, kind = FILES[path]
            self._answer(HTTPStatus.OK, kind, (view.FOLDER / name).read_bytes())
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is only the page: /")

    do_HEAD = do_GET

    def _change(self) -> None:
        if self._named_rightly():
            self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "this page is read-only", Allow="GET, HEAD")

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = _change

    def _named_rightly(self) -> bool:
        """Whether the request names this machine; answers it when not."""
        hosts = self.headers.get_all("Host") or []
        name = hosts[0].strip().rpartition(":")[0] or hosts[0].strip() if len(hosts) == 1 else ""
        if name.lower() in NAMES:
            return True
        self._refuse(HTTPStatus.FORBIDDEN, f"this page is there under http://{NAMES[0]} and http://{NAMES[1]} alone")
        return False

    def _stream(self) -> None:
        """Server-sent events: the inside of the page and its sentence for those who hear it, whenever they are new."""
        self.close_connection = True
        self.send_response(HTTPStatus.OK)
        self._headers("text/event-stream", Connection="close")
        if self.command == "HEAD":
            return
        self.wfile.write(b"retry: 2000\n\n")
        gatherer = self.server.gatherer
        number, facts = gatherer.now(PATIENCE)
        while not gatherer.ended:
            told = json.dumps({"news": view.news(facts), "main": view.main(facts)})
            self.wfile.write(f"id: {number}\ndata: {told}\n\n".encode())
            before = number
            while number == before and not gatherer.ended:
                number, facts = gatherer.newer(before, HEARTBEAT)
                if number == before:
                    self.wfile.write(b": still there\n\n")

    def _answer(self, status: HTTPStatus, kind: str, body: bytes, **more: str) -> None:
        self.send_response(status)
        self._headers(kind, **{"Content-Length": str(len(body))}, **more)
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status: HTTPStatus, why: str, **more: str) -> None:
        self.close_connection = True  # a body that may follow is not read
        self._answer(status, "text/plain; charset=utf-8", f"{why}\n".encode(), Connection="close", **more)

    def _headers(self, kind: str, **more: str) -> None:
        for name, value in {"Content-Type": kind, **HEADERS, **more}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal is for what concerns the operator."""
