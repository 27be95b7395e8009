"""A table of tile choices that was measured on a GPU: from the recipe to every rank, or refused."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from spark_nodes import Spark, node_facts

from exl3kit import deployment, kernel_table, plan, recipes, render
from exl3kit.cli import plan as planning
from exl3kit.deployment import NodeFacts
from exl3kit.errors import ExitCode, KitError
from exl3kit.faults import RecipeError
from exl3kit.recipe import Recipe

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "overlay"))

TABLE = {"capability": [12, 1], "sms": 48, "table": {"dense_tiles": [[32, 0]], "fused_rows": 777}}
GLM = "glm-5.3-flash-2x-spark"


def sparks(**second: Any) -> dict[str, NodeFacts]:
    nodes = (node_facts(Spark(number=1)), node_facts(Spark(number=2, **second)))
    return {f"spark{number}": replace(one, name=f"spark{number}") for number, one in enumerate(nodes, 1)}


def with_table(folder: Path, text: str | None = None) -> Recipe:
    """A recipe of the operator's, whose table lies beside it."""
    (folder / "table.json").write_text(json.dumps(TABLE, indent=1) if text is None else text)
    (folder / "mine.yaml").write_text(f"recipe: 1\nextends: {GLM}\nname: mine\nexl3: {{kernel_table: table.json}}\n")
    return recipes.load(str(folder / "mine.yaml"))


def planned(recipe: Recipe, nodes: dict[str, NodeFacts]) -> deployment.Deployment:
    table = kernel_table.of(recipe, nodes.values())
    return deployment.plan(recipe, "0" * 64, list(nodes), nodes, dict.fromkeys(nodes, "/w"), "g", kernel_table=table)


def test_every_rank_gets_the_table_and_another_table_is_another_deployment(tmp_path: Path) -> None:
    recipe = with_table(tmp_path)
    made = planned(recipe, sparks())
    for rank in made.ranks:
        assert json.loads(rank.env["EXL3_KERNEL_TABLE"]) == TABLE
        assert "EXL3_KERNEL_TABLE='{" in render.env_file(rank.env)
    # laid out otherwise it is the same table; with another choice it is not
    assert planned(with_table(tmp_path, json.dumps(TABLE)), sparks()).spec == made.spec
    other = {**TABLE, "table": {"dense_tiles": [[64, 0]], "fused_rows": 777}}
    assert planned(with_table(tmp_path, json.dumps(other)), sparks()).spec != made.spec
    assert planned(recipes.load(GLM), sparks()).ranks[0].env.get("EXL3_KERNEL_TABLE") is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1]", "no table that `kit bench kernels` writes"),
        ("{", "no table that `kit bench kernels` writes"),
        (json.dumps({**TABLE, "sms": "48"}), "of other types"),
        (json.dumps({"capability": [12, 1]}), "'table'"),
        (json.dumps({**TABLE, "capability": [9, 0]}), "measured on capability 9.0, and spark1 has 12.1"),
    ],
)
def test_what_is_no_table_of_these_gpus_is_refused(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(KitError, match="kernel table cannot be used") as caught:
        kernel_table.of(with_table(tmp_path, text), sparks().values())
    assert says in str(caught.value.why) and caught.value.code == ExitCode.PREFLIGHT
    assert "kit bench kernels" in str(caught.value.next_step)


def test_a_file_that_is_gone_and_one_node_of_two_with_another_gpu_are_refused(tmp_path: Path) -> None:
    recipe = with_table(tmp_path)
    with pytest.raises(KitError) as caught:
        kernel_table.of(recipe, sparks(capability="12.0").values())
    assert "spark2 has 12.0" in str(caught.value.why)
    (tmp_path / "table.json").unlink()
    with pytest.raises(KitError) as caught:
        kernel_table.of(recipe, sparks().values())
    assert "No such file" in str(caught.value.why) and "table.json" in str(caught.value.where)


def test_what_the_kit_takes_the_overlay_takes(tmp_path: Path) -> None:
    """Given a table as the bench writes it, then what the ranks are given is that table again."""
    from exl3_vllm import plans

    spark = plans.Gpu((12, 1), 48)
    written = {"capability": spark.capability, "sms": spark.sms, "table": asdict(replace(plans.SM12X, fused_rows=9))}
    told = kernel_table.of(with_table(tmp_path, json.dumps(written, indent=1)), sparks().values())
    assert told is not None and plans.load_table(told, spark).fused_rows == 9


def test_without_kernels_there_is_no_table_and_the_plan_tells_of_one(tmp_path: Path) -> None:
    for ref, sets in (("demo", ()), (GLM, ("exl3.tier=none",))):
        with pytest.raises(RecipeError, match="it is for the EXL3 kernels"):
            recipes.load(ref, [*sets, "exl3.kernel_table=table.json"])
    with pytest.raises(RecipeError, match=r"set exl3\.kernel_table"):
        recipes.load(GLM, ["serve.env={EXL3_KERNEL_TABLE: /x}"])
    recipe = with_table(tmp_path)
    made = plan.make(recipe, planning.source_of(recipe))
    assert ("tiles as measured", f"exl3.kernel_table, {tmp_path}/table.json; refused on another GPU") in made.runs
