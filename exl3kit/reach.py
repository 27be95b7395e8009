"""Whether two nodes reach each other on the fabric, and how fast: a TCP stream between them for half a second.

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

SECONDS = 0.5
CONNECT_SECONDS = 3
FIRST_PORT = 47100  # below what Linux gives to clients only with settings of its own; the probe knows what is taken

# Address, port. Prints the bytes and seconds of one connection.
SINK = """
use IO::Socket::INET; use Time::HiRes 'time'; $SIG{ALRM} = sub { print "nobody came\\n"; exit 1 }; alarm 8;
$l = IO::Socket::INET->new(LocalAddr => $ARGV[0], LocalPort => $ARGV[1], Listen => 1, ReuseAddr => 1) or die "$!\\n";
$c = $l->accept; $begin = 0;
while ($n = sysread($c, $b, 1 << 20)) { $begin ||= time; $all += $n } printf "%d %.6f\\n", $all, time - $begin;
"""
# Address, port, seconds.
SOURCE = """
use IO::Socket::INET; use Time::HiRes qw(time sleep); $SIG{PIPE} = 'IGNORE'; $end = time + 3;
until ($c = IO::Socket::INET->new(PeerAddr => $ARGV[0], PeerPort => $ARGV[1], Timeout => 3)) {
    $why = "$!"; die "$why\\n" if time > $end; sleep 0.05 }
$b = "\\0" x (1 << 20); $end = time + $ARGV[2]; while (time < $end) { syswrite($c, $b) or last } close $c;
"""


def measure(nodes: Sequence[Node], places: Sequence[Place]) -> list[Reached]:
    """Both ways between the first node and each other one, one after the other, so that no stream disturbs another."""
    found = []
    for node, place in zip(nodes[1:], places[1:], strict=True):
        found.append(stream(nodes[0], node, places[0], place))
        found.append(stream(node, nodes[0], place, places[0]))
    return found


def stream(source: Node, target: Node, sender: Place, receiver: Place) -> Reached:
    """One stream from `source` to the address of `target`."""
    if sender.probe.machine == receiver.probe.machine and sender.address == receiver.address:
        return Reached(sender.name, receiver.name, None, "not measured: both names lead to one machine")
    missing = [one.name for one in (sender, receiver) if "perl" not in one.probe.programs]
    if missing:
        return Reached(sender.name, receiver.name, None, f"not measured: {missing[0]} has no perl")
    port = next(port for port in range(FIRST_PORT, 65536) if port not in receiver.probe.listening)
    words = [receiver.address, str(port)]
    with ThreadPoolExecutor(2) as pool:
        heard = pool.submit(target.run, ["perl", "-e", SINK, *words], timeout=15)
        sent = pool.submit(source.run, ["perl", "-e", SOURCE, *words, str(SECONDS)], timeout=15)
        try:
            got, put = heard.result(), sent.result()
        except KitError as error:
            return Reached(sender.name, receiver.name, None, error.what)
    if put.returncode != 0:
        return Reached(sender.name, receiver.name, None, f"{receiver.address}: {put.stderr.strip() or 'no connection'}")
    try:
        count, seconds = got.stdout.split()
        return Reached(sender.name, receiver.name, int(count) / max(float(seconds), 1e-3))
    except ValueError:
        return Reached(sender.name, receiver.name, None, (got.stdout or got.stderr).strip() or "nothing arrived")
