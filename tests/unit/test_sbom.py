"""The bill of materials names what the lock names, and is what the CycloneDX schema asks for."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from docs_blocks import REPO

from exl3kit import lock, recipes

pytestmark = pytest.mark.full  # makes an environment of 180 MB when there is none

SBOM = REPO / "scripts" / "sbom"


def run(data: object, folder: Path) -> subprocess.CompletedProcess[str]:
    """What the script says of a lock: its bill goes into sbom.json, and 5 says that the schema does not hold."""
    (folder / "lock.json").write_text(json.dumps(data))
    words = ["--lock", folder / "lock.json", "--out", folder / "sbom.json"]
    return subprocess.run([sys.executable, SBOM, *words], capture_output=True, text=True, timeout=600)


def made(data: object, folder: Path) -> dict[str, Any]:
    done = run(data, folder)
    assert done.returncode == 0, done.stderr
    bom: dict[str, Any] = json.loads((folder / "sbom.json").read_text())
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.6")
    return bom


@pytest.mark.parametrize("recipe", ["demo", "qwen3-30b-a3b-rtx"])
def test_everything_in_the_lock_is_a_component(recipe: str, tmp_path: Path) -> None:
    locked = lock.make_lock(recipes.load(recipe))
    bom = made(locked.data, tmp_path)
    required = [one for one in bom["components"] if one.get("scope") != "excluded"]
    hashes = {entry["content"] for one in required for entry in one.get("hashes", ())}
    assert {one["sha256"] for one in locked.data["wheels"]} <= hashes
    assert {entry.sha256 for entry in locked.files} <= hashes
    packages = {(one["name"], one["version"]) for one in required if one.get("purl", "").startswith("pkg:deb/")}
    assert packages == set(locked.data["base"]["packages"].items())
    excluded = {one["name"] for one in bom["components"] if one.get("scope") == "excluded"}
    assert ("nvidia-cuda-nvcc" in excluded) == bool(locked.data["arch"])
    assert locked.stamp in json.dumps(bom["metadata"])


def test_a_registrys_image_is_named_by_its_digest(tmp_path: Path) -> None:
    """Given a lock on a registry's image, then the component has its name, tag and digest."""
    digest = "sha256:" + hashlib.sha256(b"image").hexdigest()
    base = {"image": "vllm/vllm-openai:v0.33.0", "digest": digest}
    bom = made({**lock.make_lock(recipes.load("demo")).data, "base": base}, tmp_path)
    (found,) = [one for one in bom["components"] if one["type"] == "container"]
    assert (found["name"], found["version"]) == ("vllm/vllm-openai", "v0.33.0")
    assert found["hashes"][0]["content"] == digest.removeprefix("sha256:")


def test_the_same_lock_gives_the_same_bytes_and_what_is_no_lock_is_refused(tmp_path: Path) -> None:
    locked = lock.make_lock(recipes.load("demo")).data
    assert made(locked, tmp_path) == made(locked, tmp_path)
    done = run({"lock": 1}, tmp_path)
    assert done.returncode == 2 and "this is no lock" in done.stderr
