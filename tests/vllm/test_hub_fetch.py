"""Fetching from the hub: the program that the kit runs in the image, with the image's own huggingface_hub."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hub_stand_in import COMMIT, Hub, serving

from exl3kit import hub, manifest, weight_verify
from exl3kit.aboard import hub_fetch

MODEL = Path(__file__).resolve().parents[2] / "models" / "demo-dense"
SECRET = "hf_" + "k" * 34


def files() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in MODEL.iterdir() if path.suffix in (".json", ".safetensors")}


def fetch(served: Hub, cache: Path, secret: str | None = None) -> tuple[int, list[dict[str, object]], str]:
    """Run the program as the container does; its exit code, the objects it printed, and all that it printed."""
    token = cache.parent / "token"
    token.unlink(missing_ok=True)
    if secret is not None:
        token.write_text(secret)
    argv = [sys.executable, "-I", "-c", inspect.getsource(hub_fetch), served.repo, COMMIT, str(cache), str(token)]
    environment = {"PATH": os.environ["PATH"], "HOME": str(cache.parent), "HF_ENDPOINT": served.url,
                   "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
                   "HF_HUB_DOWNLOAD_TIMEOUT": "5"}  # fmt: skip
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, env=environment)
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return done.returncode, told, done.stdout + done.stderr


def test_a_commit_lies_in_the_cache_as_the_hub_lays_it_out_and_every_hash_is_the_hubs(tmp_path: Path) -> None:
    with serving(Hub("a/b", files())) as served:
        code, told, said = fetch(served, tmp_path / "hub")
    assert code == 0, said
    snapshot = tmp_path / "hub" / hub.snapshot("a/b", COMMIT)
    assert told[-1] == {"folder": str(snapshot)}
    assert told[-2]["bytes"] == told[-2]["total"] == sum(map(len, served.files.values()))
    found = manifest.survey(snapshot, full=True)
    links = {name: (snapshot / name).readlink().name for name in found["files"]}
    assert found["problems"] == [] and weight_verify.wrong_hashes(found["files"], links) == []
    # and a flipped bit is told by the name that the hub gave the file
    blob = (snapshot / "model.safetensors").resolve()
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    (wrong,) = weight_verify.wrong_hashes(manifest.survey(snapshot, full=True)["files"], links)
    assert wrong.startswith("model.safetensors has another hash than the hub's")


def test_case_23_a_download_that_broke_off_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Given a connection that ends after 21 MiB of 24, then only what is missing is asked for.

    The library writes 10 MB at a time, so what came after the last of these comes again.
    """
    large = {"large.bin": os.urandom(24 << 20)}
    with serving(Hub("a/b", files() | large, cut={"large.bin": 21 << 20})) as served:
        code, _, said = fetch(served, tmp_path / "hub")
        if code != 0:  # the library may also have gone on by itself
            code, _, said = fetch(served, tmp_path / "hub")
    assert code == 0, said
    assert (tmp_path / "hub" / hub.snapshot("a/b", COMMIT) / "large.bin").read_bytes() == large["large.bin"]
    begins = [first for verb, path, first in served.served if verb == "GET" and path.endswith("large.bin")]
    assert len(begins) == 2 and 19_000_000 < begins[1] <= 21 << 20


def test_what_is_there_is_not_fetched_again(tmp_path: Path) -> None:
    with serving(Hub("a/b", files())) as served:
        assert fetch(served, tmp_path / "hub")[0] == 0
        served.served.clear()
        assert fetch(served, tmp_path / "hub")[0] == 0
    assert [path for verb, path, _ in served.served if verb == "GET" and "/resolve/" in path] == []


@pytest.mark.parametrize(
    ("repo", "given", "kind"),
    [("a/b", None, "gated"), ("a/b", "hf_" + "x" * 34, "gated"), ("a/b", SECRET, None)],
)
def test_a_gated_repository_needs_its_token_which_is_never_printed(
    tmp_path: Path, repo: str, given: str | None, kind: str | None
) -> None:
    with serving(Hub("a/b", files(), token=SECRET)) as served:
        code, told, said = fetch(served, tmp_path / "hub", given)
    assert told[-1].get("error") == kind, said
    assert (code == 0) == (kind is None)
    assert SECRET not in said and (given is None or given not in said)


def test_a_repository_that_is_not_there_and_a_hub_that_is_not_there(tmp_path: Path) -> None:
    with serving(Hub("a/b", files())) as served:
        served.repo = "a/c"
        listed = Hub("a/b", {}, url=served.url)
        assert fetch(listed, tmp_path / "hub")[1][-1]["error"] == "missing"
    gone = Hub("a/b", {}, url="http://127.0.0.1:9")
    assert fetch(gone, tmp_path / "hub")[1][-1]["error"] == "network"
