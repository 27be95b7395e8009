"""The same image on every node, without the layers that are there: over the fabric, else through this machine."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from exl3kit import built_image, fabric_copy, save_stream, side_by_side
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

    Raises `KitError`: preflight when a target has no room for it, unreachable when a link breaks, build when an engine
    refuses it, verification when what arrived is another image. A copy that failed leaves no tag behind.
    """
    known = dict(
        zip(targets, side_by_side.run(*(partial(layers_there, target, built) for target in targets)), strict=True)
    )
    check_room(source, known, built)
    stopped = threading.Event()
    copies = [partial(copy, source, target, built, known[target], progress, stopped) for target in targets]
    side_by_side.run(*copies, stopped=stopped, say=progress.tell)


def check_room(source: Node, known: Mapping[Node, int], built: BuiltImage) -> None:
    """Raise `KitError` (preflight) unless every target's engine has room for the stream and for what it becomes."""
    sizes = layer_sizes(source, built)
    short = []
    for target, there in known.items():
        needed, free = int(sum(sizes[there:]) * ROOM_PER_BYTE), target.free_bytes()
        if free < needed:
            amounts = f"{needed / 1e9:.2f} GB while it is loaded, {free / 1e9:.2f} GB are free"
            short.append(
                target.error(
                    f"{(needed - free) / 1e9:.2f} GB are missing for {built.tag}: it needs {amounts}",
                    why=f"the engine keeps what arrives beside the {sum(sizes[there:]) / 1e9:.2f} GB that it unpacks",
                    next_step=f"`docker system df` on {target.name} shows what could go; `kit image prune`",
                    code=ExitCode.PREFLIGHT,
                )
            )
    if short:
        raise _together(short)


def _together(short: Sequence[KitError]) -> KitError:
    if len(short) == 1:
        return short[0]
    where = ", ".join(str(error.where) for error in short)
    why = "; ".join(f"{error.where}: {error.what}" for error in short)
    steps = "; ".join(str(error.next_step) for error in short)
    return KitError(f"{len(short)} nodes lack room", where=where, why=why, next_step=steps, code=ExitCode.PREFLIGHT)


def layer_sizes(node: Node, built: BuiltImage) -> list[int]:
    """Bytes of each layer, from the lowest; all in the topmost where the engine does not tell them apart."""
    told = [int(entry["Size"]) for entry in node.engine.images.get(built.tag).history()][::-1]
    sizes = [size for size in told if size]
    return sizes if len(sizes) == len(built.layers) else [0] * (len(built.layers) - 1) + [built.size]


def copy(
    source: Node, target: Node, built: BuiltImage, known: int, progress: Progress, stopped: threading.Event
) -> None:
    """Copy one image from engine to engine, in constant memory and without its `known` lowest layers.

    Over the fabric where the target reaches the source, else through this machine. An engine with another kind of
    store may want the layers after all that it has, and then gets them.
    """
    missing = sum(layer_sizes(source, built)[known:])
    with progress.stage(f"image to {target.name}", total=missing) as stage:
        try:
            _bring(source, target, built, known, stage, stopped)
        except KitError as error:
            if not known or error.code == ExitCode.UNREACHABLE:
                raise
            stage.say("once more, with every layer")
            stage.restart(built.size)
            _bring(source, target, built, 0, stage, stopped)
        _verify(target, built)


def _bring(source: Node, target: Node, built: BuiltImage, known: int, stage: Stage, stopped: threading.Event) -> None:
    from docker.errors import DockerException
    from requests.exceptions import RequestException

    try:
        try:
            address = fabric_copy.address_of(source, target)
            with fabric_copy.serve(source, built, address, known) as server:
                fabric_copy.load(server, target, built, known, stage, stopped)
        except fabric_copy.NoWayError as error:
            stage.say(f"through this machine, as there is no way over the fabric: {error}")
            _send(source, target, built, known, stage, stopped)
            stage.conclude(f"{built.tag}, through this machine: {error}")
    except (DockerException, RequestException, OSError) as error:
        _forget(target, built)
        raise _broken(source, target, built, _words(error)) from error
    except BaseException:
        _forget(target, built)
        raise


def _send(source: Node, target: Node, built: BuiltImage, known: int, stage: Stage, stopped: threading.Event) -> None:
    """Through this machine: what `docker save` streams there, without the layers that are there."""
    # Layers that come again higher up lie on other layers there, and the engine wants their content.
    unwanted = set(built.layers[:known]) - set(built.layers[known:])
    with source.patient_engine(SILENT_SECONDS) as reading, target.patient_engine(SILENT_SECONDS) as writing:
        stream = save_stream.without(reading.api.get_image(built.tag, chunk_size=CHUNK), unwanted)
        answer = writing.api.load_image(_counted(stream, stage, stopped))  # type: ignore[no-untyped-call]
        for message in answer:
            if "error" in message:
                raise _broken(source, target, built, str(message["error"]))


def layers_there(target: Node, built: BuiltImage) -> int:
    """How many of the image's lowest layers the target has in the same order, from any image it holds."""
    others = [image.attrs["RootFS"].get("Layers") or [] for image in target.engine.images.list()]
    return save_stream.common_layers(built.layers, others)


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
    lost = next((node for node in (target, source) if not node.answers()), None)
    next_step = f"check the way to {(lost or target).name} and run the same command again"
    if "no space left on device" in why:
        next_step = "`docker system df` on the node shows what could go"
    code = ExitCode.BUILD if lost is None else ExitCode.UNREACHABLE
    return (lost or target).error(
        f"copying {built.tag} from {source.name} broke off", why=why, next_step=next_step, code=code
    )


def _words(error: BaseException) -> str:
    explanation = getattr(error, "explanation", None)
    return str(explanation or error).replace("\n", " ")[:300]
