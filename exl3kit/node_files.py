"""Files on a node through its engine: looked at and written by short-lived containers of an image that is there anyway.

So a node needs no rsync, no Python and no unpacked kit, and what is looked at is what a rank would see: the same mount,
the same user.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from exl3kit.deployment import LABEL, MODEL_DIR, USER
from exl3kit.errors import ExitCode

if TYPE_CHECKING:
    from docker import APIClient
    from docker.types import Mount

    from exl3kit.deployment import NodeFacts
    from exl3kit.nodes import Node

INSIDE = "/put"  # where a folder of the node that is written to is mounted
LOOK_SECONDS = 600.0  # a cold disk may need its time
PUT_SECONDS = 600.0  # the longest silence of an engine that takes files


def run(node: Node, image: str, argv: Sequence[str], folder: str, *, user: tuple[int, int] | None = None) -> str:
    """Standard output of a program run in the image, with `folder` read-only at `MODEL_DIR`.

    It runs as the rank's user unless another user and group are named.

    Raises `KitError` (verification) when it fails: then the image is not what it should be.
    """
    with node.patient_engine(LOOK_SECONDS) as engine:
        host = engine.api.create_host_config(
            mounts=[mount(folder, MODEL_DIR, read_only=True)],
            cap_drop=["ALL"],
            security_opt=["no-new-privileges:true"],
            read_only=True,
            network_mode="none",
        )
        made = {
            "entrypoint": argv[:1],
            "command": list(argv[1:]),
            "user": "{}:{}".format(*(user or (USER, USER))),
            "host_config": host,
        }
        with helper(engine.api, image, made) as container:
            engine.api.start(container)
            status = engine.api.wait(container)["StatusCode"]
            output: bytes = engine.api.logs(container, stdout=True, stderr=False)
            if status == 0:
                return output.decode("utf-8", "replace")
            said: bytes = engine.api.logs(container, stdout=True, stderr=True)
    raise node.error(
        f"`{argv[0]}` fails in the image {image}",
        why=said.decode("utf-8", "replace").strip()[-300:],
        next_step="`kit build` makes the image anew",
        code=ExitCode.VERIFICATION,
    )


def put(node: Node, image: str, folder: str, stream: Iterable[bytes]) -> None:
    """Unpack a tar stream into a folder of the node.

    Raises `KitError` (serving) when it breaks off; what was complete by then stays.
    """
    from docker.errors import APIError
    from requests import RequestException

    with node.patient_engine(PUT_SECONDS) as engine:
        host = engine.api.create_host_config(mounts=[mount(folder, INSIDE, read_only=False)])
        with helper(engine.api, image, {"command": ["true"], "host_config": host}) as container:
            try:
                # a generator, as the library takes a list for a form; an empty chunk would end the request
                engine.api.put_archive(container, INSIDE, (chunk for chunk in stream if chunk))
            except (APIError, RequestException, OSError) as error:
                raise node.error(
                    f"writing to {folder} broke off",
                    why=str(error)[:300],
                    next_step="run the command again; what is complete is not copied twice",
                    code=ExitCode.SERVING,
                ) from error


def take(node: Node, image: str, folder: str, name: str, owner: NodeFacts) -> Iterator[bytes]:
    """One file below a folder of the node as a tar stream for `put`; `owner` is the node that gets it."""
    with node.patient_engine(PUT_SECONDS) as engine:
        host = engine.api.create_host_config(mounts=[mount(folder, INSIDE, read_only=True)])
        with helper(engine.api, image, {"command": ["true"], "host_config": host}) as container:
            chunks, stat = engine.api.get_archive(container, f"{INSIDE}/{name}")
            for parent in reversed(PurePosixPath(name).parents[:-1]):
                yield entry(f"{parent}/", 0, 0o755, owner.uid, owner.gid)
            yield entry(name, int(stat["size"]), 0o644, owner.uid, owner.gid)
            skipped, left = 0, int(stat["size"])
            for chunk in chunks:  # the engine's own header first, then the file
                body = chunk[max(0, tarfile.BLOCKSIZE - skipped) :][:left]
                skipped += len(chunk)
                left -= len(body)
                yield body
            yield padding(int(stat["size"]))
            yield END


@contextmanager
def helper(api: APIClient, image: str, made: dict[str, Any]) -> Iterator[str]:
    """The id of a new container that is gone again afterwards."""
    container = str(api.create_container(image, labels={LABEL + "helper": "files"}, **made)["Id"])
    try:
        yield container
    finally:
        api.remove_container(container, force=True, v=True)


def mount(source: str, target: str, *, read_only: bool) -> Mount:
    """A bind mount that the engine refuses when `source` is not there, instead of making an empty folder."""
    from docker.types import Mount

    return Mount(target, source, type="bind", read_only=read_only)


def entry(name: str, size: int, mode: int, uid: int, gid: int) -> bytes:
    """The tar header of a file, or of a folder when the name ends with a slash."""
    info = tarfile.TarInfo(name.rstrip("/"))
    info.size, info.mode, info.uid, info.gid = size, mode, uid, gid
    info.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
    return info.tobuf(tarfile.PAX_FORMAT)


def padding(size: int) -> bytes:
    """What follows a file of `size` bytes in a tar stream."""
    return bytes(-size % tarfile.BLOCKSIZE)


END = bytes(2 * tarfile.BLOCKSIZE)  # what ends a tar stream


def put_secret(node: Node, image: str, path: str, secret: str) -> None:
    """Write a file that only the rank's user may read, into a folder that only the node's user may enter."""
    folder, name = str(PurePosixPath(path).parent), PurePosixPath(path).name
    made = node.run(["install", "-d", "-m", "700", folder])
    if made.returncode != 0:
        raise node.error(f"cannot make {folder}", why=made.stderr.strip(), code=ExitCode.PREFLIGHT)
    text = secret.encode()
    put(node, image, folder, [entry(name, len(text), 0o400, USER, USER), text, padding(len(text)), END])
