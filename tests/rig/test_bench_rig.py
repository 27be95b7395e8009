"""`kit bench` and `kit parity` on the TP2 demo: two hosts, real ranks, the observer in the head's container.

This machine is shared by both ranks and the tests, so figures vary and `--max-cv` is wide: tested is what counts, what
is refused, and what is said of it.
"""

from __future__ import annotations

import json
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit_verbs import VERB_SECONDS, assert_empty, kit, kit_argv, refusal, told
from rig_hosts import REPOSITORY, Rig

pytestmark = pytest.mark.full  # boots by the dozen
NODES = ("--nodes", "node1,node2")
TWO = ("--set", "parallel.nodes=2", "--set", "parallel.tensor=2")
FAT = ("--set", "serve.env.EXL3_TEMP_ROWS_FUSED='16'")  # experts of 64 rows are fat
TIERS = ("--a", "exl3.tier=legacy", "--b", "exl3.tier=sorted")
WIDE = ("--max-cv", "5")
LONG = 3600.0  # boots take ten times as long on a machine that others use


@pytest.fixture(scope="module")
def built(rig: Rig) -> Iterator[Rig]:
    done = kit(rig, "build", "demo-tp2", *NODES, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    yield rig
    for name in ("demo-tp2", "demo-moe"):
        kit(rig, "down", name, *NODES)


@pytest.fixture
def serving(built: Rig) -> Iterator[Rig]:
    told(kit(built, "up", "demo-tp2", *NODES, "--json", timeout=LONG))
    yield built
    kit(built, "down", "demo-tp2", *NODES)


def test_the_served_demo_is_measured_and_every_fault_refused(serving: Rig, tmp_path: Path) -> None:
    """Given the demo on two hosts, then cold rows count, a repeated prompt and foreign requests do not."""
    prefill = told(kit(serving, "bench", "prefill", "demo-tp2", *NODES, *WIDE, "--out", tmp_path / "p", "--json"))
    assert prefill["valid"] and [(row["name"], row["count"]) for row in prefill["rows"]] == [
        ("63", 5),
        ("127", 5),
        ("255", 5),
    ]
    decode = told(
        kit(serving, "bench", "decode", "demo-tp2", *NODES, *WIDE, "--tokens", "32", "--streams", "1,4,8", "--json",
            "--out", tmp_path / "d")
    )  # fmt: skip
    # the recipe takes 4 at once, so 8 would only queue
    assert [(row["name"], row["count"]) for row in decode["rows"]] == [
        ("structured", 5),
        ("prose", 5),
        ("C1", 3),
        ("C4", 3),
    ]
    cases = told(kit(serving, "bench", "selftest", "demo-tp2", *NODES, "--json"))["cases"]
    live = [case for case in cases if "exl3kit-demo-tp2-rank0 on node1" in case["how"]]
    assert len(live) == 4 and all(case["held"] for case in cases) and len(cases) > 60
    # and the receipts hold both ranks, and make a page
    records = [json.loads(line) for line in (tmp_path / "p" / "campaign.jsonl").read_text().splitlines()]
    boot = next(record for record in records if record["record"] == "boot")
    assert [rank["node"] for rank in boot["environment"]["ranks"]] == ["node1", "node2"]
    assert [[receipt["rank"] for receipt in boot[end]] for end in ("before", "after")] == [[0, 1], [0, 1]]
    assert records[0]["recipe"]["name"] == "demo-tp2" and len(records[0]["stamp"]) == 64
    page = told(kit(serving, "bench", "report", tmp_path / "p", "--json"))
    assert page["valid"] and {Path(path).suffix for path in page["files"]} == {".html", ".png"}
    # too few observations are no campaign
    few = kit(serving, "bench", "prefill", "demo-tp2", *NODES, *WIDE, "--count", "2", "--rungs", "63", "--out",
              tmp_path / "few")  # fmt: skip
    assert "2 observations that count, and 5 are the least" in refusal(few, 8)


def test_an_interrupted_campaign_leaves_no_observer_behind(serving: Rig, tmp_path: Path) -> None:
    """Given Ctrl-C in the middle, then the verb ends with 130 and nothing goes on measuring in the head's container."""
    argv = kit_argv("bench", "decode", "demo-tp2", *NODES, *WIDE, "--count", "50", "--out", tmp_path / "r")
    with subprocess.Popen(argv, env=serving.env, cwd=REPOSITORY, stdout=subprocess.DEVNULL) as verb:
        deadline = time.monotonic() + VERB_SECONDS
        while '"observation"' not in read(tmp_path / "r" / "campaign.jsonl") and time.monotonic() < deadline:
            time.sleep(0.2)
        assert "client of every measurement" in serving.docker("node1", "top", "exl3kit-demo-tp2-rank0").stdout
        verb.send_signal(signal.SIGINT)
        assert verb.wait(60) == 130
    assert "client of every measurement" not in serving.docker("node1", "top", "exl3kit-demo-tp2-rank0").stdout


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_a_load_is_vllms_own_and_accounted_for(serving: Rig, tmp_path: Path) -> None:
    levels = ("--levels", "1,4", "--prompt", "64", "--answer", "16")
    found = told(kit(serving, "bench", "load", "demo-tp2", *NODES, *levels, "--out", tmp_path / "l", "--json",
                     timeout=LONG))  # fmt: skip
    assert found["valid"] and [row["told"]["completed"] for row in found["levels"]] == [8, 32]
    assert told(kit(serving, "bench", "report", tmp_path / "l", "--json"))["valid"]


def test_each_chunk_size_is_booted_and_one_recommended(built: Rig, tmp_path: Path) -> None:
    """Given two values, then a boot of each on both hosts, with what it gave, and one of the two for a sentence."""
    found = told(kit(built, "bench", "mnbt", "demo-tp2", *NODES, *WIDE, "--values", "128,256", "--rungs", "31,255",
                     "--out", tmp_path / "m", "--json", timeout=LONG))  # fmt: skip
    assert found["valid"], found["faults"]
    assert [one["value"] for one in found["settings"]] == [128, 256]
    assert all(one["rate"] > 0 and one["short"] > 0 and one["beside"] > 0 and one["pool"] > 0
               for one in found["settings"])  # fmt: skip
    assert found["recommended"] in (128, 256) and str(found["recommended"]) in found["why"]
    records = [json.loads(line) for line in (tmp_path / "m" / "campaign.jsonl").read_text().splitlines()]
    asked = [
        [rank["argv"]["--max-num-batched-tokens"] for rank in record["environment"]["ranks"]]
        for record in records
        if record["record"] == "boot"
    ]
    assert asked == [["128", "128"], ["256", "256"]]
    assert told(kit(built, "bench", "report", tmp_path / "m", "--json"))["valid"]
    assert_empty(built)


def test_tiers_against_each_other_with_their_rows_counted(built: Rig, tmp_path: Path) -> None:
    """Given legacy against sorted, then the campaign is valid, both ranks of each arm did their rows on its tier."""
    found = told(
        kit(built, "bench", "ab", "demo-moe", *NODES, *TWO, *FAT, *TIERS, *WIDE, "--boots", "3", "--rungs", "255",
            "--out", tmp_path / "ab", "--json", timeout=LONG)
    )  # fmt: skip
    assert found["valid"], found["faults"]
    assert [line for line in found["named"] if "EXL3_TIER" in line] == [
        f"ranks.{rank}.env.EXL3_TIER: legacy → sorted" for rank in (0, 1)
    ]
    records = [json.loads(line) for line in (tmp_path / "ab" / "campaign.jsonl").read_text().splitlines()]
    for boot in (record for record in records if record["record"] == "boot"):
        tier = {"A": "legacy", "B": "sorted"}[boot["arm"]]
        for before, after in zip(boot["before"], boot["after"], strict=True):
            assert after["rows_handled"][tier] > before["rows_handled"].get(tier, 0)
    assert_empty(built)


def test_a_tier_that_no_row_went_through_makes_the_campaign_invalid(built: Rig, tmp_path: Path) -> None:
    """Given experts that never get fat, then sorted is claimed in vain: exit code 8, with the tier and the rank."""
    done = kit(built, "bench", "ab", "demo-moe", *NODES, *TWO, *TIERS, *WIDE, "--boots", "3", "--rungs", "63",
               "--out", tmp_path / "ab", timeout=LONG)  # fmt: skip
    assert "handled no row on the tier legacy" in refusal(done, 8)


def scaled(folder: Path) -> Path:
    """The MoE demo with one expert of one layer 1% larger: its output scales, as half precision in the file."""
    copy = folder / "scaled"
    shutil.copytree(REPOSITORY / "models" / "demo-moe", copy, ignore=shutil.ignore_patterns("quantization_config.json"))
    file = copy / "model.safetensors"
    data = bytearray(file.read_bytes())
    size = struct.unpack("<Q", data[:8])[0]
    header: dict[str, Any] = json.loads(data[8 : 8 + size])
    begin, end = header["model.layers.0.mlp.experts.3.down_proj.svh"]["data_offsets"]
    count = (end - begin) // 2
    values = struct.unpack(f"<{count}e", data[8 + size + begin : 8 + size + end])
    data[8 + size + begin : 8 + size + end] = struct.pack(f"<{count}e", *(value * 1.01 for value in values))
    file.write_bytes(data)
    for path in copy.iterdir():
        path.chmod(0o644)
    return copy


SHORT = ("--tokens", "400", "--decode", "24", "--set", "serve.dtype=float32")


def test_tiers_are_the_same_model_and_a_scaled_expert_is_not(built: Rig, tmp_path: Path) -> None:
    same = told(kit(built, "parity", "demo-moe", *NODES, *TWO, *FAT, *TIERS, *SHORT, "--out", tmp_path / "same",
                    "--json", timeout=LONG))  # fmt: skip
    assert same["verdict"] == "same"
    assert all(one["mean"] <= 1e-6 for one in same["control"] + same["other"])
    assert [one["kind"] for one in same["control"]] == ["prefill", "decode"]
    other = ("--a", "exl3.tier=legacy", "--b", "exl3.tier=legacy", "--b", f"model.path={scaled(tmp_path)}")
    done = kit(built, "parity", "demo-moe", *NODES, *TWO, *FAT, *other, *SHORT, "--out", tmp_path / "scaled", "--json",
               timeout=LONG)  # fmt: skip
    found = told(done, 5)
    assert found["verdict"] == "different" and found["other"][0]["mean"] > 1e-6
    assert all(one["mean"] <= 1e-6 for one in found["control"])
    assert told(kit(built, "bench", "report", tmp_path / "scaled", "--json"))["verdict"] == "different"


def test_profile_refuses_where_there_is_no_gpu(rig: Rig) -> None:
    done = kit(rig, "bench", "profile", "demo-tp2", *NODES, timeout=VERB_SECONDS)
    assert "no GPU whose time could be attributed" in refusal(done, 3)
