"""Plans: bytes per rank against published figures, headers against shapes, what fits, and every shipped recipe."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from spark_nodes import Spark, node_facts

from exl3kit import (
    admission,
    deployment,
    manifest,
    paths,
    plan,
    published,
    rank_env,
    recipe_checks,
    recipes,
    weights,
)
from exl3kit.admission import GIB
from exl3kit.asking import Answer
from exl3kit.cli import plan as cli
from exl3kit.cli import serve as serving
from exl3kit.errors import KitError

GLM = "glm-5.3-flash-2x-spark"
SHIPPED = [path.stem for path in recipes.shipped()]


def planned(ref: str, *sets: str) -> plan.Plan:
    recipe = recipes.load(ref, sets)
    return plan.make(recipe, cli.source_of(recipe))


def test_the_headline_agrees_with_published_figures_within_three_per_cent() -> None:
    """Given GLM-5.3-Flash at TP2: experts 71.2 GiB a rank, a layer 1.69 GiB packed, KV 7.1 GiB for 1M tokens."""
    made = planned(GLM)
    assert made.source.parts["routed experts"] / GIB == pytest.approx(71.2, rel=0.03)
    assert made.source.moe_layer / GIB == pytest.approx(1.69, rel=0.03)
    assert made.rank.kv_token * plan.MILLION / GIB == pytest.approx(7.1, rel=0.03)
    assert made.fits and [one.node for one in made.verdicts] == ["one DGX Spark"]


def test_more_rows_a_step_take_more_scratch_and_nothing_else_of_the_weights() -> None:
    small, large = planned(GLM), planned(f"{GLM}-mnbt7168")
    assert large.rank.scratch > 2 * small.rank.scratch
    assert large.rank.weights == small.rank.weights
    assert large.rank.kv == small.rank.kv


@pytest.mark.parametrize("ref", SHIPPED)
def test_every_shipped_recipe_is_valid_and_its_plan_fits_its_machine(ref: str) -> None:
    assert recipe_checks.check(ref).ok
    made = planned(ref)
    assert made.fits, (made.refusals, made.verdicts)
    assert made.rank.weights > 0 and made.runs and len(made.commands) >= 4
    json.dumps(made.as_json())
    assert plan.table(made)


@pytest.mark.parametrize("ref", [ref for ref in SHIPPED if not ref.startswith("demo")])
def test_every_real_recipe_has_its_page_with_the_plans_figures(ref: str) -> None:
    """Given docs/recipes, then the page of each recipe tells what `kit plan` tells, to the digit."""
    page = page_of(ref)
    made = planned(ref)
    text = page.read_text(encoding="utf-8")
    assert f"`{ref}`" in text
    row = figures(made)
    assert row in text, f"{page.name} lacks: {row}"
    assert "published by others" in text or "modelled" in text
    assert "Verified here" in text


def page_of(ref: str) -> Path:
    fitting = [path for path in (paths.REPO / "docs" / "recipes").glob("*.md") if ref.startswith(path.stem)]
    assert fitting, f"no page for {ref}"
    return max(fitting, key=lambda path: len(path.stem))


def figures(made: plan.Plan) -> str:
    """The row of a page's table for one recipe."""
    rank, gib = made.rank, admission.gib
    parts = [rank.weights, rank.kv, rank.activation, rank.scratch, rank.graphs, rank.context, rank.fixed + rank.kv]
    return f"| `{made.recipe.name}` | " + " | ".join(gib(part) for part in parts) + " |"


def test_a_shape_counts_what_the_headers_say(tmp_path: Path) -> None:
    """Given the demo with experts, whose headers are here, then its shape gives the same packed bytes and weights."""
    headers = manifest.survey(paths.REPO / "models" / "demo-moe")
    config = headers["config"]
    entry: dict[str, Any] = {"config": config, "source": "test", "packed": ["routed experts", "attention", "head"]}
    bits = headers["sizes"]["trellis"] * 8 / headers["sizes"]["trellis_weights"]
    counted = published.of("demo", {**entry, "head_bits": bits}, bits)
    packed = [one for one in counted.matrices if one.bits != published.PLAIN]
    assert sum(one.weights for one in packed) == headers["sizes"]["trellis_weights"]
    assert counted.sizes.trellis == pytest.approx(headers["sizes"]["trellis"], abs=64)
    whole = headers["sizes"]["cut"] + headers["sizes"]["whole"]
    assert counted.sizes.cut + counted.sizes.whole == pytest.approx(whole, rel=0.03)


def test_experts_that_blocks_do_not_divide_are_cut_unevenly_or_kept_whole() -> None:
    """Given 1408 = 11 blocks on two ranks, then one holds 6 of 11; with expert parallelism both hold half."""
    cut, whole = planned("glm-4.5-air-2x-spark"), planned("glm-4.5-air-2x-spark-ep")
    assert ("experts cut unevenly, 6/5 blocks", "1408 is 11 blocks of 128, which no rank may cut") in cut.runs
    assert cut.source.parts["routed experts"] / whole.source.parts["routed experts"] == pytest.approx(12 / 11, rel=0.01)
    assert any(what.startswith("whole experts") for what, _ in whole.runs)


def test_a_plan_that_cannot_be_cut_is_refused_with_the_reason() -> None:
    made = planned("llama-3.3-70b-2x-spark", "parallel.tensor=6", "parallel.nodes=2")
    assert any("64 attention heads do not divide over 6 ranks" in one for one in made.refusals)
    assert not made.fits


def test_nodes_are_held_against_the_plan_and_their_network_is_shown() -> None:
    """Given two played Sparks, one of them nearly full, then it alone has no room, and NCCL's names come from facts."""
    recipe = recipes.load(GLM)
    nodes = {f"spark{n}": node_facts(Spark(number=n)) for n in (1, 2)}
    made = plan.make(recipe, cli.source_of(recipe), nodes, ["spark1", "spark2"], "spark1,spark2")
    assert made.fits and not made.nominal
    assert all(env["NCCL_IB_HCA"].startswith("=") and env["NCCL_NET"] == "IB" for env in made.networks.values())
    assert made.commands[-2] == f"kit up {GLM} --nodes spark1,spark2"
    nodes["spark2"] = node_facts(Spark(number=2, available_kib=60_000_000))
    full = plan.make(recipe, cli.source_of(recipe), nodes, ["spark1", "spark2"])
    assert [one.fits for one in full.verdicts] == [True, False] and not full.fits


def test_the_kv_cache_is_what_vllm_is_given_and_the_need_of_one_request_is_said_beside_it() -> None:
    """Given a recipe that names more than one request needs, then rows, sum and verdict are of what it names."""
    recipe = recipes.load("demo-tp2", ["serve.kv_cache_memory=64MiB"])
    made = plan.make(recipe, cli.source_of(recipe), {"a": node_facts(Spark())}, ["a", "a"])
    rank, rows = made.rank, {what: (size, why) for what, size, why in plan.table(made)}
    need = f"one request of {rank.max_model_len} tokens needs {admission.gib(rank.kv)}"
    assert rank.kv < 64 * admission.MIB and rank.as_fields()["total"] == rank.fixed + 64 * admission.MIB
    assert rows["KV cache"][0] == "64.0 MiB" and rows["KV cache"][1].startswith(f"serve.kv_cache_memory; {need}; ")
    assert rows["in all"][0] == admission.gib(rank.fixed + 64 * admission.MIB)
    assert f", KV cache 64.0 MiB ({need}), " in made.verdicts[0].says and "KV 0" not in made.verdicts[0].says
    assert replace(rank, kv_named=1).kv_cache == rank.kv, "less than one request would be refused"


def test_the_network_of_each_rank_is_shown_as_what_it_would_be_told(capsys: pytest.CaptureFixture[str]) -> None:
    nodes = {f"spark{n}": node_facts(Spark(number=n)) for n in (1, 2)}
    for name, says in ((GLM, r"[A-Z_]+=.* NCCL_NET=IB( |$)"), ("demo-tp2", "TCP, nothing to set$")):
        recipe = recipes.load(name)
        cli.show(plan.make(recipe, cli.source_of(recipe), nodes, ["spark1", "spark2"], "spark1,spark2"))
        assert re.search(rf"^  rank 1 on spark2: {says}", capsys.readouterr().out, re.MULTILINE), name


def test_the_commands_of_a_plan_work_as_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Given a recipe in a file, or one that this machine can serve alone: the commands name that file, this one."""
    file = tmp_path / "my recipe.yaml"
    file.write_text("recipe: 1\nextends: demo-tp2\nname: mine\n")
    cli.plan(str(file))
    said = capsys.readouterr().out
    assert f"kit up '{file}' --nodes local\n" in said
    assert "mine: 2 ranks on 2 nodes" in said and "`--nodes local` asks this one" in said
    assert planned("qwen3-30b-a3b-rtx").commands[0] == "kit doctor qwen3-30b-a3b-rtx --nodes local"
    assert planned(GLM).commands[0] == f"kit doctor {GLM} --nodes node1,node2"


def test_weights_that_nobody_knows_are_a_sentence() -> None:
    with pytest.raises(KitError, match="no published shape") as caught:
        planned(GLM, "model={repo: a/b}")
    assert "kit weights fetch" in str(caught.value.next_step)


def test_a_repository_without_a_commit_is_planned_and_not_served() -> None:
    """Given an unset pin, then `up` and `fetch` refuse it first and name the command that resolves it."""
    recipe = recipes.load("qwen3-30b-a3b-spark")
    assert recipe.model.revision is None
    with pytest.raises(KitError, match="no commit of turboderp/Qwen3-30B-A3B-exl3 is pinned") as caught:
        weights.survey(recipe)
    assert "kit lock --update qwen3-30b-a3b-spark" in str(caught.value.next_step)


def test_the_verb_prints_plain_lines_and_one_json_object() -> None:
    kit = [sys.executable, "-m", "exl3kit.cli", "plan", GLM]
    done = subprocess.run([*kit, "--json"], cwd=paths.REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rank"]["kv_token"] == 7315
    cli.show(planned(GLM))


def test_both_ranks_of_the_headline_get_one_environment_but_for_the_facts_of_their_nodes() -> None:
    """Given two played Sparks with other names and GIDs, then only what is a node's or a rank's own differs."""
    recipe = recipes.load(GLM)
    nodes = {
        "spark1": node_facts(Spark(number=1)),
        "spark2": node_facts(Spark(number=2, link="enp9s0", first_gid=4)),
    }
    folders = dict.fromkeys(nodes, "/models/glm")
    made = deployment.plan(recipe, "0" * 64, list(nodes), nodes, folders, "g1")
    one, other = (dict(rank.env) for rank in made.ranks)
    differing = {name for name in {*one, *other} if one.get(name) != other.get(name)}
    assert differing == {"EXL3_RANK", "VLLM_HOST_IP", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_GID_INDEX"}
    argv = [set(rank_env.options_of(rank.argv)) for rank in made.ranks]
    assert {word.split()[0] for word in argv[0] ^ argv[1]} == {"--node-rank", "--host", "--port", "--headless"}


def test_up_dry_run_shows_what_ranks_would_get_and_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(serving, "render", lambda *given, **named: seen.append((given, named)))
    monkeypatch.setattr(serving, "bring_up", lambda *_: pytest.fail("it started something"))
    serving.up("demo-tp2", nodes="a,b", dry_run=True)
    assert seen == [(("demo-tp2",), {"nodes": "a,b", "sets": None, "env": True, "as_json": False})]


def test_up_ends_with_what_was_asked_and_answered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Given an answer that a terminal would not survive, then it is shown on one line, after the address."""
    monkeypatch.setattr("exl3kit.nodes.open_nodes", nullcontext)
    served = SimpleNamespace(
        deployment=SimpleNamespace(served_name="demo"),
        head=SimpleNamespace(node=SimpleNamespace(name="spark1")),
        url="http://127.0.0.1:8000/v1",
        started=True,
        answer=Answer(200, 0.1, 1.0, {"choices": [{"text": " 4\n\x1b[2J[b]" + "!" * 500}]}),
    )
    serving.bring_up(lambda *_: served, "demo-tp2", serving.Start(), as_json=False)  # type: ignore[arg-type, return-value]
    address, said = capsys.readouterr().out.splitlines()
    assert address == "demo serves on spark1: http://127.0.0.1:8000/v1"
    assert said.startswith(r"  asked: 2+2=  answered: 4\n\x1b[2J[b]!!!") and said.endswith("!…") and len(said) < 160
