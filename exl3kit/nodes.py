"""The machines of one verb, opened together and closed together: an engine and a way to run commands on each."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from exl3kit import engine as engines
from exl3kit import ssh
from exl3kit.cluster import ENGINE_SOCKET, Host, hosts
from exl3kit.errors import ExitCode, KitError

if TYPE_CHECKING:
    from docker import DockerClient


log = logging.getLogger(__name__)


class Runner(Protocol):
    """How commands reach a node."""

    def __call__(
        self, argv: Sequence[str], *, input: str | None = None, timeout: float = ssh.COMMAND_SECONDS
    ) -> subprocess.CompletedProcess[str]: ...


class Spawner(Protocol):
    """How a program is started on a node that runs until its stdin closes; stdin and stdout are pipes."""

    def __call__(self, argv: Sequence[str]) -> subprocess.Popen[bytes]: ...


@dataclass(frozen=True)
class Node:
    """One opened machine.

    `engine` answers within 60 s or raises; `engine_url` is its socket here, for programs such as buildx and compose;
    `address` is where other nodes reach it (None for `local`, unless a cluster file says); `run` runs a command on it,
    and `spawn` starts one that lives as long as its stdin is open.
    """

    name: str
    engine: DockerClient
    engine_url: str
    address: str | None
    is_local: bool
    run: Runner
    spawn: Spawner
    engine_socket: str = ENGINE_SOCKET  # on the node itself

    @contextmanager
    def patient_engine(self, seconds: float) -> Iterator[DockerClient]:
        """Another client of the same engine, for calls that are silent for long, as when an image is unpacked.

        Raises `KitError` (unreachable) when it does not answer at all.
        """
        try:
            client = engines.connect(self.engine_url, timeout=seconds)
        except engines.EngineError as error:
            next_step = "look at the node's link, load and engine, then run the command again"
            raise self.error("the engine no longer answers", why=str(error), next_step=next_step) from error
        try:
            yield client
        finally:
            client.close()

    def answers(self) -> bool:
        """Whether the engine still answers, asked now."""
        from docker.errors import DockerException
        from requests.exceptions import RequestException

        try:
            return bool(self.engine.ping())
        except (DockerException, RequestException):
            return False

    def free_bytes(self) -> int:
        """Free bytes on the disk that holds the engine's data; raises `KitError` when the node cannot tell.

        A local engine whose folder is not on this machine runs in a virtual machine (Docker Desktop): then nothing is
        known, and as much as can be is assumed.
        """
        folder = str(self.engine.info()["DockerRootDir"])
        if self.is_local and not Path(folder).exists():
            return sys.maxsize
        done = self.run(["df", "-P", "-B1", folder])
        try:
            return int(done.stdout.splitlines()[1].split()[3])
        except (IndexError, ValueError) as error:
            said = done.stderr.strip() or done.stdout.strip() or "nothing"
            raise self.error("the free disk space is not known", why=f"df {folder} says: {said}") from error

    def error(self, what: str, *, why: str | None = None, next_step: str | None = None,
              code: ExitCode = ExitCode.UNREACHABLE) -> KitError:  # fmt: skip
        """A `KitError` that names this node."""
        return KitError(what, where=f"node {self.name}", why=why, next_step=next_step, code=code)


@contextmanager
def open_nodes(named: str | Sequence[Host], *, missing: dict[str, KitError] | None = None) -> Iterator[list[Node]]:
    """Open every node at the same time; close all of them at the end, however it ends.

    Parameters
    ----------
    named: the text of `--nodes` (`a,b`, a cluster file, `local`), or hosts already read from it.
    missing: gets the error of every node that cannot be opened, by its name, and the others are given; without it, all
        must open.

    Raises `KitError` (exit 6) that names every node which could not be opened, within 8 s for a dead one.
    """
    listed = hosts(named) if isinstance(named, str) else list(named)
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="kit-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        openings = _open_all(listed, folder)
        failures: dict[str, KitError] = {}
        nodes: list[Node] = []
        for host, opening in zip(listed, openings, strict=True):
            try:
                node, closing = opening.result()
            except KitError as error:
                log.info("%s", error)
                failures[host.name] = error
            else:
                stack.push(closing)
                nodes.append(node)
        if missing is not None:
            missing.update(failures)
        elif failures:
            raise _together(list(failures.values()))
        with _lost_nodes_named(nodes):
            yield nodes


@contextmanager
def _lost_nodes_named(nodes: Sequence[Node]) -> Iterator[None]:
    """An engine that is lost in the middle of a call becomes a sentence with the node's name."""
    from docker.errors import DockerException
    from requests.exceptions import RequestException

    try:
        yield
    except (DockerException, RequestException) as error:
        lost = [node for node in nodes if not node.answers()]
        if not lost:
            raise
        why = str(error).replace("\n", " ")[:200]
        next_step = "look at the network and at that engine's log, then run the same command again"
        raise _together([node.error("the engine was lost", why=why, next_step=next_step) for node in lost]) from error


Opening = Future[tuple["Node", ExitStack]]


def _open_all(listed: Sequence[Host], folder: Path) -> list[Opening]:
    """Open side by side; when Ctrl-C comes meanwhile, what opens later is closed again."""
    pool = ThreadPoolExecutor(max_workers=len(listed), thread_name_prefix="open")
    openings = [pool.submit(_open, host, folder / str(number)) for number, host in enumerate(listed)]
    try:
        wait(openings)
    except BaseException:
        for opening in openings:
            opening.add_done_callback(_close_late)
        raise
    finally:
        pool.shutdown(wait=False)
    return openings


def _close_late(opening: Opening) -> None:
    if not opening.exception():
        opening.result()[1].close()


def _together(failures: Sequence[KitError]) -> KitError:
    if len(failures) == 1:
        return failures[0]
    where = ", ".join(str(failure.where) for failure in failures)
    why = "; ".join(
        f"{failure.where}: {failure.what}" + (f", {failure.why}" if failure.why else "") for failure in failures
    )
    next_step = "; ".join(f"{failure.where}: {failure.next_step}" for failure in failures if failure.next_step)
    what = f"{len(failures)} nodes cannot be used"
    return KitError(what, where=where, why=why, next_step=next_step or None, code=ExitCode.UNREACHABLE)


def _open(host: Host, folder: Path) -> tuple[Node, ExitStack]:
    with ExitStack() as stack:
        if host.is_local:
            client, url = engines.open_local()
            stack.callback(client.close)
            node = Node(host.name, client, url, host.address, True, _run_here, _spawn_here, url.removeprefix("unix://"))
        else:
            node = _open_remote(host, folder, stack)
        return node, stack.pop_all()


def _run_here(
    argv: Sequence[str], *, input: str | None = None, timeout: float = ssh.COMMAND_SECONDS
) -> subprocess.CompletedProcess[str]:
    return ssh.finish("local", argv, argv[0], input=input, timeout=timeout)


def _spawn_here(argv: Sequence[str]) -> subprocess.Popen[bytes]:
    return ssh.start(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def _open_remote(host: Host, folder: Path, stack: ExitStack) -> Node:
    assert host.ssh is not None
    folder.mkdir(mode=0o700)
    connection = ssh.Connection(host.name, host.ssh, folder)
    stack.callback(connection.close)
    socket = folder / "sock"
    url = f"unix://{socket}"
    connection.forward(socket, host.engine)
    try:
        client = engines.connect(url)
    except engines.EngineError as error:
        facts = ask_engine_facts(connection.run, host.engine)
        if not facts.answers or str(error).startswith("too old"):
            raise engine_refusal(host, facts, str(error)) from error
        # The engine is fine, so sshd refuses to forward sockets (AllowStreamLocalForwarding no).
        client = _connect_bridged(connection, host, socket)
    stack.callback(client.close)
    address = host.address or connection.server_address
    return Node(host.name, client, url, address, False, connection.run, connection.spawn, host.engine)


def _connect_bridged(connection: ssh.Connection, host: Host, socket: Path) -> DockerClient:
    connection.bridge(socket, ["docker", "--host", f"unix://{host.engine}", "system", "dial-stdio"])
    try:
        return engines.connect(f"unix://{socket}")
    except engines.EngineError as error:
        raise ssh.unreachable(
            host.name,
            "the engine cannot be reached through ssh",
            why=f"sshd forwards no sockets, and `docker system dial-stdio` says: {error}",
            next_step="set `AllowStreamLocalForwarding yes` in the node's sshd_config",
        ) from error


@dataclass(frozen=True)
class EngineFacts:
    """What a node says about its engine, asked over ssh because the forwarded socket did not answer."""

    user: str
    groups: tuple[str, ...]
    in_group_file: bool
    has_docker: bool
    has_socket: bool
    may_write: bool
    answers: bool
    said: str


# One line per fact, so that it needs nothing but a POSIX shell on the node. The socket is $1.
_ASK = """
echo user $(id -un); echo groups $(id -Gn)
getent group docker | cut -d: -f4 | tr , '\\n' | grep -qx "$(id -un)" && echo in_group_file
{ command -v docker || command -v dockerd; } >/dev/null && echo has_docker
[ -S "$1" ] && echo has_socket
[ -w "$1" ] && echo may_write
said=$(timeout 5 docker --host "unix://$1" version --format '{{.Server.Version}}' 2>&1) && echo answers
echo said $said
"""


def ask_engine_facts(run: Runner, socket: str) -> EngineFacts:
    """Ask one node; missing programs there read as missing facts."""
    lines = run(["sh", "-c", _ASK, "sh", socket], timeout=15).stdout.splitlines()
    facts = {key: rest for key, _, rest in (line.partition(" ") for line in lines)}
    return EngineFacts(
        user=facts.get("user", ""),
        groups=tuple(facts.get("groups", "").split()),
        in_group_file="in_group_file" in facts,
        has_docker="has_docker" in facts,
        has_socket="has_socket" in facts,
        may_write="may_write" in facts,
        answers="answers" in facts,
        said=facts.get("said", ""),
    )


def engine_refusal(host: Host, facts: EngineFacts, error: str) -> KitError:
    """Why the engine of a node that ssh reaches cannot be used, and the way out."""
    said = facts.said or error
    if error.startswith("too old"):
        what, why, next_step = "the container engine is too old", error, "install a newer Docker on the node"
    elif not facts.has_socket and not facts.has_docker:
        what, why, next_step = "no container engine", "Docker is not installed", "install Docker on the node"
    elif not facts.has_socket:
        what, why = "the container engine is not running", f"there is no socket {host.engine}"
        next_step = "`systemctl start docker` on the node, or name its socket as `engine:` in a cluster file"
    elif not facts.may_write and facts.in_group_file and "docker" not in facts.groups:
        what, why = f"user {facts.user} may not use the engine yet", "added to the docker group after this login began"
        next_step = f"end all sessions of {facts.user} there (`loginctl terminate-user {facts.user}`) and try again"
    elif not facts.may_write:
        what, why = f"user {facts.user} may not use the engine", "not in the group docker"
        next_step = f"`sudo usermod -aG docker {facts.user}` on the node"
    else:
        what, why, next_step = "the container engine does not answer", said, "`systemctl restart docker` on the node"
    return ssh.unreachable(host.name, what, why=why, next_step=next_step)
