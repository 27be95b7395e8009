"""Weights: what a survey finds wrong, what stands for a file's content, and what is sent to a node."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from exl3kit import manifest, recipes, weight_sync, weights
from exl3kit.deployment import NodeFacts
from exl3kit.errors import ExitCode, KitError

MODELS = Path(__file__).resolve().parents[2] / "models"


def shard(names: list[str]) -> bytes:
    """A safetensors file with one 2-byte tensor per name."""
    entries = {
        name: {"dtype": "I16", "shape": [1], "data_offsets": [2 * number, 2 * number + 2]}
        for number, name in enumerate(names)
    }
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + bytes(2 * len(names))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A model of three shards with an index."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    weight_map = {}
    for number in (1, 2, 3):
        name = f"model-0000{number}-of-00003.safetensors"
        tensors = [f"layers.{number}.mlp.trellis", f"layers.{number}.mlp.suh"]
        (model / name).write_bytes(shard(tensors))
        weight_map |= dict.fromkeys(tensors, name)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return model


SECOND = "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"


def test_a_whole_model_has_no_problem_and_its_trellis_is_counted(sharded: Path) -> None:
    found = manifest.survey(sharded)
    assert found["problems"] == []
    assert (found["trellis_tensors"], found["trellis_bytes"]) == (3, 6)
    assert set(found["files"]) == {path.name for path in sharded.iterdir()}


@pytest.mark.parametrize("name", ["demo-dense", "demo-moe"])
def test_the_demo_models_are_whole(name: str) -> None:
    found = manifest.survey(MODELS / name)
    assert found["problems"] == []
    assert found["trellis_bytes"] > 600_000


def cut(model: Path) -> None:
    (model / SECOND).write_bytes((model / SECOND).read_bytes()[:-1])


def cut_in_header(model: Path) -> None:
    (model / SECOND).write_bytes((model / SECOND).read_bytes()[:20])


def empty(model: Path) -> None:
    (model / SECOND).write_bytes(b"")


def html(model: Path) -> None:
    (model / SECOND).write_text("<!DOCTYPE html> 404")


def longer(model: Path) -> None:
    (model / SECOND).write_bytes((model / SECOND).read_bytes() + b"x")


def gone(model: Path) -> None:
    (model / SECOND).unlink()


def gone_without_index(model: Path) -> None:
    gone(model)
    (model / INDEX).unlink()


def dangling(model: Path) -> None:
    gone(model)
    (model / SECOND).symlink_to("../blobs/0123")


def change_index(model: Path, change: str) -> None:
    content = json.loads((model / INDEX).read_text())
    exec(change, {"weight_map": content["weight_map"]})
    (model / INDEX).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (cut, f"{SECOND} is cut off: "),
        (cut_in_header, f"{SECOND} is cut off inside its header"),
        (empty, f"{SECOND} is cut off: 0 bytes"),
        (html, f"{SECOND} is no safetensors file"),
        (longer, f"{SECOND} is too long"),
        (gone, f"{SECOND} is missing, though the index names it"),
        (gone_without_index, f"{SECOND} is missing"),
        (dangling, f"{SECOND} is a link to nothing"),
        (lambda m: change_index(m, "del weight_map['layers.2.mlp.suh']"), "layers.2.mlp.suh of model-00002-of-00003"),
        (lambda m: change_index(m, f"weight_map['ghost'] = '{SECOND}'"), f"tensor ghost is not in {SECOND}"),
        (lambda m: (m / INDEX).write_text("{"), f"{INDEX} is damaged"),
        (lambda m: (m / "config.json").unlink(), "config.json is missing"),
        (lambda m: [path.unlink() for path in m.glob("*.safe*")], "there is no .safetensors file"),
    ],
)
def test_damage_is_refused_before_start_with_the_file_named(sharded: Path, damage: object, sentence: str) -> None:
    damage(sharded)  # type: ignore[operator]
    recipe = recipes.load("demo", [f"model.path={sharded}"])
    with pytest.raises(KitError) as refused:
        weights.survey(recipe)
    assert sentence in str(refused.value)
    assert refused.value.code == ExitCode.PREFLIGHT


def test_no_such_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KitError, match="no such model directory"):
        weights.survey(recipes.load("demo", [f"model.path={tmp_path / 'nowhere'}"]))


def test_a_repository_is_taken_from_the_cache_or_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    revision = "0123456789" * 4
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    text = (
        (MODELS.parent / "recipes" / "demo.yaml")
        .read_text()
        .replace("{path: ../models/demo-dense, served_name: demo}", f"{{repo: a/b, revision: '{revision}'}}")
    )
    (tmp_path / "r.yaml").write_text(text)
    recipe = recipes.load(str(tmp_path / "r.yaml"))
    with pytest.raises(KitError, match=f"kit weights fetch {tmp_path}/r.yaml"):
        weights.survey(recipe)
    snapshot = tmp_path / "models--a--b" / "snapshots" / revision
    shutil.copytree(MODELS / "demo-dense", snapshot)
    assert weights.survey(recipe).source == snapshot


def test_one_flipped_trellis_bit_is_another_content(tmp_path: Path) -> None:
    shutil.copytree(MODELS / "demo-dense", tmp_path / "m")
    before = manifest.survey(tmp_path / "m")["files"]
    data = bytearray((tmp_path / "m" / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "m" / "model.safetensors").write_bytes(data)
    after = manifest.survey(tmp_path / "m")["files"]
    assert {name for name in before if before[name] != after[name]} == {"model.safetensors"}


def test_a_large_file_is_sampled_and_still_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "WHOLE", 1 << 20)
    (tmp_path / "a").write_bytes(bytes(3 << 20))
    (tmp_path / "b").write_bytes(bytes((3 << 20) - 1) + b"\1")
    first, second = manifest.digest(tmp_path / "a"), manifest.digest(tmp_path / "b")
    assert first.startswith("sampled:")
    assert first != second


def test_the_survey_runs_alone_on_a_bare_python() -> None:
    source = Path(manifest.__file__).read_text()
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", source, str(MODELS / "demo-dense")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == manifest.survey(MODELS / "demo-dense")


def test_what_is_sent_is_world_readable_owned_by_the_nodes_user_and_whole(sharded: Path) -> None:
    (sharded / "chat").mkdir()
    (sharded / "chat" / "template.jinja").write_text("x" * 700)
    (sharded / SECOND).chmod(0o600)
    surveyed = weights.survey(recipes.load("demo", [f"model.path={sharded}"]))
    owner = NodeFacts("n", "10.0.0.1", "eth0", (), (0,), "e", "m", "/c", 1234, 1235)
    moved: list[int] = []
    stream = b"".join(weights.tar(surveyed, list(surveyed.files), owner, moved.append))
    with tarfile.open(fileobj=io.BytesIO(stream)) as archive:
        entries = {entry.name: entry for entry in archive.getmembers()}
        assert archive.extractfile("chat/template.jinja").read() == b"x" * 700  # type: ignore[union-attr]
        assert archive.extractfile(SECOND).read() == (sharded / SECOND).read_bytes()  # type: ignore[union-attr]
    assert {(entry.uid, entry.gid) for entry in entries.values()} == {(1234, 1235)}
    assert (entries["chat"].mode, entries[SECOND].mode) == (0o755, 0o644)
    assert sum(moved) == surveyed.size


def test_weights_are_used_in_place_only_when_every_user_can_read_them(sharded: Path) -> None:
    recipe = recipes.load("demo", [f"model.path={sharded}"])
    for path in (sharded, *sharded.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)
    assert weights.world_readable(weights.survey(recipe))
    (sharded / SECOND).chmod(0o640)
    assert not weights.world_readable(weights.survey(recipe))
    (sharded / SECOND).chmod(0o644)
    (sharded.parent / "blob").write_bytes((sharded / SECOND).read_bytes())
    (sharded / SECOND).unlink()
    (sharded / SECOND).symlink_to("../blob")  # as in the Hugging Face cache: outside of what is mounted
    assert not weights.world_readable(weights.survey(recipe))


class Refusing:
    """A node of which only the name is asked."""

    name = "spark2"

    def error(self, what: str, **more: object) -> KitError:
        return KitError(what, where="node spark2", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", ["content", "missing", "added"])
def test_case_24_a_copy_that_differs_in_one_file_is_refused_by_its_name(sharded: Path, change: str) -> None:
    """Given a node's copy that differs in one file from the weights here, then that file is named; exit code 5."""
    here = weights.survey(recipes.load("demo", [f"model.path={sharded}"]))
    there = {name: dict(entry) for name, entry in here.files.items()}
    name, said = {"content": (SECOND, "has other content"), "missing": (SECOND, "is missing"),
                  "added": ("more.json", "does not belong there")}[change]  # fmt: skip
    if change == "missing":
        del there[name]
    else:
        there[name] = {"size": 1, "digest": "other"}
    with pytest.raises(KitError) as refused:
        weights.compare(Refusing(), here, "/w", {"files": there, "problems": []})  # type: ignore[arg-type]
    assert f"/w/{name} {said}" in refused.value.what and refused.value.code == ExitCode.VERIFICATION


def test_a_link_that_dies_when_all_is_copied_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    # given a receiver whose connection neither ends nor breaks any more, and a sender that is done
    monkeypatch.setattr(weight_sync, "END_SECONDS", 0.1)
    started: list[subprocess.Popen[bytes]] = []

    def machine(script: str) -> Any:
        def spawn(argv: list[str]) -> subprocess.Popen[bytes]:
            started.append(subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            return started[-1]

        return SimpleNamespace(name="node", spawn=spawn, run=lambda argv: SimpleNamespace(stdout="0 folder"))

    facts: Any = SimpleNamespace(address="10.0.0.1", probe=SimpleNamespace(listening=[]))
    # when
    source, target = machine("read -r password"), machine("read -r password; echo ready; exec sleep 60")
    weight_sync.copy(source, target, (facts, facts), "from", "into", lambda count: None)
    # then both are gone, and whoever asks the node next tells how it is
    assert [one.poll() is not None for one in started] == [True, True]
