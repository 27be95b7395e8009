"""Recipes for other launchers: what these would run, and that an import gives the same recipe again."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from exl3kit import deployment, exported, imported, recipes
from exl3kit.cli import recipe_export
from exl3kit.errors import KitError
from exl3kit.exported import Format
from exl3kit.recipe import Recipe

CORPUS: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "foreign_recipes.yaml").read_text())
FORMATS: tuple[Format, ...] = ("v1", "v2")
AWKWARD = [
    "--override-generation-config", '{"a": {"b": "c d"}, "e": [{"f": 1}]}',
    "--chat-template", "{{ messages }} {% if x %}it's{% endif %} {port} $HOME #1",
    "--middleware", "a", "b",
    "--seed", "-5",
]  # fmt: skip


def there_and_back(recipe: Recipe, to: Format) -> Recipe:
    """Through the file, as another machine would read it."""
    text = exported.as_yaml(exported.translate(recipe, to, "some/image:1"), recipe.name)
    made = imported.translate(yaml.safe_load(text), recipe.name)
    return recipes.load_text(imported.as_yaml(made, "x").encode(), Path("/elsewhere/x.yaml")).recipe


def awkward() -> Recipe:
    """One with what quoting gets wrong."""
    sets = [f"serve.args={yaml.safe_dump(AWKWARD, default_flow_style=True, width=1000).strip()}"]
    sets += ["serve.env={NCCL_IB_HCA: '=rocep1s0f0:1', ODD: 'a \"b\" $c'}", "serve.stall_s=60", "probe.prompt='{x}'"]
    sets += ["serve.speculative={method: mtp, num_speculative_tokens: 2}", "parallel.pipeline=2", "parallel.nodes=4"]
    return recipes.load("glm-5.3-flash-2x-spark", sets)


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("ref", [path.stem for path in recipes.shipped()])
def test_every_shipped_recipe_comes_back_as_it_was(ref: str, to: Format) -> None:
    recipe = recipes.load(ref)
    assert there_and_back(recipe, to) == recipe
    report = imported.translate(exported.translate(recipe, to, "some/image:1").data, ref).report
    assert [key for key, outcome, _ in report if outcome == "refused"] == ["container"]


@pytest.mark.parametrize("to", FORMATS)
def test_what_quoting_gets_wrong_comes_back_as_it_was(to: Format) -> None:
    assert there_and_back(awkward(), to) == awkward()


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("number", range(len(CORPUS)))
def test_an_imported_recipe_goes_out_and_comes_back(number: int, to: Format) -> None:
    made = imported.translate(CORPUS[number], f"recipe-{number}")
    recipe = recipes.load_text(imported.as_yaml(made, "x").encode(), Path("/here/x.yaml")).recipe
    assert there_and_back(recipe, to) == recipe


def filled(data: dict[str, Any], to: Format) -> list[str]:
    """The argv that the other launcher makes: str.format there, replacement of `{key}` here."""
    values = {"model": data.get("model"), **data["defaults"]}
    if to == "v1" or "{{" in data["command"]:
        return shlex.split(data["command"].format(**values).replace("\\\n", " "))
    text = re.sub(r"\{(\w+)\}", lambda match: str(values.get(match[1], match[0])), data["command"])
    return shlex.split(text.replace("\\\n", " "))


@pytest.mark.parametrize("to", FORMATS)
def test_the_other_launcher_runs_the_same_options(to: Format) -> None:
    """Given a template with everything awkward, then its launcher's own filling gives the argv that the kit runs."""
    recipe = awkward()
    argv = filled(exported.translate(recipe, to, "i").data, to)
    assert argv[:3] == ["vllm", "serve", recipe.model.repo]
    ours = [*deployment.parallel_options(recipe), *deployment.engine_options(recipe)]
    at = argv.index("--tensor-parallel-size")
    assert argv[at : at + len(ours)] == ours
    assert argv[-len(AWKWARD) :] == AWKWARD
    assert ("--revision" in argv) == (to == "v1")  # the other has a key for it


def test_what_a_format_has_no_word_for_is_said_and_its_secrets_stay_here(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sesame")
    recipe = recipes.load("demo", ["serve.listen=open", f"serve.api_key_file={tmp_path / 'key'}"])
    made = exported.translate(recipe, "v1", "i")
    assert {"serve.listen", "serve.api_key_file", "image.vllm"} <= set(made.beside)
    text = exported.as_yaml(made, "demo")
    assert "sesame" not in text and made.data["defaults"]["host"] == "127.0.0.1"
    assert there_and_back(recipe, "v1") == recipe
    assert made.data["solo_only"] and "cluster_only" not in made.data
    several = exported.translate(recipes.load("demo", ["parallel.tensor=2"]), "v1", "i").data
    assert "solo_only" not in several  # there it would mean one rank


def test_a_block_that_makes_no_recipe_is_refused_and_the_rest_is_imported() -> None:
    data = exported.translate(recipes.load("demo"), "v2", "i").data
    for block in ({"image": {"vllm": "x"}}, {"file": {"extends": "demo"}}, {"serve": 3}, 17, {}):
        made = imported.translate({**data, "exl3kit": block}, "demo")
        assert ("exl3kit", "refused", "with it the recipe would not be valid") in made.report
        assert made.kept["exl3kit"] == block and imported.validated(made.data).serve.max_model_len == 256


GLM = "glm-5.3-flash-2x-spark"


def test_the_verb_writes_a_file_once_and_names_an_image_that_it_cannot_know(tmp_path: Path) -> None:
    out = tmp_path / "new" / "demo.yaml"
    recipe_export.export_recipe("demo", "v2", out=out)
    assert yaml.safe_load(out.read_text())["container"].startswith("exl3kit:")
    with pytest.raises(KitError, match="not replaced"):
        recipe_export.export_recipe("demo", "v2", out=out)
    (tmp_path / "unpinned.yaml").write_text(f"recipe: 1\nextends: {GLM}\nname: unpinned\nimage: {{vllm: 9.9.9}}\n")
    with pytest.raises(KitError, match="no name yet") as caught:
        recipe_export.export_recipe(str(tmp_path / "unpinned.yaml"), "v1")
    assert "--container" in str(caught.value.next_step)
