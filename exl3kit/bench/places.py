"""Where the observer runs: beside the API in the head's container, or on this machine against a URL."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from exl3kit import exec_output
from exl3kit.errors import ExitCode, KitError

if TYPE_CHECKING:
    from exl3kit.containers import Standing

SOURCE = Path(__file__).with_name("observer.py")
CAMPAIGN_SECONDS = 6 * 3600.0  # the longest that one plan may be silent: a prompt of 300,000 tokens on a slow machine


class Place(Protocol):
    """Runs the observer; gives its results as they come."""

    @property
    def name(self) -> str: ...

    def run(self, job: Mapping[str, Any]) -> Iterator[dict[str, Any]]: ...


@dataclass(frozen=True)
class Here:
    """This machine, against a server that anybody started."""

    url: str
    key_file: str | None = None

    @property
    def name(self) -> str:
        return self.url

    def run(self, job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Raises `KitError` (serving) when the server does not answer."""
        told = {**job, "url": self.url, "key_file": self.key_file}
        argv = [sys.executable, "-c", SOURCE.read_text(encoding="utf-8"), "-"]
        with subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdin is not None and process.stdout is not None and process.stderr is not None
            try:
                process.stdin.write(json.dumps(told))
                process.stdin.close()
                for line in process.stdout:
                    yield answered(self.name, line)
                said = process.stderr.read()
            finally:
                process.kill()
        if said:
            raise unanswered(self.name, said.strip()[-300:])


@dataclass(frozen=True)
class InContainer:
    """The head of a deployment: nothing lies between client and server but the loopback of one container."""

    head: Standing

    @property
    def name(self) -> str:
        return f"{self.head.container.name} on {self.head.node.name}"

    def run(self, job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Raises `KitError` (serving) when the container or the server does not answer."""
        argv = ["python3", "-c", SOURCE.read_text(encoding="utf-8"), json.dumps(job)]
        said = b""
        for stdout, stderr in stream(self.head, argv):
            if stdout is not None:
                yield answered(self.name, stdout)
            said += stderr or b""
        if said.strip():
            raise unanswered(self.name, said.decode("utf-8", "replace").strip()[-300:])


ENDER = """
import os, signal, sys
for name in filter(str.isdecimal, os.listdir("/proc")):
    try:
        words = open(f"/proc/{name}/cmdline", "rb").read().split(b"\\0")
        if sys.argv[1].encode() in words and int(name) != os.getpid():
            os.kill(int(name), signal.SIGTERM)
    except OSError:
        pass
"""
"""Ends the processes of a container that have a word among their arguments."""


def stream(rank: Standing, argv: list[str]) -> Iterator[tuple[bytes | None, bytes | None]]:
    """Run a program in a running container: whole lines of its stdout, and its stderr as it comes.

    When the reader leaves early (Ctrl-C, an error) the program is ended too: an engine lets it run on otherwise, and an
    observer that nobody reads would go on measuring, and spoil the next campaign's idle server.
    """
    from docker.errors import APIError
    from requests import RequestException

    mark, ended, rest = secrets.token_hex(8), False, b""
    try:
        with rank.node.patient_engine(CAMPAIGN_SECONDS) as engine:
            try:
                for stdout, stderr in exec_output.of(engine.api, str(rank.container.id), [*argv, mark]):
                    *lines, rest = (rest + (stdout or b"")).split(b"\n")
                    yield from ((line, None) for line in lines)
                    if stderr:
                        yield None, stderr
                ended = True
            finally:
                if not ended:
                    ender = engine.api.exec_create(rank.container.id, ["python3", "-c", ENDER, mark])
                    engine.api.exec_start(ender["Id"])
            if rest:
                yield rest, None
    except (APIError, RequestException, OSError) as error:
        what = f"{rank.container.name} cannot be asked"
        raise rank.node.error(what, why=str(error)[:300], code=ExitCode.SERVING) from error


def answered(name: str, line: str | bytes) -> dict[str, Any]:
    """One result of the observer; raises `KitError` (serving) when it says that the server did not answer."""
    try:
        told: dict[str, Any] = json.loads(line)
    except ValueError as error:
        raise unanswered(name, repr(line)[:300]) from error
    if "unanswered" in told:
        raise unanswered(name, str(told["unanswered"]))
    return told


def unanswered(name: str, why: str) -> KitError:
    return KitError("the server cannot be measured", where=name, why=why, code=ExitCode.SERVING)
