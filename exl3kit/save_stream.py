"""What `docker save` streams, without the layers that the other engine has already.

An engine that loads an image takes a layer from the stream only when it has no layer with that place in the chain yet,
so such layers may be absent. They are told by their names: since engine 25 a layer lies under `blobs/sha256/`, named
by the digest of its content. Streams of older engines name layers otherwise and pass through whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet

BLOCK = 512
BLOBS = b"blobs/sha256/"


def common_layers(layers: Sequence[str], others: Iterable[Sequence[str]]) -> int:
    """How many layers, from the lowest, `layers` has in common with the best of `others`."""
    return max((_agreeing(layers, other) for other in others), default=0)


def _agreeing(one: Sequence[str], other: Sequence[str]) -> int:
    count = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        count += 1
    return count


def without(stream: Iterable[bytes], layers: AbstractSet[str]) -> Iterator[bytes]:
    """The tar stream without the blobs of these layers (`sha256:...`), in pieces; memory does not grow with it."""
    unwanted = {BLOBS + layer.removeprefix("sha256:").encode() for layer in layers}
    reader = _Reader(stream)
    while header := reader.take(BLOCK):
        if header == bytes(BLOCK):  # the end: two empty blocks, and padding
            yield header
            yield from reader.rest()
            return
        size = _number(header[124:136])
        body = -(-size // BLOCK) * BLOCK
        wanted = header[:100].rstrip(b"\0") not in unwanted
        if wanted:
            yield header
        for piece in reader.pieces(body):
            if wanted:
                yield piece


def _number(field: bytes) -> int:
    """A size in a tar header: octal digits, or binary behind a set high bit (files above 8 GiB)."""
    if field[0] & 0x80:
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    return int(field.rstrip(b"\0 ") or b"0", 8)


class _Reader:
    """Exact numbers of bytes out of pieces of any size."""

    def __init__(self, stream: Iterable[bytes]) -> None:
        self._pieces = iter(stream)
        self._left = memoryview(b"")

    def take(self, count: int) -> bytes:
        """The next `count` bytes; fewer only where the stream ends."""
        return b"".join(self.pieces(count))

    def pieces(self, count: int) -> Iterator[bytes]:
        """The next `count` bytes as they come."""
        while count:
            if not self._left:
                self._left = memoryview(next(self._pieces, b""))
                if not self._left:
                    return
            piece, self._left = self._left[:count], self._left[count:]
            count -= len(piece)
            yield bytes(piece)

    def rest(self) -> Iterator[bytes]:
        """All that is left."""
        yield bytes(self._left)
        yield from self._pieces
