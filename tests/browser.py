"""A real browser, driven over its debugging pipe: what a page looks like, says on its console, and how wide it is."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


def program() -> str | None:
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


class Page:
    """One tab. `complaints` are the console's lines and the log's entries."""

    def __init__(self, requests: int, answers: int) -> None:
        self.requests, self.answers = requests, answers
        self.number, self.session, self.rest = 0, "", b""
        self.complaints: list[str] = []
        self.events: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command; what the browser says meanwhile is noted."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.requests, json.dumps(message).encode() + b"\0")
        while True:
            told = self.read()
            if told.get("id") == self.number:
                assert "error" not in told, told
                return dict(told["result"])
            self.note(told)

    def read(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            more = os.read(self.answers, 1 << 16)
            assert more, "the browser ended"
            self.rest += more
        line, _, self.rest = self.rest.partition(b"\0")
        return dict(json.loads(line))

    def note(self, told: dict[str, Any]) -> None:
        method, parameters = told.get("method", ""), told.get("params", {})
        self.events.append(method)
        if method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.complaints.append(json.dumps(parameters)[:300])

    def open(self, page: Path | str, width: int, height: int, *, phone: bool, dark: bool = False) -> None:
        """Show a file or an address in a window of that size and wait until it is loaded."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.ask("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        while "Page.loadEventFired" not in self.events:
            self.note(self.read())

    def value(self, expression: str) -> Any:
        """What an expression is worth, a promise's result included."""
        told = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 10.0) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + seconds
        while not self.value(expression):
            assert time.monotonic() < deadline, f"not so after {seconds:g} s: {expression}"
            time.sleep(0.05)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        told = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(told["data"]))


@contextmanager
def opened(profile: Path) -> Iterator[Page]:
    """A headless browser with a profile of its own."""
    found = program()
    assert found is not None
    to_browser, requests = os.pipe()
    answers, from_browser = os.pipe()
    # the pipe is descriptors 3 and 4 of the browser; higher numbers first, so that neither is overwritten
    words = f'exec 13<&{to_browser} 14>&{from_browser} 3<&13 4>&14; exec "$0" "$@"'
    argv = ["/bin/bash", "-c", words, found, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe",
            f"--user-data-dir={profile}", "--hide-scrollbars", "--no-first-run", "about:blank"]  # fmt: skip
    process = subprocess.Popen(argv, pass_fds=(to_browser, from_browser), stderr=subprocess.DEVNULL)
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Page(requests, answers)
    finally:
        process.kill()
        process.wait()
        os.close(requests)
        os.close(answers)
