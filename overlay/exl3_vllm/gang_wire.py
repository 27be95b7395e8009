"""Beats on the fabric: one authenticated UDP datagram each.

Datagrams and not a connection, because a stream that lost five seconds waits for its next retransmission, up to another
six; the next beat of half a second later is as good as the lost one.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import ipaddress
import json
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from exl3_vllm.gang import Beat, Phase

MAGIC = b"EXL3 gang 1\n"
MAC_BYTES = hashlib.sha256().digest_size
LARGEST = 32_000  # bytes of a datagram; a death record is 2 to 4 kB
IP_RECVERR = 11  # linux/in.h; the socket module has it from Python 3.14 on
RESOLVE_S = 2.0


class WireError(Exception):
    """A datagram that is none of this gang's."""


def gang_key(secret: bytes) -> bytes:
    """The key of the datagrams; the secret itself signs nothing."""
    return hmac.digest(secret, MAGIC, "sha256")


def encode(beat: Beat, key: bytes) -> bytes:
    body = zlib.compress(json.dumps(asdict(beat), separators=(",", ":")).encode(), 1)
    return MAGIC + hmac.digest(key, body, "sha256") + body


def decode(datagram: bytes, key: bytes) -> Beat:
    """The beat of a datagram.

    Raises `WireError` with the reason, also for a body that is no beat although it is signed.
    """
    if not datagram.startswith(MAGIC):
        raise WireError("speaks another protocol")
    mac, body = datagram[len(MAGIC) :][:MAC_BYTES], datagram[len(MAGIC) + MAC_BYTES :]
    if not hmac.compare_digest(mac, hmac.digest(key, body, "sha256")):
        raise WireError("has another secret")
    try:
        fields: dict[str, Any] = json.loads(zlib.decompress(body))
        fields["phase"] = Phase(fields["phase"])
        fields["members"] = {int(rank): str(session) for rank, session in fields["members"].items()}
        fields["heard"] = tuple(int(rank) for rank in fields["heard"])
        return Beat(**fields)
    except (ValueError, TypeError, KeyError, AttributeError, zlib.error) as error:
        raise WireError(f"sends what is no beat ({error!r})") from error


def parse_peers(text: str) -> list[tuple[str, int]]:
    """`10.0.0.1:28000,10.0.0.2:28000` as pairs; raises `ValueError` for anything else."""
    pairs = []
    for word in text.split(","):
        host, _, port = word.strip().rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"{word!r} is no host:port")
        pairs.append((host, int(port)))
    return pairs


def is_literal(host: str) -> bool:
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class Event:
    """What came: exactly one of `beat`, `stranger` (a reason) and `refused` is set."""

    rank: int | None
    beat: Beat | None = None
    stranger: str | None = None
    refused: bool = False


class Wire:
    """The socket of one rank.

    A peer named by address is sent to there; a name (a container on the bridge of its deployment) is looked up every
    two seconds in a thread, since its address may change when it starts anew. A signed beat says where a peer is, too.

    Raises `OSError` when the port is taken.
    """

    def __init__(self, rank: int, peers: Sequence[tuple[str, int]], secret: bytes) -> None:
        self.key = gang_key(secret)
        self.addresses: dict[int, tuple[str, int]] = {}
        self._names: dict[int, tuple[str, int]] = {}
        for number, (host, port) in enumerate(peers):
            if number == rank:
                continue
            (self.addresses if is_literal(host) else self._names)[number] = (host, port)
        own_host, own_port = peers[rank]
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.IPPROTO_IP, IP_RECVERR, 1)
        self.socket.bind((own_host if is_literal(own_host) else "0.0.0.0", own_port))
        if self._names:
            threading.Thread(target=self._keep_resolving, name="exl3-names", daemon=True).start()

    def close(self) -> None:
        self.socket.close()

    def send(self, rank: int, beat: Beat) -> None:
        """Send and forget: a link that is down is noticed by what does not come back."""
        address = self.addresses.get(rank)
        if address is None:
            return
        datagram = encode(beat, self.key)
        for _ in range(2):  # an error that a former datagram met is reported once, in place of sending
            try:
                self.socket.sendto(datagram, address)
                return
            except OSError:
                continue

    def receive(self) -> Iterator[Event]:
        """Everything that has come."""
        yield from self._errors()
        while True:
            try:
                datagram, address = self.socket.recvfrom(LARGEST)
            except BlockingIOError:
                return
            except OSError:  # an ICMP error; the queue below says whose
                yield from self._errors()
                continue
            yield self._event(datagram, address)

    def _event(self, datagram: bytes, address: tuple[str, int]) -> Event:
        try:
            beat = decode(datagram, self.key)
        except WireError as error:
            rank = next((rank for rank, known in self.addresses.items() if known == address), None)
            return Event(rank, stranger=str(error))
        if beat.sender in self._names:
            self.addresses[beat.sender] = address
        return Event(beat.sender, beat=beat)

    def _errors(self) -> Iterator[Event]:
        """ICMP errors that our datagrams met: a closed port says that a machine runs and its supervisor does not."""
        while True:
            try:
                _, ancillary, _, address = self.socket.recvmsg(1, 512, socket.MSG_ERRQUEUE)
            except OSError:
                return
            for level, kind, data in ancillary:
                if level == socket.IPPROTO_IP and kind == IP_RECVERR and len(data) >= 4:
                    refused = struct.unpack("=I", data[:4])[0] == errno.ECONNREFUSED
                    rank = next((rank for rank, known in self.addresses.items() if known == address), None)
                    if refused and rank is not None:
                        yield Event(rank, refused=True)

    def _keep_resolving(self) -> None:
        while True:
            for rank, (host, port) in self._names.items():
                try:
                    self.addresses[rank] = (socket.gethostbyname(host), port)
                except OSError:
                    continue  # it has not started yet, or is starting anew
            time.sleep(RESOLVE_S)
