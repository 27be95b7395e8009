"""Import of other launchers' recipes: every key accounted for, every result a valid recipe, whatever the file holds."""

from __future__ import annotations

import json
import random
import string
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from exl3kit import imported, recipes
from exl3kit.cli import recipe_import
from exl3kit.imported import KEPT, MAPPED, REFUSED, Imported

CORPUS: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "foreign_recipes.yaml").read_text())
V1 = """name recipe_version container command description model mods defaults env build_args cluster_only solo_only
benchmark"""
V2 = """recipe_version sparkrun_version min_sparkrun_version name description model model_revision runtime
runtime_version mode min_nodes max_nodes cluster_only solo_only container containers defaults env command
runtime_config benchmark metadata pre_exec post_exec post_commands stop_after_post mods builder builder_config executor
executor_config scheduler distribution_config layout cluster_config runtime_cache readiness capabilities
unsupported_capabilities include overrides"""


def load(made: Imported, tmp_path: Path) -> recipes.Effective:
    return recipes.load_text(imported.as_yaml(made, "x").encode(), tmp_path / "made.yaml")


def accounted(made: Imported) -> set[str]:
    return {key.partition(".")[0].partition(" ")[0] for key, _, _ in made.report}


def test_the_corpus_holds_every_key_of_both_formats() -> None:
    """Given LAUNCHERS' lists, then each key stands in one of at least 25 recipes, and the importer has words for it."""
    held = {key for one in CORPUS for key in one}
    assert set(V1.split()) | set(V2.split()) <= held
    assert len(CORPUS) >= 25
    assert set(V1.split()) | set(V2.split()) <= {*imported.KEYS, *imported.OWN}


@pytest.mark.parametrize("number", range(len(CORPUS)))
def test_each_becomes_a_valid_recipe_and_no_key_is_lost(number: int, tmp_path: Path) -> None:
    original = CORPUS[number]
    made = imported.translate(original, f"recipe-{number}")
    assert load(made, tmp_path).recipe.name == made.data["name"]
    assert set(original) <= accounted(made), set(original) - accounted(made)
    assert all(outcome in (MAPPED, KEPT, REFUSED) and why for _, outcome, why in made.report)
    back = json.loads(imported.foreign_file(made, original))
    assert back["original"] == imported.plain(original)  # the way back loses nothing


NESTED = {
    "benchmark": "enabled framework model args.pp args.depth args.enable_prefix_caching args.save_result",
    "metadata": """description maintainer model_params model_dtype kv_dtype num_layers num_kv_heads head_dim model_vram
        kv_vram_per_token quantization quant_bits""",
    "executor_config": """auto_remove restart_policy privileged gpus gpu_access_mode ipc shm_size network user
        security_opt cap_add ulimit devices volumes entrypoint memory_limit labels accelerator_vendor""",
    "readiness": """port_timeout_s health_timeout_s inference inference_style inference_timeout_s
        inference_prompt""",
    "distribution_config": """models.enabled models.entries.name models.entries.target models.entries.revision
        models.entries.allow_patterns models.entries.ignore_patterns containers additional_models""",
    "overrides": "when.nodes when.arch when.config defaults env container",
    "pre_exec": "command timeout",
    "post_exec": "copy dest source_host",
}


def paths_of(value: Any, before: str = "") -> set[str]:
    """Dotted names of every key below a value; entries of a list are as one."""
    if isinstance(value, list):
        return {path for one in value for path in paths_of(one, before)}
    if not isinstance(value, dict):
        return set()
    return {f"{before}{key}" for key in value} | {p for k, v in value.items() for p in paths_of(v, f"{before}{k}.")}


@pytest.mark.parametrize("key", NESTED)
def test_the_corpus_holds_what_stands_below_the_keys_too(key: str) -> None:
    held = {path for one in CORPUS for path in paths_of(one.get(key))}
    assert set(NESTED[key].split()) <= held


def test_a_clusters_recipe_maps_flags_and_says_what_it_refuses(tmp_path: Path) -> None:
    made = imported.translate(CORPUS[1], "four")
    recipe = load(made, tmp_path).recipe
    assert (recipe.parallel.nodes, recipe.parallel.tensor) == (2, 4)
    assert (recipe.serve.max_num_batched_tokens, recipe.serve.max_num_seqs, recipe.serve.port) == (4096, 2, 8000)
    assert recipe.serve.speculative is not None and recipe.serve.speculative.num_speculative_tokens == 7
    assert recipe.serve.args == ["--block-size", "256"]
    assert recipe.serve.env["CUTE_DSL_ARCH"] == "sm_121a" and recipe.serve.listen == "loopback"
    outcomes = {key: (outcome, why) for key, outcome, why in made.report}
    assert outcomes["command --host"][0] == REFUSED and "api_key_file" in outcomes["command --host"][1]
    assert outcomes["mods"][0] == outcomes["build_args"][0] == outcomes["container"][0] == REFUSED
    assert made.kept["build_args"] == ["--exp-b12x"]


def test_secrets_and_dangerous_variables_do_not_come_in(tmp_path: Path) -> None:
    made = imported.translate(CORPUS[9], "secrets")
    assert load(made, tmp_path).recipe.serve.env == {"NCCL_IB_HCA": "rocep1s0f0"}
    shown = imported.as_yaml(made, "x") + "".join(why for _, _, why in made.report)
    assert "abc" not in shown and "hf_x" not in shown


def test_braces_follow_each_format() -> None:
    """Given JSON in a template, then undoubled braces stay, doubled ones are halved, unknown keys stay as they are."""
    used: set[str] = set()
    assert imported.fill('--x {"a": {b}} {c}', {"b": 1}, used) == '--x {"a": 1} {c}'
    assert imported.fill('--x {{"a": {b}}}', {"b": 1}, used) == '--x {"a": 1}'
    assert imported.fill("{a}", {"a": "{b}", "b": "{a}"}, used) in ("{a}", "{b}")  # ends


@pytest.mark.parametrize("seed", range(2))
def test_random_files_neither_crash_nor_lose_a_key(seed: int, tmp_path: Path) -> None:
    """Given known and unknown keys with values of any kind, then all are accounted for and the result is valid."""
    rng = random.Random(seed)
    words = [*V1.split(), *V2.split(), "exl3kit"]
    flags = [
        "--seed 1",
        "--port {port}",
        "-tp 2",
        "--a.b=c",
        "{x}",
        "'",
        "--max-num-seqs 9999",
        "$(ls)",
        "--",
        "x",
        "-5",
    ]

    below = ["port", "HF_TOKEN", "EXL3_TIER", "image", "file", "a-b", 3, ""]

    def value(depth: int = 0) -> Any:
        kinds = [None, True, 0, -1, 2**70, 1.5, float("inf"), "", "a/b", "\0", "é\n{x}", "/m", "$HOME", "auto"]
        if depth < 2 and rng.random() < 0.4:
            if rng.random() < 0.5:
                return [value(depth + 1) for _ in range(rng.randrange(3))]
            return {rng.choice(below): value(depth + 1) for _ in range(rng.randrange(3))}
        return rng.choice(kinds)

    for number in range(200):
        original: dict[Any, Any] = {rng.choice(words): value() for _ in range(rng.randrange(1, 12))}
        original |= {"".join(rng.choices(string.printable, k=6)): value() for _ in range(rng.randrange(3))}
        if rng.random() < 0.6:
            chosen = rng.choices(flags, k=rng.randrange(6))
            original["command"] = " ".join(["vllm serve a/b", *chosen])
        original.setdefault("model", "a/b")
        made = imported.translate(original, f"r{number}")
        lost = {key for key in original if key not in accounted(made)}
        lost = {key for key in lost if not any(told.startswith(str(key)) for told, _, _ in made.report)}
        assert not lost, (lost, original)
        load(made, tmp_path)
        json.loads(imported.foreign_file(made, original))


def test_the_verb_writes_both_files_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    for number, one in enumerate(CORPUS):
        (source / f"r{number}.yaml").write_text(yaml.safe_dump({**one, "name": f"r{number}"}))
    recipe_import.import_recipes([source], out)
    table = capsys.readouterr().out
    assert len(list(out.glob("*.yaml"))) == len(list(out.glob("*.foreign.json"))) == len(CORPUS)
    counted = Counter(line.split()[0] for line in table.splitlines() if line.startswith("  "))
    assert counted["mapped"] > 60 and counted["refused"] > 30 and counted["kept"] >= 20
    (source / "broken.yaml").write_text("a: [")
    with pytest.raises(Exception, match="2"):
        recipe_import.import_recipes([source / "broken.yaml"], out)
