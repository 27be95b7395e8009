"""A bundle keeps what was put in, and notices every byte that changed on its way."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from exl3kit import bundle, offline, wheels
from exl3kit.errors import ExitCode, KitError
from exl3kit.pins import Rootfs, Wheel
from exl3kit.progress import Stage
from exl3kit.wheelhouse import size


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A bundle of a wheel, a stream and a model's file."""
    wheel = tmp_path / "a-1-py3-none-any.whl"
    wheel.write_bytes(os.urandom(3_000_000))
    target = tmp_path / "site.tar"
    with bundle.beside(target) as out:
        writer = bundle.Writer(out, Stage("bundle"))
        writer.add_file(f"cache/wheels/{wheel.name}", wheel)
        writer.add_stream("images/abc.tar", iter([b"x" * 1000, b"y" * 24]), tmp_path)
        writer.add_file("models/tiny/config.json", wheel)
        writer.finish(["demo"], [{"stamp": "abc", "recipes": ["demo"], "platform": "linux/amd64", "layers": []}])
    return target


def test_what_goes_in_comes_out(saved: Path, tmp_path: Path) -> None:
    # when
    found = bundle.read(saved)
    bundle.verify(found, Stage("check"))
    paths = bundle.unpack(found, "cache", tmp_path / "cache", Stage("cache"))
    # then
    assert [path.relative_to(tmp_path).as_posix() for path in paths] == ["cache/wheels/a-1-py3-none-any.whl"]
    assert paths[0].read_bytes() == (tmp_path / "a-1-py3-none-any.whl").read_bytes()
    assert [member.name for member in found.members] == [
        "cache/wheels/a-1-py3-none-any.whl",
        "images/abc.tar",
        "models/tiny/config.json",
    ]
    assert b"".join(file.read() for _, file in bundle.opened(found, lambda m: m.name.startswith("images"))) == (
        b"x" * 1000 + b"y" * 24
    )


def test_a_second_unpacking_writes_nothing(saved: Path, tmp_path: Path) -> None:
    found = bundle.read(saved)
    (path,) = bundle.unpack(found, "cache", tmp_path / "cache", Stage("cache"))
    before, stage = path.stat().st_mtime_ns, Stage("cache")
    bundle.unpack(found, "cache", tmp_path / "cache", stage)
    assert (path.stat().st_mtime_ns, stage.done) == (before, 0)


@pytest.mark.parametrize("where", [600, 1_500_000, -400_000])
def test_case_8_a_changed_byte_is_noticed(saved: Path, where: int) -> None:
    # given
    content = bytearray(saved.read_bytes())
    content[where] ^= 1
    saved.write_bytes(content)
    # then
    with pytest.raises(KitError) as refused:
        bundle.verify(bundle.read(saved), Stage("check"))
    assert refused.value.code in (ExitCode.VERIFICATION, ExitCode.USAGE)


@pytest.mark.parametrize("kept", [0, 100, 1_000_000, 6_003_900])
def test_a_bundle_cut_short_is_none(saved: Path, kept: int) -> None:
    saved.write_bytes(saved.read_bytes()[:kept])
    with pytest.raises(KitError, match="no bundle"):
        bundle.read(saved)


def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "evil.tar"
    with bundle.beside(target) as out:
        writer = bundle.Writer(out, Stage("bundle"))
        writer.add_stream("cache/../../etc/passwd", iter([b"x"]), tmp_path)
        writer.finish([], [])
    with pytest.raises(KitError, match="no bundle"):
        bundle.read(target)


def test_a_save_that_fails_leaves_the_bundle_of_before(saved: Path) -> None:
    before = saved.read_bytes()
    with pytest.raises(RuntimeError), bundle.beside(saved) as out:
        out.write(b"half")
        raise RuntimeError
    assert saved.read_bytes() == before
    assert sorted(path.name for path in saved.parent.iterdir()) == ["a-1-py3-none-any.whl", "site.tar"]


def test_case_7_offline_says_what_is_missing_and_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # given an empty cache and no network
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(offline.VARIABLE, "1")
    base = Rootfs("bookworm", ("bookworm",), "essential", ("python3",), {"bash": "1"})
    pinned = wheels.Pins(base, "vllm", "1", "linux/amd64", "3.11", (Wheel("a", "1", "a.whl", "0" * 64),), tmp_path)
    # then
    with pytest.raises(KitError, match="the wheel a==1 is not here") as refused:
        wheels.fetch(pinned)
    assert refused.value.code == ExitCode.PREFLIGHT and "kit fetch" in str(refused.value.next_step)
    # and with a network nothing is refused
    monkeypatch.setenv(offline.VARIABLE, "0")
    offline.refuse(["anything"])


def test_sizes_add_up(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"123")
    assert size([tmp_path / "a", tmp_path / "a"]) == 6
