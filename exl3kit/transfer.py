"""The same image on every node: streamed from engine to engine through this machine, without what is there already."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from exl3kit import built_image, save_stream, side_by_side
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
    """Copy one image from engine to engine, in constant memory and without the layers that are there already.

    An engine with another kind of store may want all of them after all, and then gets them.
    """
    known = layers_there(target, built)
    with progress.stage(f"image to {target.name}", total=None if known else built.size) as stage:
        try:
            _send(source, target, built, known, stage, stopped)
        except KitError:
            if not known or not target.answers():
                raise
            stage.say("once more, with every layer")
            _send(source, target, built, set(), stage, stopped)
        stage.conclude(built.tag)


def _send(
    source: Node, target: Node, built: BuiltImage, known: set[str], stage: Stage, stopped: threading.Event
) -> None:
    from docker.errors import DockerException
    from requests.exceptions import RequestException

    with source.patient_engine(SILENT_SECONDS) as reading, target.patient_engine(SILENT_SECONDS) as writing:
        try:
            stream = save_stream.without(reading.api.get_image(built.tag, chunk_size=CHUNK), known)
            answer = writing.api.load_image(_counted(stream, stage, stopped))  # type: ignore[no-untyped-call]
            for message in answer:
                if "error" in message:
                    raise _broken(source, target, built, str(message["error"]))
            _verify(target, built)
        except (DockerException, RequestException, OSError) as error:
            _forget(target, built)
            raise _broken(source, target, built, _words(error)) from error
        except BaseException:
            _forget(target, built)
            raise


def layers_there(target: Node, built: BuiltImage) -> set[str]:
    """The image's lowest layers that the target has in the same order, from any image it holds.

    Not those that come again higher up: there they lie on other layers, and the engine wants their content.
    """
    others = [image.attrs["RootFS"].get("Layers") or [] for image in target.engine.images.list()]
    common = save_stream.common_layers(built.layers, others)
    return set(built.layers[:common]) - set(built.layers[common:])


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
