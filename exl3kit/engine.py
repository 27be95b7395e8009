"""A container engine behind a URL: find the local one, connect with a deadline, and say what is wrong in a sentence."""

from __future__ import annotations

import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from exl3kit.errors import ExitCode, KitError

if TYPE_CHECKING:
    from docker import DockerClient

MINIMUM_API = (1, 41)  # engine 20.10 of 2020, the oldest that the kit is tested with
MINIMUM_ENGINE = "20.10"
CONNECT_SECONDS = 5
CALL_SECONDS = 60
DEFAULT_SOCKET = Path("/var/run/docker.sock")
DAEMON_FOLDER = "/usr/sbin"  # Debian's dockerd; not on the PATH of a user who is not root
SYSTEMD = Path("/run/systemd/system")  # there when systemd runs the machine

INSTALL_HINT = "install Docker (Debian: `apt-get install docker.io`), or let `kit demo --install-engine` do it"

NOT_ALLOWED = "this user may not use the container engine"


class EngineError(Exception):
    """An engine did not answer as one; the cause is the library's exception."""


@dataclass(frozen=True)
class Found:
    """Where the local engine should be, and who said so."""

    url: str
    source: str


def local() -> Found:
    """The local engine's URL: DOCKER_HOST, else the docker context, else the usual sockets.

    Raises `KitError` (exit 6) when nothing points to an engine.
    """
    if host := os.environ.get("DOCKER_HOST"):
        return Found(host, "DOCKER_HOST")
    if found := _context():
        return found
    for socket, source in _usual_sockets():
        if socket.exists():
            return Found(f"unix://{socket}", source)
    missing, next_step = "Docker is not installed", INSTALL_HINT
    if is_installed():
        missing = "it is installed but not started"
        next_step = "`systemctl start docker`" if SYSTEMD.exists() else "no systemd runs here: start `dockerd` as root"
    raise KitError(
        "no container engine on this machine",
        where="node local",
        why=f"no {DEFAULT_SOCKET}, no DOCKER_HOST, no docker context; {missing}",
        next_step=next_step,
        code=ExitCode.UNREACHABLE,
    )


def is_installed() -> bool:
    """Whether Docker's daemon is on this machine, also where the user's PATH does not lead to it."""
    return shutil.which("dockerd", path=f"{os.environ.get('PATH', os.defpath)}:{DAEMON_FOLDER}") is not None


def _context() -> Found | None:
    """The docker CLI's current context, when it is another than the default."""
    from docker.context import ContextAPI
    from docker.context.config import get_current_context_name

    if not (Path(os.environ.get("DOCKER_CONFIG", Path.home() / ".docker")) / "config.json").exists():
        return None  # the library returns no context at all without this file
    name = os.environ.get("DOCKER_CONTEXT") or get_current_context_name()
    if name == "default":
        return None
    context = ContextAPI.get_context(name)
    if context is None:
        raise KitError(
            f"there is no docker context {name!r}",
            where="node local",
            next_step="`docker context ls`; then unset DOCKER_CONTEXT or `docker context use default`",
            code=ExitCode.UNREACHABLE,
        )
    return Found(str(context.Host), f"docker context {name}")


def _usual_sockets() -> list[tuple[Path, str]]:
    sockets = [(DEFAULT_SOCKET, "the usual socket")]
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        sockets.append((Path(runtime) / "docker.sock", "the rootless engine's socket"))
    return sockets


def connect(url: str, *, timeout: float = CALL_SECONDS) -> DockerClient:
    """A client whose calls end after `timeout` seconds; the engine has answered once, within 5 s.

    Raises `EngineError` when it does not answer, or is older than 20.10.
    """
    import docker
    from docker.errors import DockerException

    probe = None
    try:
        probe = docker.APIClient(base_url=url, version="auto", timeout=CONNECT_SECONDS)
        version = probe.version()
    except (DockerException, OSError, ValueError) as error:
        raise EngineError(_reason(error)) from error
    finally:
        if probe is not None:
            probe.close()
    api = str(version["ApiVersion"])
    if tuple(int(part) for part in api.split(".")) < MINIMUM_API:
        raise EngineError(f"too old: engine {version['Version']} (API {api}), the kit needs {MINIMUM_ENGINE} or newer")
    return docker.DockerClient(base_url=url, version=api, timeout=int(timeout))


def open_local() -> tuple[DockerClient, str]:
    """(client, URL) of the local engine; a `KitError` (exit 6) names what is missing."""
    found = local()
    if found.url.startswith("ssh://"):
        raise KitError(
            f"{found.source} leads to another machine ({found.url})",
            where="node local",
            next_step=f"name that machine: `--nodes {found.url.removeprefix('ssh://')}`",
            code=ExitCode.UNREACHABLE,
        )
    try:
        return connect(found.url), found.url
    except EngineError as error:
        raise _local_refusal(found, error) from error


def _local_refusal(found: Found, error: EngineError) -> KitError:
    what, next_step = "the container engine does not answer", "`systemctl status docker`"
    path = Path(found.url.removeprefix("unix://"))
    said = str(error)
    if said.startswith("too old"):
        what, next_step = "the container engine is too old", f"install Docker {MINIMUM_ENGINE} or newer"
    elif found.url.startswith("unix://"):
        if not _is_socket(path):
            what = "no container engine on this machine"
            next_step = f"repair {found.source}" if found.source.startswith("D") else INSTALL_HINT
        elif not os.access(path, os.W_OK):
            what = NOT_ALLOWED
            next_step = "`sudo usermod -aG docker $USER`, then log out and in again"
        else:
            next_step = "`systemctl restart docker`, then `journalctl -u docker`"
    why = f"{found.url}, from {found.source}: {said}"
    return KitError(what, where="node local", why=why, next_step=next_step, code=ExitCode.UNREACHABLE)


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.stat().st_mode)
    except OSError:
        return False


def _reason(error: BaseException) -> str:
    """The innermost cause in words: the libraries wrap an OSError three times."""
    text = str(error)
    for layer in _chain(error):
        if isinstance(layer, OSError) and layer.strerror:
            return layer.strerror.lower()
        text = str(layer) or text
    return text.replace("\n", " ")[:200]


def _chain(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    layer: BaseException | None = error
    while layer is not None and layer not in chain:
        chain.append(layer)
        layer = layer.__cause__ or layer.__context__
    return chain[::-1]
