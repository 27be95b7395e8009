"""An image from node to node over the fabric: a layer server beside the one engine, a loader beside the other.

Nothing of the image passes this machine. The loader runs in an image of the kit, or in a small one with Python that
the target's engine imports from the server. A target that does not reach the server at all gets nothing this way.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import resources
from typing import TYPE_CHECKING, Any

from exl3kit.aboard import layer_loader
from exl3kit.built_image import ENVIRONMENT
from exl3kit.deployment import LABEL
from exl3kit.errors import ExitCode, KitError
from exl3kit.progress import megabytes

if TYPE_CHECKING:
    from docker.models.containers import Container

    from exl3kit.built_image import BuiltImage
    from exl3kit.nodes import Node
    from exl3kit.progress import Stage

HELPER = {LABEL + "helper": "copy"}
TOOLBOX = "exl3kit-toolbox"
REACH_SECONDS = 8.0  # for the toolbox to arrive; a firewall that drops packets says nothing
START_SECONDS = 20.0
DRIVERS = ("overlay2", "fuse-overlayfs")  # storage whose layers are plain folders


class NoWayError(Exception):
    """The fabric cannot be used here, for the reason given; the image can still go through this machine."""


@dataclasses.dataclass(frozen=True)
class Server:
    """A running layer server: where the other nodes reach it."""

    host: str
    port: int
    token: str

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/{self.token}"


def program(name: str) -> str:
    """The text of a program of `exl3kit.aboard`."""
    return (resources.files("exl3kit.aboard") / f"{name}.py").read_text(encoding="utf-8")


def address_of(source: Node, target: Node) -> str:
    """Where the target reaches the source: its fabric address, else (this machine) whence ssh came to the target."""
    if source.address:
        return source.address
    seen = target.run(["sh", "-c", "echo $SSH_CONNECTION"]).stdout.split()
    if target.is_local or not seen:
        raise NoWayError(f"{source.name} has no address that {target.name} knows")
    return seen[0].partition("%")[0]


@contextmanager
def serve(source: Node, built: BuiltImage, address: str, known: int) -> Iterator[Server]:
    """Serve the image's layers, without its `known` lowest ones, on the source's address while the block runs.

    Raises `NoWayError` when the engine's storage is of another kind, or the address is not the node's own.
    """
    info = source.engine.info()
    if info["Driver"] not in DRIVERS:
        raise NoWayError(f"{source.name} stores images as {info['Driver']}")
    root, image = info["DockerRootDir"], str(source.engine.images.get(built.tag).id).removeprefix("sha256:")
    argv = [program("layer_server"), address, image, ",".join(layer_loader.MODULES), str(known)]
    mounts = {f"{root}/{part}": {"bind": f"/store/{part}", "mode": "ro"} for part in ("image", info["Driver"])}
    # Files of a layer may belong to anyone, with any mode.
    with started(source, built.tag, argv, mounts, cap_add=["DAC_READ_SEARCH"]) as (container, lines):
        silent = threading.Timer(START_SECONDS, remove, (container,))
        silent.start()
        said: dict[str, Any] = next(lines, {"error": "no server came up"})
        silent.cancel()
        if "port" not in said:
            raise NoWayError(f"{source.name}: {said['error']}")
        yield Server(address, said["port"], said["token"])


def load(server: Server, target: Node, built: BuiltImage, known: int, stage: Stage, stopped: threading.Event) -> None:
    """Bring the image to the target's engine, without its `known` lowest layers.

    Raises `NoWayError` when the target does not reach the server; `KitError`: unreachable when a link breaks, build
    when the engine refuses the image.
    """
    clear(target)
    job = {**dataclasses.asdict(server), "tag": built.tag, "known": known}
    job["digests"] = [layer.removeprefix("sha256:") for layer in built.layers]
    argv = [program("layer_loader"), json.dumps(job)]
    temporary = f"{target.engine.info()['DockerRootDir']}/tmp"
    mounts = {temporary: {"bind": str(layer_loader.TEMPORARY), "mode": "rw"}}
    mounts[target.engine_socket] = {"bind": layer_loader.ENGINE, "mode": "rw"}
    verdict: dict[str, Any] = {}
    kept = 0
    try:
        with (
            started(target, loader_image(server, target), argv, mounts) as (container, lines),
            removed_when(stopped, container),
        ):
            for verdict in lines:
                if "done" in verdict:
                    stage.total = verdict["of_all"]
                    stage.advance(verdict["done"] - stage.done)
                    kept = verdict["done"] - verdict["fetched"]
                if verdict.get("done") == verdict.get("of_all"):
                    stage.say("the engine unpacks it")
        if stopped.is_set():
            raise KeyboardInterrupt
        if verdict.get("of") == "way" and target.answers():
            raise NoWayError(f"{target.name}: {verdict['error']}")
        if "loaded" not in verdict:
            raise failed(server, target, built, verdict)
    finally:
        clear(target)
    stage.conclude(built.tag + (f", {megabytes(kept)} of it kept from a copy that was cut" if kept > 0 else ""))


def failed(server: Server, target: Node, built: BuiltImage, verdict: dict[str, Any]) -> KitError:
    """Why the loader did not come to its end."""
    what = f"copying {built.tag} from {server.host} broke off"
    why = str(verdict.get("error", "the loader ended without a word"))
    if verdict.get("of") in ("way", "link") or not target.answers():
        if "error" not in verdict:
            why = "the node does not answer any more"
        next_step = "check the cable; the same command goes on where the copy stopped"
        return target.error(what, why=why, next_step=next_step)
    full = "no space left on device" in why
    next_step = "`docker system df` on the node shows what could go" if full else "look at that engine's log"
    return target.error(what, why=why, next_step=next_step, code=ExitCode.BUILD)


# ---- helpers on a node -----------------------------------------------------------------------------------------------


def loader_image(server: Server, target: Node) -> str:
    """What the loader runs in: an image of the kit that the target has, else one that its engine fetches."""
    for image in target.engine.images.list(filters={"label": ENVIRONMENT}):
        return str(image.id)
    import_toolbox(server, target)
    return TOOLBOX


def import_toolbox(server: Server, target: Node) -> None:
    """Let the target's engine fetch an interpreter and its modules as an image."""
    from docker.errors import APIError
    from requests.exceptions import RequestException

    try:
        with target.patient_engine(REACH_SECONDS) as engine:
            changes = [f"LABEL {key}={value}" for key, value in HELPER.items()]
            engine.api.import_image_from_url(f"{server.url}/toolbox", repository=TOOLBOX, changes=changes)
            engine.images.get(TOOLBOX)
    except (APIError, RequestException) as error:
        if not target.answers():
            raise
        said = getattr(error, "explanation", None) or f"{server.host} answers nothing there"
        raise NoWayError(f"{target.name}: {said}") from error


@contextmanager
def started(
    node: Node, image: str, argv: Sequence[str], mounts: dict[str, dict[str, str]], cap_add: Sequence[str] = ()
) -> Iterator[tuple[Container, Iterator[dict[str, Any]]]]:
    """A container that runs `python3 -c ARGV` beside the engine, and the JSON lines it prints; gone after the block.

    It removes itself when it ends, also when this machine can no longer see to it. Raises `NoWayError` when the engine
    does not start it.
    """
    from docker.errors import APIError

    try:
        container = node.engine.containers.create(
            image,
            ["-I", "-c", *argv],
            entrypoint="python3",
            user="0:0",
            auto_remove=True,
            network_mode="host",
            userns_mode="host",
            cap_drop=["ALL"],
            cap_add=list(cap_add),
            security_opt=["no-new-privileges:true", "label=disable"],
            read_only=True,
            labels=HELPER,
            volumes=mounts,
        )
    except APIError as error:
        raise NoWayError(f"{node.name}: {error.explanation}") from error
    try:
        output = container.attach(stdout=True, stderr=True, stream=True, logs=True)
        try:
            container.start()
        except APIError as error:
            raise NoWayError(f"{node.name}: {error.explanation}") from error
        yield container, parsed(output)
    finally:
        remove(container)


def parsed(output: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON lines of a program's output; if it dies with other words, those come last, as an error."""
    rest, other = b"", ""
    for piece in output:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            try:
                yield dict(json.loads(line))
            except ValueError:
                other = line.decode(errors="replace")
    if other:
        yield {"error": other}


@contextmanager
def removed_when(stopped: threading.Event, container: Container) -> Iterator[None]:
    """Remove the container as soon as `stopped` is set, so that whoever follows it comes to the end."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            if stopped.is_set():
                remove(container)
                return

    threading.Thread(target=watch, name="copy", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def remove(container: Container) -> None:
    """Remove a container that may be gone, or out of reach."""
    from docker.errors import DockerException
    from requests.exceptions import RequestException

    with suppress(DockerException, RequestException, OSError):
        container.remove(force=True)


def clear(target: Node) -> None:
    """Remove what copies leave on a node: containers and the toolbox; the layers of a copy that was cut stay."""
    from docker.errors import DockerException
    from requests.exceptions import RequestException

    filters: Any = {"label": [f"{key}={value}" for key, value in HELPER.items()]}
    with suppress(DockerException, RequestException, OSError):
        for container in target.engine.containers.list(all=True, filters=filters, ignore_removed=True):
            remove(container)
        for image in target.engine.images.list(filters=filters):
            target.engine.images.remove(str(image.id), force=True)
