"""Leaving layers out of a `docker save` stream, whatever the sizes of the pieces it comes in."""

from __future__ import annotations

import io
import tarfile

import pytest

from exl3kit import save_stream

FILES = {"blobs/sha256/" + "a" * 64: 5000, "blobs/sha256/" + "b" * 64: 512, "blobs/sha256/" + "c" * 64: 1,
         "index.json": 7, "manifest.json": 0}  # fmt: skip


def saved() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        directory = tarfile.TarInfo("blobs")
        directory.type = tarfile.DIRTYPE
        archive.addfile(directory)
        for name, size in FILES.items():
            member = tarfile.TarInfo(name)
            member.size = size
            archive.addfile(member, io.BytesIO(name[-1:].encode() * size))
    return out.getvalue()


def pieces(whole: bytes, size: int) -> list[bytes]:
    return [whole[at : at + size] for at in range(0, len(whole), size)]


@pytest.mark.parametrize("size", [1, 511, 512, 513, 4096, 10**6])
def test_only_the_named_layers_are_absent(size: int) -> None:
    # when
    left = b"".join(save_stream.without(pieces(saved(), size), {"sha256:" + "a" * 64, "sha256:" + "d" * 64}))
    # then
    with tarfile.open(fileobj=io.BytesIO(left)) as archive:
        found = {member.name: member.size for member in archive if member.isfile()}
    assert found == {name: size for name, size in FILES.items() if not name.endswith("a" * 64)}


@pytest.mark.parametrize("size", [100, 10**6])
def test_without_layers_to_leave_out_nothing_changes(size: int) -> None:
    assert b"".join(save_stream.without(pieces(saved(), size), set())) == saved()


def test_layers_in_common_are_counted_from_the_lowest() -> None:
    assert save_stream.common_layers(["a", "b", "c"], [["a"], ["a", "b", "x"], ["x", "b", "c"], []]) == 2
    assert save_stream.common_layers(["a"], []) == 0


def test_sizes_above_eight_gibibytes() -> None:
    big = tarfile.TarInfo("x")
    big.size = 9 << 30
    assert save_stream._number(big.tobuf(format=tarfile.GNU_FORMAT)[124:136]) == 9 << 30
