"""One OpenSSH connection per node: it forwards the engine's socket and runs commands, each with a deadline.

The connection is a control master whose remote command is `cat` on a pipe of ours: when the kit ends, however it ends,
the pipe closes, `cat` ends and ssh with it. Everything else goes through its control socket, without the user's
configuration (a `LocalForward` or `RemoteCommand` there would break it) and without a way to connect anew behind our
back.
"""

from __future__ import annotations

import logging
import os
import selectors
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from exl3kit.errors import ExitCode, KitError

CONNECT_SECONDS = 5  # for the TCP connection; a dead link is named after this
OPEN_SECONDS = 7.0  # for the whole way to a shell, also through a jump host that has no ConnectTimeout of its own
COMMAND_SECONDS = 30.0
SHARED_SESSIONS = (
    6  # sshd's MaxSessions allows ten in one connection; one keeps it open, one the lock, two for commands
)
READY = "exl3kit-ready"

log = logging.getLogger(__name__)


def connect_argv(destination: str, *, control: Path | None, remote: str, config: str | None = None) -> list[str]:
    """argv of a connection of its own; with `control` it becomes the master that others share.

    A link that dies silently is noticed after 3 x 2 s without an answer.
    """
    return [
        "ssh",
        *(("-F", config) if config else ()),
        "-T",
        *("-o", "BatchMode=yes"),
        *("-o", f"ConnectTimeout={CONNECT_SECONDS}"),
        *("-o", "ServerAliveInterval=2"),
        *("-o", "ServerAliveCountMax=3"),
        *("-o", "ClearAllForwardings=yes"),
        *("-o", "RemoteCommand=none"),
        *("-o", "ControlPersist=no"),
        *("-o", f"ControlMaster={'yes' if control else 'no'}"),
        *("-o", f"ControlPath={_escaped(control) if control else 'none'}"),
        destination,
        remote,
    ]


def shared_argv(destination: str, *, control: Path) -> list[str]:
    """argv prefix of an ssh that uses the master and fails when there is none (hence ProxyCommand=false)."""
    shared = ("-o", f"ControlPath={_escaped(control)}", "-o", "ProxyCommand=false", "-o", "BatchMode=yes")
    return ["ssh", "-F", "/dev/null", "-T", *shared, destination]


def forward_argv(destination: str, *, control: Path, here: Path, there: str) -> list[str]:
    """argv that makes the master forward the local socket `here` to the node's socket `there`."""
    prefix = shared_argv(destination, control=control)
    return [*prefix[:-1], "-O", "forward", "-L", f"{here}:{there}", destination]


def command_argv(destination: str, argv: Sequence[str], *, control: Path) -> list[str]:
    """argv that runs `argv` on the node; its words reach the remote program unchanged."""
    return [*shared_argv(destination, control=control), shlex.join(argv)]


def _escaped(path: Path) -> str:
    return str(path).replace("%", "%%")


# What OpenSSH says (first match decides), what that means, and the way out. {d} is the destination, {h} its host part.
_CAUSES: tuple[tuple[str, str, str], ...] = (
    (
        "Could not resolve hostname",
        "no host of this name is known",
        "check the name with `ssh -G {d} | grep ^hostname`",
    ),
    (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "the node's host key is not the one ssh remembers",
        "if the node was reinstalled: `ssh-keygen -R {h}`, then `ssh {d}` once; if not, find out who answers there",
    ),
    (
        "Host key verification failed",
        "ssh does not know the node's host key yet",
        "`ssh {d}` once and compare the fingerprint it shows",
    ),
    (
        "Permission denied",
        "ssh has no key that the node accepts, and the kit types no password",
        "`ssh-copy-id {d}`; if the key has a passphrase: `ssh-add` first",
    ),
    ("Too many authentication failures", "ssh offered too many keys", "set IdentityFile and IdentitiesOnly for {h}"),
    ("Connection refused", "nothing answers ssh there", "start sshd on the node, or set its Port in ~/.ssh/config"),
    ("No route to host", "the network does not lead there", "check the cable, the address and `ping {h}`"),
    ("Network is unreachable", "the network does not lead there", "check this machine's own network and `ping {h}`"),
    ("timed out", "the node does not answer", "check that it is switched on and `ping {h}`"),
    ("not responding", "the link to the node is gone", "check that it is switched on and `ping {h}`"),
    (
        "kex_exchange_identification",
        "the node's sshd drops the connection before it says a word",
        "wait a minute (it may be throttling after failed logins), then `journalctl -u ssh` on the node",
    ),
    ("Connection reset", "the node's sshd drops the connection", "`journalctl -u ssh` on the node"),
    ("Connection closed", "the node's sshd closes the connection", "`journalctl -u ssh` on the node"),
    ("Bad configuration option", "the ssh configuration has a line that ssh does not know", "repair that line"),
    ("Bad owner or permissions", "ssh refuses its own configuration file", "`chmod 600` that file"),
)


def explain(name: str, destination: str, said: str) -> KitError:
    """The sentence for what ssh wrote to stderr when a connection did not come about."""
    lines = [line.strip() for line in said.splitlines() if line.strip() and not set(line.strip()) <= {"@"}]
    host = destination.rpartition("@")[2]
    for sign, what, next_step in _CAUSES:
        own_words = next((line for line in lines if sign in line), None)
        if own_words is not None:
            next_step = next_step.format(d=destination, h=host)
            return unreachable(name, what, why=f"ssh says: {own_words.strip('@ ')}", next_step=next_step)
    own_words = lines[-1] if lines else "nothing"
    return unreachable(name, "ssh failed", why=f"ssh says: {own_words}", next_step=f"`ssh -v {destination}`")


def unreachable(name: str, what: str, *, why: str | None = None, next_step: str | None = None) -> KitError:
    """A `KitError` about one node, exit code 6."""
    return KitError(what, where=f"node {name}", why=why, next_step=next_step, code=ExitCode.UNREACHABLE)


class Connection:
    """An open connection to one node.

    Parameters
    ----------
    name: what errors call the node.
    destination: what ssh is given, resolved by the user's own ssh configuration (`EXL3KIT_SSH_CONFIG` names another).
    folder: private folder for the sockets and ssh's log; short, since a socket's path may have 104 characters at most.
    """

    def __init__(self, name: str, destination: str, folder: Path) -> None:
        self.name = name
        self.destination = destination
        self.control = folder / "ctl"
        self.log = folder / "log"
        self.server_address: str | None = None
        self._config = os.environ.get("EXL3KIT_SSH_CONFIG")
        self._bridges: list[Bridge] = []
        remote = f"echo {READY} $SSH_CONNECTION; exec cat"
        argv = connect_argv(destination, control=self.control, remote=remote, config=self._config)
        with self.log.open("wb") as log:
            try:
                self._master = start(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
            except FileNotFoundError as error:
                raise unreachable(name, "there is no ssh program here", next_step="install openssh-client") from error
        try:
            self._wait_ready(time.monotonic() + OPEN_SECONDS)
        except BaseException:
            self.close()
            raise

    @property
    def said(self) -> str:
        """What ssh wrote to stderr so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def alive(self) -> bool:
        return self._master.poll() is None

    def _wait_ready(self, deadline: float) -> None:
        """Read the greeting; a login script's own output may come before it."""
        greeting = self._greeting(deadline)
        if greeting is None:
            if self._master.poll() is None:
                next_step = f"`ssh -v {self.destination}` shows where it hangs"
                raise unreachable(self.name, f"no shell within {OPEN_SECONDS:.0f} s", why=self.said.strip() or None,
                                  next_step=next_step)  # fmt: skip
            raise explain(self.name, self.destination, self.said)
        # SSH_CONNECTION: client address, client port, server address, server port
        words = greeting.split()
        self.server_address = words[3].partition("%")[0] if len(words) == 5 else None

    def _greeting(self, deadline: float) -> str | None:
        stdout = self._master.stdout
        assert stdout is not None
        received = b""
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while (left := deadline - time.monotonic()) > 0 and selector.select(left):
                chunk = os.read(stdout.fileno(), 4096)
                if not chunk:
                    self._master.wait(timeout=2)
                    return None
                received += chunk
                for line in received.decode(errors="replace").splitlines(keepends=True):
                    if line.startswith(READY) and line.endswith("\n"):
                        return line
        return None

    def run(self, argv: Sequence[str], *, input: str | None = None,
            timeout: float = COMMAND_SECONDS) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """Run one command on the node; its exit status is the caller's to judge.

        Raises `KitError` when the connection is gone or the command has not ended after `timeout` seconds.
        """
        full = command_argv(self.destination, argv, control=self.control)
        done = finish(self.name, full, argv[0], input=input, timeout=timeout)
        if done.returncode == 255 and not self.alive:
            raise explain(self.name, self.destination, self.said or done.stderr)
        return done

    def spawn(self, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a command on the node that runs until its stdin closes; stdin and stdout are pipes."""
        full = command_argv(self.destination, argv, control=self.control)
        with self.log.open("ab") as log:
            return start(full, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)

    def forward(self, here: Path, there: str) -> None:
        """Let the local socket `here` lead to the node's socket `there`."""
        argv = forward_argv(self.destination, control=self.control, here=here, there=there)
        done = finish(self.name, argv, "ssh -O forward", input=None, timeout=CONNECT_SECONDS)
        if done.returncode != 0:
            raise explain(self.name, self.destination, done.stderr or self.said)

    def bridge(self, here: Path, argv: Sequence[str]) -> None:
        """Let every connection to the local socket `here` talk to its own remote `argv`."""
        remote = shlex.join(argv)
        shared = [*shared_argv(self.destination, control=self.control), remote]
        own = connect_argv(self.destination, control=None, remote=remote, config=self._config)
        here.unlink(missing_ok=True)
        self._bridges.append(Bridge(here, shared, own, self.log))

    def close(self) -> None:
        """End every ssh of this connection; never raises."""
        for bridge in self._bridges:
            bridge.close()
        stop(self._master)


class Bridge:
    """A listening socket each of whose connections becomes the stdin and stdout of a new ssh.

    The first ones share the node's connection (50 ms instead of 400 to begin), the others get one of their own.
    """

    def __init__(self, path: Path, shared: Sequence[str], own: Sequence[str], log: Path) -> None:
        self._shared = list(shared)
        self._own = list(own)
        self._log = log
        self._children: list[subprocess.Popen[bytes]] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(64)
        threading.Thread(target=self._serve, name=f"bridge {path.name}", daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):  # the listener was closed
            while True:
                connection, _ = self._listener.accept()
                with connection, self._log.open("ab") as log:
                    self._children = [child for child in self._children if child.poll() is None]
                    argv = self._shared if len(self._children) < SHARED_SESSIONS else self._own
                    child = start(argv, stdin=connection.fileno(), stdout=connection.fileno(), stderr=log)
                    self._children.append(child)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for child in self._children:
            stop(child)


def start(argv: Sequence[str], *, stdin: int, stdout: int,
          stderr: IO[bytes] | int) -> subprocess.Popen[bytes]:  # fmt: skip
    """Start a program in a session of its own, so that Ctrl-C reaches the kit alone and it can still clean up."""
    environment = {**os.environ, "LC_ALL": "C"}
    return subprocess.Popen(
        list(argv), stdin=stdin, stdout=stdout, stderr=stderr, env=environment, start_new_session=True
    )


def finish(name: str, argv: Sequence[str], shown: str, *, input: str | None,
           timeout: float) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run a program to its end, or kill it at the deadline and say so; `input` stays out of the log."""
    started = time.monotonic()
    try:
        done = subprocess.run(
            list(argv),
            input=input,
            stdin=subprocess.DEVNULL if input is None else None,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            env={**os.environ, "LC_ALL": "C"},
            start_new_session=True,
            check=False,
        )
        said = f": {done.stderr.strip()}" if done.stderr.strip() else ""
        log.debug("%s: `%s` exit code %d after %.1f s%s", name, shlex.join(argv), done.returncode,
                  time.monotonic() - started, said)  # fmt: skip
        return done
    except subprocess.TimeoutExpired as error:
        raise unreachable(name, f"`{shown}` has not ended after {timeout:.0f} s") from error
    except FileNotFoundError as error:
        raise unreachable(name, f"there is no program {argv[0]} here") from error


def stop(process: subprocess.Popen[bytes], grace: float = 2.0) -> None:
    """End a process: close its stdin, ask it, then kill it. Never raises."""
    if process.stdin is not None:
        with suppress(OSError):
            process.stdin.close()
    with suppress(OSError):
        process.terminate()
    try:
        process.wait(timeout=grace)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
