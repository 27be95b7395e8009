"""The programs that copy an image between nodes, on a store laid out as an engine's: every byte, from any byte on."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import random
import socket
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from exl3kit.aboard import layer_loader, layer_server
from exl3kit.fabric_copy import program

IMAGE = "a" * 64


def layer_tar(seed: int) -> bytes:
    """A layer with a folder, links, an empty file, a long name and files of many sizes."""
    noise, buffer = random.Random(seed), io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        folder = tarfile.TarInfo("d")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        link = tarfile.TarInfo("d/link")
        link.type, link.linkname = tarfile.SYMTYPE, "file1"
        archive.addfile(link)
        for size in (0, 1, 511, 512, 513, 70_000, 300_000):
            entry = tarfile.TarInfo(f"d/{'long' * 40}-{size}" if size == 513 else f"d/file{size}")
            entry.size = size
            archive.addfile(entry, io.BytesIO(noise.randbytes(size)))
    return buffer.getvalue()


def lay_out(store: Path, tar: bytes, chain: str, name: str) -> None:
    """A layer as an engine keeps it: its files, and a record with everything else of the tar."""
    record = store / "image/overlay2/layerdb/sha256" / chain.removeprefix("sha256:")
    record.mkdir(parents=True)
    (record / "cache-id").write_text(name)
    files = store / "overlay2" / name / "diff"
    lines, end = [], 0

    def segment(raw: bytes) -> None:
        if raw:
            lines.append({"type": 2, "payload": base64.b64encode(raw).decode()})

    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        for entry in archive:
            segment(tar[end : entry.offset_data])
            end = entry.offset_data
            if entry.isreg():
                (files / entry.name).parent.mkdir(parents=True, exist_ok=True)
                content = tar[end : end + entry.size]
                (files / entry.name).write_bytes(content)
                lines.append({"type": 1, "name": entry.name, "size": entry.size})
                end += entry.size
            else:
                lines.append({"type": 1, "name": entry.name})
    segment(tar[end:])
    with gzip.open(record / "tar-split.json.gz", "wt") as out:
        out.writelines(json.dumps(line) + "\n" for line in lines)


@pytest.fixture
def tars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Two layers, one on the other, in a store."""
    made = [layer_tar(1), layer_tar(2)]
    digests = [f"sha256:{hashlib.sha256(tar).hexdigest()}" for tar in made]
    upper = f"sha256:{hashlib.sha256(' '.join(digests).encode()).hexdigest()}"
    for tar, chain, name in zip(made, (digests[0], upper), ("lower", "upper"), strict=True):
        lay_out(tmp_path, tar, chain, name)
    config = tmp_path / "image/overlay2/imagedb/content/sha256"
    config.mkdir(parents=True)
    (config / IMAGE).write_text(json.dumps({"rootfs": {"diff_ids": digests}}))
    monkeypatch.setattr(layer_server, "STORE", tmp_path)
    monkeypatch.setattr(layer_server, "DRIVER", tmp_path / "overlay2")
    return made


@pytest.fixture
def source(tars: list[bytes]) -> Iterator[layer_loader.Source]:
    server = layer_server.Server("127.0.0.1", IMAGE, ["json"])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield layer_loader.Source("127.0.0.1", server.server_address[1], server.token)
    server.shutdown()
    server.server_close()


def test_a_layer_is_the_tar_that_it_came_from(source: layer_loader.Source, tars: list[bytes]) -> None:
    assert json.loads(source.read("sizes/0")) == [len(tar) for tar in tars]
    assert json.loads(source.read("sizes/1")) == [len(tars[1])]
    for number, tar in enumerate(tars):
        assert source.read(f"layer/{number}") == tar


def test_a_layer_can_be_had_from_any_byte_on(source: layer_loader.Source, tars: list[bytes]) -> None:
    for start in (1, 511, 512, 1536, 3000, 80_000, len(tars[0]) - 1):
        assert b"".join(source.stream("layer/0", start)) == tars[0][start:]


def test_another_token_gets_nothing(source: layer_loader.Source) -> None:
    stranger = layer_loader.Source(source._host, source._port, "0" * 32)
    with pytest.raises(layer_loader.LinkError, match="404"):
        stranger.read("config")


def test_a_layer_whose_files_were_cut_is_not_served_whole(
    source: layer_loader.Source, tars: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a file of the engine's store that somebody shortened
    monkeypatch.setattr(layer_loader, "SILENT_SECONDS", 1.0)
    (tmp_path / "overlay2/lower/diff/d/file70000").write_bytes(b"short")
    # then the loader does not take what comes for the layer
    with pytest.raises(layer_loader.LinkError):
        source.read("layer/0")


@pytest.fixture
def incoming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of kept layers beside an engine's temporary ones."""
    monkeypatch.setattr(layer_loader, "TEMPORARY", tmp_path)
    monkeypatch.setattr(layer_loader, "INCOMING", tmp_path / "incoming")
    monkeypatch.setattr(layer_loader, "SPOOLED_SECONDS", 0.1)
    (tmp_path / "incoming").mkdir()
    return tmp_path / "incoming"


def test_case_10_what_is_kept_of_a_layer_is_not_fetched_again(
    source: layer_loader.Source, tars: list[bytes], incoming: Path
) -> None:
    # given most of a layer, and an engine that spools elsewhere
    (incoming / "digest").write_bytes(tars[0][:300_000])
    (incoming / "old").write_bytes(b"of another image")
    # when
    layer_loader.forget({"digest"})
    got = b"".join(map(bytes, layer_loader.whole(layer_loader.Kept(), source, 0, "digest", "x/0")))
    # then
    assert got == tars[0] and source.fetched == len(tars[0]) - 300_000
    assert [path.name for path in incoming.iterdir()] == ["digest"]
    assert (incoming / "digest").read_bytes() == tars[0]
    # and nothing is left at the end
    layer_loader.forget(set())
    assert not incoming.exists()


def test_case_10_what_the_engine_spooled_is_kept_under_another_name_and_not_written_twice(
    source: layer_loader.Source, tars: list[bytes], incoming: Path, tmp_path: Path
) -> None:
    # given what an earlier copy left of a layer
    (incoming / "digest").write_bytes(tars[0][:1000])
    spool = tmp_path / "docker-import-123/x/0"
    spool.parent.mkdir(parents=True)
    # when an engine spools what comes
    with spool.open("wb", buffering=0) as file:
        for piece in layer_loader.whole(layer_loader.Kept(), source, 0, "digest", "x/0"):
            file.write(piece)
    # then its file is the one that stays when the engine removes it
    assert (incoming / "digest").samefile(spool)
    spool.unlink()
    assert (incoming / "digest").read_bytes() == tars[0]
    assert [path.name for path in incoming.iterdir()] == ["digest"]


def test_a_server_that_was_never_reached_is_told_apart_from_one_that_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    # given an address where nobody listens
    monkeypatch.setattr(layer_loader, "SILENT_SECONDS", 0.5)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        job = {"host": "127.0.0.1", "port": taken.getsockname()[1], "token": "x", "known": 0}
        # then
        with pytest.raises(layer_loader.WayError, match="does not answer"):
            layer_loader.load(job)


def test_the_toolbox_has_an_interpreter_with_what_the_loader_imports() -> None:
    # when
    code = "import sys; toolbox(sys.argv[1].split(','), sys.stdout.buffer)"
    text = program("layer_server").partition("if __name__ ==")[0] + code
    argv = [sys.executable, "-I", "-c", text, ",".join(layer_loader.MODULES)]
    packed = subprocess.run(argv, capture_output=True, check=True).stdout
    # then
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        names = archive.getnames()
    assert any(name.endswith("/encodings/idna.py") for name in names)
    assert any(name.endswith("/http/client.py") for name in names)
    assert any(Path(name).name == Path(sys.executable).resolve().name for name in names)
    assert len(packed) < 60_000_000


def test_the_programs_are_handed_over_as_their_own_text() -> None:
    for name in ("layer_server", "layer_loader"):
        compile(program(name), name, "exec")
        assert "exl3kit" not in program(name).split('"""', 2)[2]
