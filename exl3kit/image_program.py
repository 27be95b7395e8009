"""Running a program of an image once on a node, in a container that is gone afterwards."""

from __future__ import annotations

import io
import logging
import tarfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from exl3kit.errors import ExitCode

if TYPE_CHECKING:
    from docker.models.containers import Container

    from exl3kit.nodes import Node

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ended:
    """How the program ended: exit code, what it printed, and the files of `collect` by their path below it."""

    code: int
    stdout: str
    stderr: str
    files: Mapping[str, bytes] = field(default_factory=dict)


def run(
    node: Node,
    image: str,
    argv: Sequence[str],
    *,
    gpus: bool = False,
    collect: str | None = None,
    tell: Callable[[str], None] | None = None,
    seconds: float = 600,
) -> Ended:
    """Run ``argv`` in ``image`` on ``node``, without a network; its user and environment are the image's.

    Parameters
    ----------
    gpus: give it all GPUs of the node.
    collect: a folder in the container whose files are handed back when it has ended.
    tell: gets every line of its stderr as it comes.
    seconds: it is ended after that long.

    Raises `KitError`: verification when the image is not there, preflight when the engine cannot start it so.
    """
    from docker.errors import DockerException, ImageNotFound

    made: dict[str, Any] = {"entrypoint": list(argv[:1]), "command": list(argv[1:]), "network_disabled": True}
    if gpus:
        made["device_requests"] = gpu_request(node)
    with node.patient_engine(seconds) as engine:
        try:
            container = engine.containers.create(image, **made)
        except ImageNotFound as error:
            step = "`kit build RECIPE` with the same --nodes"
            raise node.error(f"has no image {image}", next_step=step, code=ExitCode.VERIFICATION) from error
        try:
            _start(node, container, gpus)
            code = _wait(node, container, tell, seconds)
            stdout = container.logs(stdout=True, stderr=False).decode(errors="replace")
            stderr = container.logs(stdout=False, stderr=True).decode(errors="replace")
            log.debug("%s in a container on %s: exit code %s\n%s%s", image, node.name, code, stdout, stderr)
            return Ended(code, stdout, stderr, _files(container, collect) if collect else {})
        finally:
            with suppress(DockerException):  # an engine that was lost is told elsewhere
                container.remove(force=True)


def _start(node: Node, container: Container, gpus: bool) -> None:
    from docker.errors import APIError

    try:
        container.start()
    except APIError as error:
        what = "the engine cannot give a container the GPU" if gpus else "the engine cannot start the image"
        step = "`kit doctor` says what the node lacks" if gpus else None
        raise node.error(what, why=str(error.explanation), next_step=step, code=ExitCode.PREFLIGHT) from error


def gpu_request(node: Node) -> list[Any]:
    """All GPUs, in the way that the engine knows: NVIDIA's runtime, else the devices of a CDI file."""
    from docker.types import DeviceRequest

    if "nvidia" in (node.engine.info().get("Runtimes") or {}):
        return [DeviceRequest(driver="nvidia", count=-1, capabilities=[["gpu"]])]
    return [DeviceRequest(driver="cdi", device_ids=["nvidia.com/gpu=all"])]


def _wait(node: Node, container: Container, tell: Callable[[str], None] | None, seconds: float) -> int:
    from requests.exceptions import ConnectionError as Cut
    from requests.exceptions import ReadTimeout

    if tell is not None:
        rest = b""
        for piece in container.logs(stdout=False, stderr=True, stream=True, follow=True):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                tell(line.decode(errors="replace").rstrip())
    try:
        return int(container.wait(timeout=seconds)["StatusCode"])
    except (ReadTimeout, Cut) as error:
        argv = " ".join(container.attrs["Config"]["Cmd"] or ())
        raise node.error(
            f"`{argv}` has not ended after {seconds:.0f} s",
            next_step="look at what else uses the GPU (`nvidia-smi` on that node)",
            code=ExitCode.PREFLIGHT,
        ) from error


def _files(container: Container, folder: str) -> dict[str, bytes]:
    """Path below ``folder`` -> content; empty when the program made no such folder."""
    from docker.errors import NotFound

    try:
        chunks, _ = container.get_archive(folder)
    except NotFound:
        return {}
    found = {}
    with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as tar:
        for member in tar:
            if stream := tar.extractfile(member) if member.isfile() else None:
                found[member.name.partition("/")[2]] = stream.read()
    return found
