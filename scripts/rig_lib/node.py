"""One host: its disk, its processes, and commands inside it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from . import cgroups, gb10, host
from .plan import PREFIX, Node, Options, State
from .shell import UNREACHABLE, RigError, run, tail

HERE = Path(__file__).parent
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BOOT_SECONDS = 20.0


@dataclass(frozen=True)
class Disk:
    """A node's files on this machine; they outlive a power cycle and end with `down`."""

    folder: Path

    @classmethod
    def of(cls, node: Node, options: Options) -> Disk:
        return cls(Path(options.disk_dir) / node.name)

    @property
    def upper(self) -> Path:
        """What the node wrote over its template."""
        return self.folder / "upper"

    @property
    def data(self) -> Path:
        """The engine's data, as `docker` and `containerd`."""
        return self.folder / "data"

    @property
    def log(self) -> Path:
        return self.folder / "boot.log"


# -- disk -------------------------------------------------------------------------------------------------------------


def make_disk(node: Node, options: Options, state: State) -> None:
    """Lay out a node's disk, with the files that make the template this node."""
    disk = Disk.of(node, options)
    for folder in (disk.upper, disk.folder / "work", disk.folder / "root", disk.data):
        folder.mkdir(parents=True)
    if options.data_mb is not None:
        run("mount", "-t", "tmpfs", "-o", f"size={options.data_mb}m,mode=755", PREFIX, str(disk.data))
    for folder in (disk.data / "docker", disk.data / "containerd"):
        folder.mkdir()
    (disk.folder / "cgroups").write_text("".join(f"{h.mount_line}\n" for h in cgroups.hierarchies()))
    binds = sorted({*options.binds, *(host.local_package_folders() if options.nat else [])})
    (disk.folder / "binds").write_text("".join(f"{bind}\n" for bind in binds))

    write = _Writer(disk.upper)
    write.file("etc/hostname", f"{node.name}\n")
    others = "".join(f"{n.address} {n.name}\n" for n in options.node_list())
    write.file("etc/hosts", f"127.0.0.1 localhost\n::1 localhost\n{others}")
    # A resolver that refuses at once: without a network, a name lookup should fail now and not after 20 s.
    write.file("etc/resolv.conf", host.resolv_conf() if options.nat else "nameserver 127.0.0.1\n")
    if options.engine:
        write.file("root/.ssh/authorized_keys", state.identity.with_suffix(".pub").read_text(), 0o600)
        key = write.place("etc/ssh/ssh_host_ed25519_key")
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", node.name, "-f", str(key))
        write.file("usr/local/sbin/rig-engine", (HERE / "rig-engine.sh").read_text(), 0o755)
    if options.nat:
        _copy_network_settings(write)
    if options.fake_gpu:
        for path, (text, mode) in gb10.files().items():
            write.file(path, text, mode)
        (disk.folder / "meminfo").write_text(gb10.meminfo())
        gb10.infiniband(disk.folder / "infiniband", gb10.adapters("eth0", node.address, "eth1", node.twin_address))


class _Writer:
    """Writes files into the upper layer of a root, with the folder permissions that the template has."""

    def __init__(self, upper: Path) -> None:
        self.upper = upper

    def place(self, path: str) -> Path:
        target = self.upper / path
        for folder in reversed(target.relative_to(self.upper).parents):
            made = self.upper / folder
            if not made.exists():
                made.mkdir(0o700 if str(folder).split("/")[0] == "root" else 0o755)
        return target

    def file(self, path: str, text: str, mode: int = 0o644) -> None:
        target = self.place(path)
        target.write_text(text)
        target.chmod(mode)


def _copy_network_settings(write: _Writer) -> None:
    """Give a node what this machine knows about reaching mirrors: certificates and pip's configuration."""
    environment = host.network_environment()
    write.file("etc/environment", "".join(f'{k}="{v}"\n' for k, v in environment.items()))
    bundles = {host.CA_BUNDLE, *environment.values()}
    own = Path(host.OWN_CAS).glob("*.crt")
    for path in (*map(Path, sorted(b for b in bundles if b.endswith((".crt", ".pem")))), *own):
        if path.is_absolute() and path.is_file():
            shutil.copyfile(path, write.place(str(path).lstrip("/")))
    for config in host.pip_configs():
        target = "etc/pip.conf" if config == Path("/etc/pip.conf") else "root/.config/pip/pip.conf"
        write.file(target, config.read_text())


def host_key(node: Node, options: Options) -> str:
    """The node's public host key, as a known_hosts file wants it."""
    words = (Disk.of(node, options).upper / "etc/ssh/ssh_host_ed25519_key.pub").read_text().split()
    return f"{node.name},{node.address} {words[0]} {words[1]}\n"


# -- power ------------------------------------------------------------------------------------------------------------


def start(node: Node, options: Options) -> None:
    """Start the node's process 1, and return before it has booted."""
    cgroups.create(node)
    disk = Disk.of(node, options)
    unshare = ["unshare", "--mount", "--ipc", "--uts", "--pid", "--fork", "--kill-child", "--propagation", "private"]
    init = ["sh", str(HERE / "node-init.sh"), node.name, options.template]
    leaves = [str(h.leaf(node) / "cgroup.procs") for h in cgroups.hierarchies() if h.is_unified]
    # The shell steps into the leaf only after the cgroup namespace took the group above it as its root.
    step = 'for leaf in "$0"; do [ "$leaf" = sh ] || echo $$ > "$leaf"; done; exec "$@"'
    argv = [
        "nsenter",
        f"--net=/run/netns/{node.namespace}",
        "unshare",
        "--cgroup",
        "sh",
        "-c",
        step,
        *(leaves or ["sh"]),
    ]
    with disk.log.open("w") as log:
        subprocess.Popen(
            [*argv, *unshare, *init, str(disk.folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=lambda: cgroups.enter(node),
            env={"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8"},
        )


def kill(pids_of: str | None) -> None:
    """Cut the power of one node, or of all with None: no process of it is left on return.

    Raises:
        RigError: when the kernel does not let go of a process within 10 s.
    """
    deadline = time.monotonic() + 10
    killed: set[int] = set()
    while pids := cgroups.processes(pids_of) | {pid for pid in killed if _lives(pid)}:
        if time.monotonic() > deadline:
            raise RigError(f"processes {sorted(pids)} do not end, though killed 10 s ago: see `ps`, then try again.")
        kill_all(pids)
        killed |= pids
        time.sleep(0.01)


def _lives(pid: int) -> bool:
    """A process that dies leaves its control group before it has let go of its namespaces; then it is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def kill_all(pids: set[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, 9)


def init_pid(node: Node) -> int | None:
    """The node's process 1 as this machine numbers it, once it has booted; None while there is none."""
    for pid in cgroups.processes(node.name):
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        numbers = status.partition("NSpid:")[2].partition("\n")[0].split()
        if len(numbers) == 2 and numbers[1] == "1" and Path(f"/proc/{pid}/root/run/rig-booted").exists():
            return pid
    return None


def wait(node: Node, options: Options) -> None:
    """Wait until the node has booted, takes ssh connections and its engine answers, or its process 1 has ended.

    Raises:
        RigError: with the end of the log of what did not come.
    """
    deadline = time.monotonic() + BOOT_SECONDS
    while time.monotonic() < deadline and cgroups.processes(node.name):
        pid = init_pid(node)
        if pid and (not options.engine or (ssh_answers(node) and engine_version(node))):
            return
        time.sleep(0.03)
    disk = Disk.of(node, options)
    engine_log = disk.upper / "var/log/dockerd.log"
    log = engine_log if init_pid(node) and engine_log.exists() else disk.log
    raise RigError(
        f"{node.name} did not come up within {BOOT_SECONDS:.0f} s; its log ends:\n{tail(log.read_text())}", UNREACHABLE
    )


def ssh_answers(node: Node) -> bool:
    try:
        with socket.create_connection((node.address, 22), timeout=1) as connection:
            connection.settimeout(1)
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


# -- engine -----------------------------------------------------------------------------------------------------------


def engine_socket(node: Node) -> str | None:
    """A path by which this machine reaches the node's engine without ssh, good until the node's power is cut."""
    pid = init_pid(node)
    return f"/proc/{pid}/root/run/docker.sock" if pid else None


def engine_version(node: Node) -> str | None:
    """The version that the node's engine answers with; None when it does not."""
    path = engine_socket(node)
    if path is None:
        return None
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(2)
            connection.connect(path)
            connection.sendall(b"GET /version HTTP/1.0\r\n\r\n")
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        version: dict[str, Any] = json.loads(answer.partition(b"\r\n\r\n")[2])
        return str(version["Version"])
    except (OSError, ValueError, KeyError):
        return None


# -- commands ---------------------------------------------------------------------------------------------------------


def command(node: Node, options: Options, argv: Sequence[str]) -> list[str]:
    """The argv that runs `argv` inside the node, as root in /root, with a login's environment.

    Raises:
        RigError: when the node is off.
    """
    pid = init_pid(node)
    if pid is None:
        raise RigError(f"{node.name} is off: `rig power-on {node.name}`.", UNREACHABLE)
    environment = {
        "PATH": PATH,
        "HOME": "/root",
        "USER": "root",
        "LANG": "C.UTF-8",
        "TERM": os.environ.get("TERM", "dumb"),
    }
    if options.nat:
        environment |= host.network_environment()
    enter = ["nsenter", f"--target={pid}", "--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup", "--root", "--wd"]
    return [*enter, "env", "-i", "--chdir=/root", *(f"{k}={v}" for k, v in environment.items()), *argv]


def execute(node: Node, options: Options, argv: Sequence[str]) -> NoReturn:
    """Become `argv` inside the node."""
    line = command(node, options, argv)
    cgroups.enter_leaf(node)
    os.execvp(line[0], line)


def engine(node: Node, options: Options, verb: str) -> None:
    """`start`, `stop` (SIGTERM) or `kill` (SIGKILL) the node's dockerd, and wait for that."""
    line = command(node, options, ["rig-engine", verb])
    done = subprocess.run(line, capture_output=True, text=True, preexec_fn=lambda: cgroups.enter_leaf(node))
    if done.returncode:
        raise RigError(f"{node.name}: the engine did not {verb}: {done.stderr.strip()}", UNREACHABLE)
    if verb == "start":
        wait(node, options)
