"""Whether two nodes reach each other on the fabric, and how fast: a TCP stream between them for a second.

Both ends are a few lines of Perl, which every Debian and Ubuntu has (perl-base is essential there); Python may be
missing, a shell cannot listen, and an image may not be there yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from exl3kit.checks import Place, Reached
from exl3kit.errors import KitError

if TYPE_CHECKING:
    from exl3kit.nodes import Node

SECONDS = 1  # perl-base has no finer clock; its alarm is exact
FIRST_PORT = 47100  # the probe knows what is taken

# Address, port. Prints the bytes of one connection.
SINK = """
use IO::Socket::INET; $SIG{ALRM} = sub { print "nobody came\\n"; exit 1 }; alarm 12;
$l = IO::Socket::INET->new(LocalAddr => $ARGV[0], LocalPort => $ARGV[1], Listen => 1, ReuseAddr => 1) or die "$!\\n";
$c = $l->accept; while ($n = sysread($c, $b, 1 << 20)) { $all += $n } print $all + 0;
"""
# Address, port, seconds; 0 sends one block. The other end may need a moment until it listens.
SOURCE = """
use IO::Socket::INET; $SIG{PIPE} = 'IGNORE'; $b = "\\0" x (1 << 20); $end = time + 6;
until ($c = IO::Socket::INET->new(PeerAddr => $ARGV[0], PeerPort => $ARGV[1], Timeout => 3)) {
    $why = "$!"; die "$why\\n" if time > $end; select undef, undef, undef, 0.05 }
$SIG{ALRM} = sub { exit 0 }; alarm $ARGV[2]; do { syswrite($c, $b) or exit 0 } while $ARGV[2];
"""


def measure(nodes: Sequence[Node], places: Sequence[Place], *, seconds: int = SECONDS) -> list[Reached]:
    """Both ways between the first node and each other one, one after the other, so that no stream disturbs another.

    With 0 seconds one block is sent, which shows that they reach each other, and says nothing of the rate.
    """
    found = []
    for node, place in zip(nodes[1:], places[1:], strict=True):
        found.append(stream(nodes[0], node, places[0], place, seconds))
        found.append(stream(node, nodes[0], place, places[0], seconds))
    return found


def stream(source: Node, target: Node, sender: Place, receiver: Place, seconds: int) -> Reached:
    """One stream from `source` to the address of `target`."""
    if sender.probe.machine == receiver.probe.machine and sender.address == receiver.address:
        return Reached(sender.name, receiver.name, None, "not measured: both names lead to one machine")
    missing = [one.name for one in (sender, receiver) if "perl" not in one.probe.programs]
    if missing:
        return Reached(sender.name, receiver.name, None, f"not measured: {missing[0]} has no perl")
    port = next(port for port in range(FIRST_PORT, 65536) if port not in receiver.probe.listening)
    words = [receiver.address, str(port)]
    with ThreadPoolExecutor(2) as pool:
        heard = pool.submit(target.run, ["perl", "-e", SINK, *words], timeout=20)
        sent = pool.submit(source.run, ["perl", "-e", SOURCE, *words, str(seconds)], timeout=20)
        try:
            got, put = heard.result(), sent.result()
        except KitError as error:
            return Reached(sender.name, receiver.name, None, error.what)
    if put.returncode != 0:
        return Reached(sender.name, receiver.name, None, f"{receiver.address}: {put.stderr.strip() or 'no connection'}")
    if not got.stdout.strip().isdecimal():
        return Reached(sender.name, receiver.name, None, (got.stdout or got.stderr).strip() or "nothing arrived")
    return Reached(sender.name, receiver.name, int(got.stdout) / max(seconds, 1))
