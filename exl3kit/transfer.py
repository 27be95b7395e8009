"""The same image on every node: streamed whole from engine to engine, through this machine, nothing stored here."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from exl3kit import built_image, side_by_side
from exl3kit.errors import ExitCode, KitError

if TYPE_CHECKING:
    from exl3kit.built_image import BuiltImage
    from exl3kit.nodes import Node
    from exl3kit.progress import Progress, Stage

CHUNK = 1 << 21
SILENT_SECONDS = 1800  # an engine unpacks gigabytes without a word
# An engine spools the whole stream (about the image's size) before it unpacks it.
ROOM_PER_BYTE = 2.05


def spread(source: Node, targets: Sequence[Node], built: BuiltImage, *, progress: Progress) -> None:
    """Copy the image to every target at the same time; each copy is verified.

    Raises `KitError`: preflight when a target has no room for it, build when a copy breaks off, verification when what
    arrived is another image. A copy that failed leaves no tag behind.
    """
    for target in targets:
        check_room(target, built)
    stopped = threading.Event()
    copies = [partial(copy, source, target, built, progress, stopped) for target in targets]
    side_by_side.run(*copies, stopped=stopped)


def check_room(target: Node, built: BuiltImage) -> None:
    """Raise `KitError` (preflight) unless the target's engine has room for the stream and for what it becomes."""
    needed = int(built.size * ROOM_PER_BYTE)
    free = target.free_bytes()
    if free < needed:
        raise target.error(
            f"{built.tag} needs {needed / 1e9:.1f} GB there while it is loaded and {free / 1e9:.1f} GB are free",
            why=f"the engine keeps the stream beside the {built.size / 1e9:.1f} GB that it unpacks",
            next_step="`docker system df` on the node shows what could go",
            code=ExitCode.PREFLIGHT,
        )


def copy(source: Node, target: Node, built: BuiltImage, progress: Progress, stopped: threading.Event) -> None:
    """Copy one image from engine to engine, in constant memory."""
    from docker.errors import DockerException
    from requests.exceptions import RequestException

    with (
        progress.stage(f"image to {target.name}", total=built.size) as stage,
        source.patient_engine(SILENT_SECONDS) as reading,
        target.patient_engine(SILENT_SECONDS) as writing,
    ):
        try:
            stream = reading.api.get_image(built.tag, chunk_size=CHUNK)
            answer = writing.api.load_image(_counted(stream, stage, stopped))  # type: ignore[no-untyped-call]
            for message in answer:
                if "error" in message:
                    raise _broken(source, target, built, str(message["error"]))
            stage.say("verifying")
            _verify(target, built)
            stage.conclude(built.tag)
        except (DockerException, RequestException, OSError) as error:
            _forget(target, built)
            raise _broken(source, target, built, _words(error)) from error
        except BaseException:
            _forget(target, built)
            raise


def _counted(stream: Iterator[bytes], stage: Stage, stopped: threading.Event) -> Iterator[bytes]:
    for piece in stream:
        if stopped.is_set():
            raise KeyboardInterrupt
        stage.advance(len(piece))
        yield piece
    stage.say("the engine unpacks it")


def _verify(target: Node, built: BuiltImage) -> None:
    there = built_image.find(target, built.stamp)
    if there is None or not there.same_content(built):
        raise target.error(
            f"what arrived as {built.tag} is another image",
            why="stamp or layers differ from the one that was sent",
            next_step="look at that engine's log, then run the same command again",
            code=ExitCode.VERIFICATION,
        )


def _forget(target: Node, built: BuiltImage) -> None:
    """Remove the tag if it leads to another image than the one meant; an unreachable node keeps what it has."""
    from docker.errors import DockerException
    from requests.exceptions import RequestException

    with suppress(DockerException, RequestException, OSError):
        there = built_image.find(target, built.stamp)
        if there is not None and not there.same_content(built):
            target.engine.images.remove(built.tag)


def _broken(source: Node, target: Node, built: BuiltImage, why: str) -> KitError:
    next_step = f"check `ping {target.address or target.name}` and run the same command again"
    if "no space left on device" in why:
        next_step = "`docker system df` on the node shows what could go"
    return target.error(
        f"copying {built.tag} from {source.name} broke off", why=why, next_step=next_step, code=ExitCode.BUILD
    )


def _words(error: BaseException) -> str:
    explanation = getattr(error, "explanation", None)
    return str(explanation or error).replace("\n", " ")[:300]
