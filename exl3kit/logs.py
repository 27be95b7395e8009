"""Logs of all ranks of a deployment, each line with the rank and node it comes from."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from exl3kit.containers import Standing


def lines(standing: Sequence[Standing], *, tail: int) -> Iterator[tuple[Standing, str]]:
    """The last `tail` lines of every rank, merged by time."""
    stamped = [
        (stamp, one, text)
        for one in standing
        for stamp, text in (
            split(line)
            for line in one.container.logs(tail=tail, timestamps=True).decode("utf-8", "replace").splitlines()
        )
    ]
    for _, one, text in sorted(stamped, key=lambda item: item[0]):
        yield one, text


def split(line: str) -> tuple[str, str]:
    """Docker's timestamp and the text of one line."""
    stamp, _, text = line.partition(" ")
    return stamp, text


def follow(standing: Sequence[Standing], *, tail: int) -> Iterator[tuple[Standing, str]]:
    """Lines of all ranks as they come, until every rank has ended; a rank's end is told as a line of its own.

    A stream also ends without an error when the link or the engine goes, so the container is looked at again then.
    """
    arrived: queue.Queue[tuple[Standing, str | None]] = queue.Queue()
    for one in standing:
        threading.Thread(target=pump, args=(one, tail, arrived), daemon=True).start()
    open_streams = len(standing)
    while open_streams:
        one, text = arrived.get()
        if text is None:
            open_streams -= 1
            yield one, ending(one)
        else:
            yield one, text


def pump(one: Standing, tail: int, arrived: queue.Queue[tuple[Standing, str | None]]) -> None:
    """Put every line of one container's log into `arrived`, and None at the end of the stream."""
    rest = b""
    try:
        with one.node.patient_engine(7 * 24 * 3600) as engine:
            for chunk in engine.api.logs(str(one.container.id), stream=True, follow=True, tail=tail):
                *whole, rest = (rest + chunk).split(b"\n")
                for line in whole:
                    arrived.put((one, line.decode("utf-8", "replace").rstrip("\r")))
    finally:
        if rest:
            arrived.put((one, rest.decode("utf-8", "replace")))
        arrived.put((one, None))


def ending(one: Standing) -> str:
    """What has become of a rank whose log stream ended."""
    from docker.errors import DockerException, NotFound
    from requests import RequestException

    try:
        one.container.reload()
    except NotFound:
        return "-- the container was removed --"
    except (DockerException, RequestException, OSError) as error:
        return f"-- the node's engine no longer answers: {error} --"
    if one.state == "running":
        return "-- the stream broke off, and the rank still runs --"
    return f"-- ended with exit code {one.exit_code} --"
