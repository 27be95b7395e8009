"""Weights from node to node over the fabric: rsync against a daemon that lives as long as the copy.

No key between the nodes is needed, and nothing is encrypted twice: the receiving node starts `rsync --daemon` on its
fabric address, for one folder, one sender and one password that is made for this copy and travels on stdin. It ends
when its stdin closes, so also when the kit dies. An interrupted copy goes on inside the file where it stopped.
"""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from exl3kit import run_log
from exl3kit.errors import ExitCode, KitError

if TYPE_CHECKING:
    from exl3kit.deployment import NodeFacts
    from exl3kit.nodes import Node

FIRST_PORT = 47300
COPY_SECONDS = 6 * 3600.0
SILENT_SECONDS = 20  # of rsync: a link that dies is noticed after this
LOOK_SECONDS = 2.0
END_SECONDS = 5.0

# $1: folder to fill, $2: own address, $3: port, $4: the sender's address. The password is the first line of stdin.
RECEIVER = r"""
folder=$(mktemp -d) || exit 1
umask 077
read -r password
printf 'kit:%s\n' "$password" > "$folder/secrets"
cat > "$folder/conf" <<END
use chroot = no
reverse lookup = no
log file = $folder/log
pid file = $folder/pid
$([ "$(id -u)" = 0 ] && printf 'uid = 0\ngid = 0\n')
[weights]
path = $1
read only = no
hosts allow = $4
auth users = kit
secrets file = $folder/secrets
incoming chmod = D755,F644
END
rsync --daemon --no-detach --address="$2" --port="$3" --config="$folder/conf" 2>"$folder/errors" &
daemon=$!
for attempt in 1 2 3 4 5 6 7 8 9 10; do
    [ -s "$folder/pid" ] && break
    kill -0 $daemon 2>/dev/null || break
    sleep 0.1
done
if kill -0 $daemon 2>/dev/null; then echo ready; cat > /dev/null; fi
kill $daemon 2>/dev/null
cat "$folder/errors"
rm -rf "$folder"
"""
# $1: folder to send, $2: the receiver's address, $3: port, $4: seconds of silence.
SENDER = r"""
read -r RSYNC_PASSWORD
export RSYNC_PASSWORD
exec rsync -rLt --inplace --partial --timeout="$4" --contimeout=5 "$1/" "rsync://kit@$2:$3/weights/" 2>&1
"""


def possible(source: NodeFacts, target: NodeFacts) -> bool:
    """Whether both nodes have rsync and addresses of a fabric."""
    probes = (source.probe, target.probe)
    apart = source.machine != target.machine or source.address != target.address
    return apart and all(probe is not None and "rsync" in probe.programs for probe in probes)


def copy(
    source: Node,
    target: Node,
    facts: tuple[NodeFacts, NodeFacts],
    folder: str,
    into: str,
    advance: Callable[[int], None],
) -> None:
    """Copy `folder` of the source into the existing folder `into` of the target; `advance` gets the bytes that came.

    Raises `KitError` (unreachable) when the copy breaks off; what came stays, and the next one goes on there.
    """
    sender, receiver = facts
    assert receiver.probe is not None
    password = run_log.keep_secret(secrets.token_hex(16))
    port = str(next(port for port in range(FIRST_PORT, 65536) if port not in receiver.probe.listening))
    daemon = target.spawn(["sh", "-c", RECEIVER, "sh", into, receiver.address, port, sender.address])
    assert daemon.stdin is not None and daemon.stdout is not None
    try:
        daemon.stdin.write(f"{password}\n".encode())
        daemon.stdin.flush()
        if daemon.stdout.readline().strip() != b"ready":
            raise target.error("rsync cannot listen there", why=daemon.stdout.read().decode(errors="replace").strip())
        words = [folder, receiver.address, port, str(SILENT_SECONDS)]
        gained = Growth(target, into)

        def look() -> str | None:
            advance(gained())
            return f"{target.name} no longer answers" if daemon.poll() is not None else None

        said = send(source, words, password, look)
        if said is not None:
            raise source.error(
                f"the copy to {target.name} broke off",
                why=said or "rsync said nothing",
                next_step="look at the link between the nodes, then run the command again; it goes on where it stopped",
                code=ExitCode.UNREACHABLE,
            )
    finally:
        daemon.stdin.close()
        with suppress(subprocess.TimeoutExpired):  # a link that dies right now is told by whatever asks the node next
            daemon.wait(timeout=END_SECONDS)
        daemon.kill()
        daemon.wait()


def send(source: Node, words: list[str], password: str, look: Callable[[], str | None]) -> str | None:
    """Run the sender and call `look` every two seconds; None when all went well, else what rsync or `look` says.

    The link to the receiver is given up after 7 s of silence, long before rsync's own timeout.
    """
    sender = source.spawn(["sh", "-c", SENDER, "sh", *words])
    assert sender.stdin is not None and sender.stdout is not None
    try:
        sender.stdin.write(f"{password}\n".encode())
        sender.stdin.flush()
        while True:
            try:
                code = sender.wait(timeout=LOOK_SECONDS)
                break
            except subprocess.TimeoutExpired:
                if (trouble := look()) is not None:
                    return trouble
        said = sender.stdout.read().decode(errors="replace").strip().splitlines()
        if code == 0:
            look()
        return None if code == 0 else "".join(said[:1])
    finally:  # an interrupted copy too
        sender.kill()
        sender.wait()


class Growth:
    """How many bytes a folder of a node has gained since it was last asked."""

    def __init__(self, node: Node, folder: str) -> None:
        self._node, self._folder = node, folder
        self._seen = self._size()

    def _size(self) -> int:
        try:
            words = self._node.run(["du", "-s", "-B1", self._folder]).stdout.split()
        except KitError:  # the node is gone, which the copy itself will say
            return 0
        return int(words[0]) if words and words[0].isdecimal() else 0

    def __call__(self) -> int:
        size = max(self._size(), self._seen)
        gained, self._seen = size - self._seen, size
        return gained
