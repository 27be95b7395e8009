"""The contract names everything of vLLM that the overlay uses, and holds for the wheels that it was recorded from."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exl3kit import overlay, paths
from exl3kit.errors import KitError

sys.path.insert(0, str(paths.OVERLAY))
from patches import contract, diffs, patchset
from patches.sources import Sources

SOURCES = sorted((paths.OVERLAY / "exl3_vllm").rglob("*.py"))


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name) of everything that a source takes from vLLM; the name is empty for a whole module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            yield from ((str(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.split(".")[0] == "vllm")


def imported() -> set[tuple[str, str]]:
    """What the overlay's modules and the lines that its patches add take from vLLM."""
    found = {one for path in SOURCES for one in imports(ast.parse(path.read_text()))}
    for version in patchset.versions():
        chosen = patchset.load(version)
        for patch in chosen.patches:
            lines = [line[1:].strip() for line in chosen.render(patch).splitlines() if line.startswith("+")]
            found |= {
                one for line in lines if line.startswith(("from ", "import ")) for one in imports(ast.parse(line))
            }
    return found


def unlisted(taken: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """What the contract lacks; a module taken whole counts as listed when symbols of it are."""
    listed = {(symbol.module, symbol.name.partition(".")[0]) for symbol in contract.symbols()}
    modules = {symbol.module for symbol in contract.symbols()}
    return {one for one in taken if one not in listed and f"{one[0]}.{one[1]}".rstrip(".") not in modules}


def test_every_import_of_vllm_is_in_the_contract() -> None:
    taken = imported()
    assert ("vllm.model_executor.layers.linear", "ReplicatedLinear") in taken  # of a patch
    assert ("vllm.logger", "init_logger") in taken  # of the plugin
    assert unlisted(taken) == set()


def test_an_import_that_nobody_listed_would_be_found() -> None:
    program = "import vllm.sequence\nfrom vllm.model_executor.layers.linear import LinearBase, EveryLinear"
    lacking = unlisted(set(imports(ast.parse(program))))
    assert lacking == {("vllm.sequence", ""), ("vllm.model_executor.layers.linear", "EveryLinear")}


def test_every_argument_that_the_kit_starts_vllm_with_is_in_the_contract() -> None:
    arguments = next(symbol for symbol in contract.symbols() if symbol.name == "EngineArgs").attributes
    given = re.findall(r'"--([a-z-]+)"', (paths.REPO / "exl3kit" / "deployment.py").read_text())
    assert len(given) > 15
    of_the_front_end = {"host", "port", "headless", "enable-prompt-tokens-details", "disable-access-log-for-endpoints"}
    # `--nodes` stands there too, in a refusal of the kit's own option.
    assert {name.replace("-", "_") for name in set(given) - of_the_front_end - {"nodes"}} <= set(arguments)


def test_every_symbol_says_why_and_is_recorded_for_every_version() -> None:
    for symbol in contract.symbols():
        assert symbol.why and symbol.hold in ("signature", "body"), symbol.key
    keys = [symbol.key for symbol in contract.symbols()]
    assert len(set(keys)) == len(keys)
    for version in ("0.32.0", "0.33.0"):
        assert list(contract.recorded(version)) == keys


def test_the_two_versions_differ_in_one_signature() -> None:
    """Given both records, then one overlay serves both: 0.33.0 only added a parameter to the head."""
    older, newer = contract.recorded("0.32.0"), contract.recorded("0.33.0")
    changed = [key.rpartition(":")[2] for key in newer if newer[key]["signature"] != older[key]["signature"]]
    assert changed == ["ParallelLMHead.__init__"]


def test_every_diff_renders_and_touches_the_files_of_its_anchors() -> None:
    chosen = patchset.load("0.33.0")
    assert [patch.concern for patch in chosen.patches] == ["P2", "P3", "P4", "P7"]
    assert set(chosen.without_patch) == {"P1", "P5", "P6", "P8", "P10"}
    for patch in chosen.patches:
        text = chosen.render(patch)
        assert "{{" not in text and "exl3_vllm.hooks" in text
        files = {anchor.module.replace(".", "/") + ".py" for anchor in patch.anchors}
        assert {file.path for file in diffs.parse(text)} == files
    templates = {path.name for path in chosen.folder.glob("*.j2")}
    assert templates == {patch.file for patch in chosen.patches}


# ---- what the hooks answer -------------------------------------------------------------------------------------------


class Config:
    """A quantisation as vLLM's models see one."""

    def __init__(self, name: str, matrices: list[str]) -> None:
        from exl3_vllm.names import ModuleNames

        self.name, self.names = name, ModuleNames(matrices, ["model.layers.0.self_attn.q_proj"])

    def get_name(self) -> str:
        return self.name


@pytest.mark.parametrize(
    ("name", "prefix", "given"),
    [
        ("exl3", "model.layers.1.self_attn", True),
        ("exl3", "model.layers.1.self_attn.o_proj", True),
        ("exl3", "model.layers.0.self_attn", False),  # stored plain
        ("exl3", "model.layers.1.self", False),  # the beginning of a name is no module
        ("exl3", "model.layers.1.self_attn.o_proj.x", False),
        ("fp8", "model.layers.1.self_attn", False),
    ],
)
def test_only_modules_with_a_trellis_get_the_quantisation(name: str, prefix: str, given: bool) -> None:
    from exl3_vllm.hooks import trellis_only

    config = Config(name, ["model.layers.1.self_attn.o_proj"])
    assert trellis_only(config, prefix) is (config if given else None)
    assert trellis_only(None, prefix) is None


# ---- real wheels -----------------------------------------------------------------------------------------------------


def pinned() -> Path:
    try:
        return overlay.pinned_wheels()[0]
    except KitError:
        pytest.skip("vLLM's CPU wheel is not in the wheel cache yet: scripts/vllm-env fetches it")


def kit(*argv: str | Path, code: int = 0) -> Any:
    command = [sys.executable, "-m", "exl3kit.cli", "overlay", *map(str, argv), "--json"]
    done = subprocess.run(command, cwd=paths.REPO, capture_output=True, text=True)
    assert done.returncode == code, done.stdout[-2000:] + done.stderr
    return json.loads(done.stdout)


def test_the_pinned_wheels_are_as_recorded() -> None:
    pinned()
    report = kit("check")
    found = {one["vllm"]: one["verdicts"] for one in report["checks"]}
    assert report["ok"] and "0.32.0" in found and len(report["checks"]) == len(overlay.pinned_wheels())
    assert len(found["0.32.0"]) == len(contract.symbols())


def test_every_method_that_overrides_one_of_vllm_is_in_the_contract() -> None:
    """Given the overlay's classes below classes of vLLM, then each method that the base has too is listed."""
    sources = Sources(pinned())
    listed = {symbol.key for symbol in contract.symbols()}
    overriding = set()
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        taken = {name: module for module, name in imports(tree)}
        for node in [one for one in tree.body if isinstance(one, ast.ClassDef)]:
            for base in [one.id for one in node.bases if isinstance(one, ast.Name) and one.id in taken]:
                methods = [one.name for one in node.body if isinstance(one, ast.FunctionDef) and one.name != "__init__"]
                named = {f"{taken[base]}:{base}.{one}": f"{base}.{one}" for one in methods}
                overriding |= {key for key, name in named.items() if sources.find(taken[base], name)}
    assert len(overriding) > 10
    # A method of a base's own base is listed where it is defined.
    leaves = {key.rpartition(".")[2] for key in listed}
    assert {key for key in overriding if key not in listed and key.rpartition(".")[2] not in leaves} == set()


def fetched(version: str) -> Path:
    """The wheel of a version, downloaded once into the wheel cache (300 MB)."""
    house = paths.wheelhouse()
    if not list(house.glob(f"vllm-{version}-*.whl")):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(house)]
        subprocess.run([*command, "--only-binary", ":all:", f"vllm=={version}"], check=True)
    return next(house.glob(f"vllm-{version}-*.whl"))


@pytest.mark.full
def test_vllm_0_33_is_as_recorded_and_takes_every_patch(tmp_path: Path) -> None:
    import zipfile

    wheel = fetched("0.33.0")
    report = kit("check", "--wheel", wheel)
    assert report["ok"] and report["checks"][0]["set"] == "0.33.0"
    # given its sources unpacked
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path, [name for name in archive.namelist() if name.endswith((".py", "METADATA"))])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.py")}
    # when the patches are applied
    command = [sys.executable, "-B", "-m", "patches", "apply", str(tmp_path)]
    subprocess.run(command, cwd=paths.OVERLAY, check=True, capture_output=True)
    # then four files are others, still compile, and only the anchored functions of them differ
    touched = {path for path, content in before.items() if path.read_bytes() != content}
    assert sorted(path.name for path in touched) == ["kda.py", "model.py", "mtp.py", "multimodal.py"]
    anchors = [anchor for patch in patchset.load("0.33.0").patches for anchor in patch.anchors]
    for path in touched:
        compile(path.read_bytes(), path, "exec")
        module = ".".join(path.relative_to(tmp_path).with_suffix("").parts)
        names = [anchor.name for anchor in anchors if anchor.module == module]
        old, new = ast.parse(before[path]), ast.parse(path.read_bytes())
        assert patchset._blanked(old, names) == patchset._blanked(new, names)


@pytest.mark.full
def test_the_plugin_registers_under_the_patched_sources_of_0_33(tmp_path: Path) -> None:
    """Given 0.33.0 in place of 0.32.0 before the same torch, then all that the plugin imports and wraps is there."""
    import zipfile

    from exl3kit import synthetic

    python = synthetic.torch_python()
    if python is None:
        pytest.skip("no environment with torch here: scripts/vllm-env makes one")
    with zipfile.ZipFile(fetched("0.33.0")) as archive:
        archive.extractall(tmp_path, [name for name in archive.namelist() if name.endswith((".py", "METADATA"))])
    subprocess.run([sys.executable, "-B", "-m", "patches", "apply", str(tmp_path)], cwd=paths.OVERLAY, check=True)
    program = (
        "import vllm, exl3_vllm; exl3_vllm.register()\n"
        "from vllm.model_executor.layers.quantization import get_quantization_config\n"
        "print(vllm.__version__, get_quantization_config('exl3').__module__)"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{paths.OVERLAY}", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([str(python), "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["0.33.0 exl3_vllm.config"], done.stderr[-2000:]


@pytest.mark.full
def test_vllm_0_26_has_drifted_and_is_told_what() -> None:
    report = kit("check", "--wheel", fetched("0.26.0"), code=5)
    found = {one["subject"]: one["status"] for one in report["checks"][0]["verdicts"] if one["status"] != "same"}
    assert report["checks"][0]["set"] == "0.33.0"
    head = "vllm.model_executor.layers.vocab_parallel_embedding:ParallelLMHead.__init__"
    assert found[head] == "changed" and found["kda.diff.j2"] == "missing"
    assert len(found) >= 9
