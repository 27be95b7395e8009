"""Logs of all ranks of a deployment, merged by the time that each rank's engine wrote beside the line."""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from exl3kit.errors import KitError

if TYPE_CHECKING:
    from exl3kit.containers import Standing

AGAIN_SECONDS = 1.0  # a container that its engine starts again is looked at so often
PATIENCE_SECONDS = 7 * 24 * 3600.0  # a quiet rank says nothing for days
_AGO = re.compile(r"(\d+)\s*(s|m|min|h|d)")
_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True)
class Line:
    """One line: the engine's stamp (RFC 3339, UTC, nanoseconds), the rank, and the text."""

    stamp: str
    one: Standing
    text: str


def since(text: str, now: datetime) -> datetime:
    """The time that `--since` means: `90s`, `10m`, `2h`, `1d` ago, or a date and time (local unless it says).

    Raises `KitError` (usage) for anything else.
    """
    if ago := _AGO.fullmatch(text.strip()):
        return now - timedelta(seconds=int(ago[1]) * _UNITS[ago[2]])
    try:
        return datetime.fromisoformat(text.strip()).astimezone(UTC)
    except ValueError as error:
        raise KitError(
            f"{text!r} is no time", where="--since", next_step="write 90s, 10m, 2h, 1d, or 2026-01-31T12:00"
        ) from error


def lines(standing: Sequence[Standing], *, tail: int | None, after: datetime | None = None) -> list[Line]:
    """The last `tail` lines of every rank (None: all), or those after a time, merged by time."""
    start = None if after is None else int(after.timestamp())
    found = []
    for one in standing:
        text: bytes = one.container.logs(tail="all" if tail is None else tail, since=start, timestamps=True)
        found += [line for whole in text.decode("utf-8", "replace").split("\n") for line in split(one, whole)]
    if after is not None:
        first = after.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")
        found = [line for line in found if line.stamp >= first]
    return sorted(found, key=lambda line: line.stamp)


def split(one: Standing, line: str) -> list[Line]:
    """Docker's timestamp and the text of one line, which is several when a progress bar painted over it."""
    stamp, _, text = line.partition(" ")
    states = [state for state in text.split("\r") if state.strip()]
    return [Line(stamp, one, state) for state in states or [""] if stamp]


def follow(standing: Sequence[Standing], *, tail: int | None, after: datetime | None = None) -> Iterator[Line]:
    """What `lines` gives, then lines of all ranks as they come, until no rank will run again.

    A rank that its engine starts again is followed on; its end is told as a line of its own.
    """
    last = {one.rank: "" for one in standing}
    for line in lines(standing, tail=tail, after=after):
        last[line.one.rank] = line.stamp
        yield line
    arrived: queue.Queue[Line | None] = queue.Queue()
    for one in standing:
        threading.Thread(target=pump, args=(one, last[one.rank], arrived), daemon=True).start()
    running = len(standing)
    while running:
        came = arrived.get()
        if came is None:
            running -= 1
        else:
            yield came


def pump(one: Standing, last: str, arrived: queue.Queue[Line | None]) -> None:
    """Put every line of a container's log that is later than `last` into `arrived`, and None when no more will come.

    A stream also ends without an error when the link or the engine goes, so the container is looked at again then.
    """
    try:
        while True:
            for line in stream(one, last):
                arrived.put(line)
                last = line.stamp
            words, goes_on = ending(one)
            if words:
                arrived.put(Line(last, one, words))
            if not goes_on:
                return
            time.sleep(AGAIN_SECONDS)
    finally:
        arrived.put(None)


def stream(one: Standing, last: str) -> Iterator[Line]:
    """Lines later than `last` until the container or the connection ends."""
    from docker.errors import DockerException
    from requests import RequestException

    rest = b""
    start = int(datetime.fromisoformat(last[:19] + "+00:00").timestamp()) if last else None
    try:
        with one.node.patient_engine(PATIENCE_SECONDS) as engine:
            chunks = engine.api.logs(str(one.container.id), stream=True, follow=True, timestamps=True, since=start)
            for chunk in chunks:
                *whole, rest = (rest + chunk).split(b"\n")
                for text in whole:
                    yield from (line for line in split(one, text.decode("utf-8", "replace")) if line.stamp > last)
    except (DockerException, RequestException, OSError, KitError):
        return  # `ending` says what became of it
    yield from (line for line in split(one, rest.decode("utf-8", "replace")) if line.stamp > last)


def ending(one: Standing) -> tuple[str, bool]:
    """What has become of a rank whose log stream ended, in words, and whether its log will go on."""
    from docker.errors import DockerException, NotFound
    from requests import RequestException

    try:
        one.container.reload()
    except NotFound:
        return "-- the container was removed --", False
    except (DockerException, RequestException, OSError) as error:
        return f"-- the node's engine no longer answers: {' '.join(str(error).split())[:150]} --", False
    if one.state == "restarting":
        return "", True
    if one.state == "running":
        return f"-- started again by its engine ({one.restarts} times so far) --" if one.restarts else "", True
    return f"-- ended with exit code {one.exit_code} --", False
