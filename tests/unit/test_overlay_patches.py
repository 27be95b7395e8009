"""Contract and patches against small wheels with planted drift: the real program, with a record of its own."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

OVERLAY = Path(__file__).resolve().parents[2] / "overlay"

LAYERS = '''"""Layers."""
from vllm.base import Base


class Linear(Base):
    """A layer."""

    def __init__(self, size, quant_config=None, *, prefix=""):
        self.size = size
        self.quant_config = None  # plain in every checkpoint
        self.prefix = prefix

    def other(self):
        return self.size


class Other(Base):
    def __init__(self, size):
        self.quant_config = None  # plain in every checkpoint


def helper(x, *, scale=1.0):
    """Scale a number."""
    return x * scale


LIMIT = "general"
'''

CLEAN = {
    "vllm/__init__.py": "",
    "vllm/base.py": "class Base:\n    def apply(self, layer, x):\n        raise NotImplementedError\n",
    "vllm/layers/__init__.py": "from .linear import *\nfrom .linear import helper as scaled\n",
    "vllm/layers/linear.py": LAYERS,
}

CONTRACTS = """
vllm.layers:
  Linear: {why: a base class, attributes: [size, prefix, apply]}
  Linear.apply: {why: overridden}
  Linear.__init__: {why: called}
  scaled: {why: called, hold: body}
  LIMIT: {why: named}
"""

DIFF = """--- a/vllm/layers/linear.py
+++ b/vllm/layers/linear.py
@@ -{{ line }},2 +{{ line }},3 @@
         self.size = size
-        self.quant_config = None  # plain in every checkpoint
+        # {{ note }}
+        self.quant_config = quant_config
"""

MANIFEST = """
vllm: 9.9.9
variables: {line: 9, note: decided per tensor}
patches:
  - file: linear.diff.j2
    concern: X1
    why: the layer drops its quantisation
    anchors: [{module: vllm.layers.linear, name: Linear.__init__, sha256: SHA, patched: PATCHED}]
without_patch: []
"""


def wheel(path: Path, files: Mapping[str, str], version: str = "9.9.9") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr(
            f"vllm-{version}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        )
    return path


def run(home: Path, *arguments: str | Path, code: int = 0) -> str:
    command = [sys.executable, "-B", "-m", "patches", *map(str, arguments)]
    done = subprocess.run(command, cwd=home, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def digest_in(home: Path, text: str, name: str) -> str:
    program = (
        "import ast, sys; from patches import patchset, shapes; "
        "print(shapes.digest(patchset._function(ast.parse(sys.stdin.read()), sys.argv[1])))"
    )
    command = [sys.executable, "-B", "-c", program, name]
    return subprocess.run(command, cwd=home, input=text, capture_output=True, text=True, check=True).stdout.strip()


PATCHED = LAYERS.replace("self.quant_config = None  # plain in every checkpoint", "self.quant_config = quant_config", 1)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real program, with a contract, a patch and a record of a vLLM 9.9.9 of four small files."""
    folder = tmp_path_factory.mktemp("overlay")
    package = folder / "patches"
    package.mkdir()
    for module in (OVERLAY / "patches").glob("*.py"):
        shutil.copy(module, package)
    (package / "contracts.yaml").write_text(CONTRACTS)
    own = package / "vllm-9.9.9"
    own.mkdir()
    (own / "linear.diff.j2").write_text(DIFF)
    hashes = {
        "SHA": digest_in(folder, LAYERS, "Linear.__init__"),
        "PATCHED": digest_in(folder, PATCHED, "Linear.__init__"),
    }
    (own / "manifest.yaml").write_text(re.sub(r"\bSHA\b|\bPATCHED\b", lambda match: hashes[match[0]], MANIFEST))
    run(folder, "record", wheel(folder / "clean.whl", CLEAN))
    return folder


def verdicts(home: Path, tmp_path: Path, files: Mapping[str, str], code: int) -> dict[str, tuple[str, str]]:
    """subject -> (status, detail) of everything that is not the same."""
    report: dict[str, Any] = json.loads(run(home, "check", wheel(tmp_path / "vllm.whl", files), code=code))
    return {one["subject"]: (one["status"], one["detail"]) for one in report["verdicts"] if one["status"] != "same"}


def test_an_equal_vllm_is_clean_whatever_its_comments_and_docstrings(home: Path, tmp_path: Path) -> None:
    text = LAYERS.replace('"""Scale a number."""', '"""Another text."""').replace('"""Layers."""', "# a comment")
    assert verdicts(home, tmp_path, {**CLEAN, "vllm/layers/linear.py": text}, 0) == {}


def changed(old: str, new: str, count: int = -1) -> dict[str, str]:
    assert old in LAYERS
    return {**CLEAN, "vllm/layers/linear.py": LAYERS.replace(old, new, count)}


DRIFT: dict[str, tuple[dict[str, str], dict[str, tuple[str, str]]]] = {
    "a parameter is lost": (
        changed('size, quant_config=None, *, prefix=""', "size, quant_config=None"),
        {
            "vllm.layers:Linear.__init__": ("changed", "signature lost *, prefix=''"),
            "linear.diff.j2": ("changed", "is not the function that the patch was made for"),
        },
    ),
    "a symbol is renamed": (
        changed("def helper(", "def helped("),
        {"vllm.layers:scaled": ("missing", "")},
    ),
    "a method of the base is renamed": (
        {**CLEAN, "vllm/base.py": CLEAN["vllm/base.py"].replace("def apply", "def apply_weights")},
        {
            "vllm.layers:Linear.apply": ("missing", ""),
            "vllm.layers:Linear": ("changed", "lost apply"),
        },
    ),
    "a constant says something else": (
        changed('"general"', '"special"'),
        {"vllm.layers:LIMIT": ("changed", "")},
    ),
    "a body that matters changes": (
        changed("return x * scale", "return x / scale"),
        {"vllm.layers:scaled": ("changed", "its body is another")},
    ),
    "an attribute is lost": (
        changed("self.prefix = prefix", "self.name = prefix"),
        {
            "vllm.layers:Linear": ("changed", "lost prefix"),
            "linear.diff.j2": ("changed", "is not the function that the patch was made for"),
        },
    ),
    "the base class is another": (
        changed("class Linear(Base)", "class Linear(Base, dict)"),
        {"vllm.layers:Linear": ("changed", "signature gained dict")},
    ),
    "the module moved": (
        {
            **{name: text for name, text in CLEAN.items() if name != "vllm/layers/linear.py"},
            "vllm/layers/__init__.py": "",
            "vllm/new_linear.py": LAYERS.replace("def helper", "def scaled"),
        },
        {
            "vllm.layers:Linear": ("moved", "now in vllm.new_linear"),
            "vllm.layers:Linear.apply": ("moved", "now in vllm.base"),
            "vllm.layers:Linear.__init__": ("moved", "now in vllm.new_linear"),
            "vllm.layers:scaled": ("moved", "now in vllm.new_linear"),
            "vllm.layers:LIMIT": ("moved", "now in vllm.new_linear"),
            "linear.diff.j2": ("moved", "is now in vllm.new_linear"),
        },
    ),
    "the context of the patch is written differently": (
        changed("self.size = size\n", "self.size = (size)\n", 1),
        {"linear.diff.j2": ("changed", "fits at no place")},
    ),
}


@pytest.mark.parametrize("case", DRIFT)
def test_planted_drift_is_named(home: Path, tmp_path: Path, case: str) -> None:
    """Given a vLLM with one planted change, then exactly what it breaks is named, and the exit code is 5."""
    files, expected = DRIFT[case]
    found = verdicts(home, tmp_path, files, 5)
    assert {subject: status for subject, (status, _) in found.items()} == {k: v[0] for k, v in expected.items()}
    assert all(detail in found[subject][1] for subject, (_, detail) in expected.items()), found


def test_a_version_without_a_set_is_held_against_the_newest(home: Path, tmp_path: Path) -> None:
    report = json.loads(run(home, "check", wheel(tmp_path / "vllm.whl", CLEAN, "8.0.0")))
    assert (report["vllm"], report["set"], report["ok"]) == ("8.0.0", "9.9.9", True)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"no zip", "cannot be read as a wheel"), (None, "holds no package vllm")],
)
def test_what_is_no_vllm_is_a_sentence(home: Path, tmp_path: Path, content: bytes | None, words: str) -> None:
    file = tmp_path / "x.whl"
    if content is None:
        wheel(file, {"other/__init__.py": ""})
    else:
        file.write_bytes(content)
    assert words in run(home, "check", file, code=2)


# ---- applying --------------------------------------------------------------------------------------------------------


def unpacked(tmp_path: Path, files: Mapping[str, str] = CLEAN, version: str = "9.9.9") -> Path:
    with zipfile.ZipFile(wheel(tmp_path / "vllm.whl", files, version)) as archive:
        archive.extractall(tmp_path / "site-packages")
    return tmp_path / "site-packages"


def test_applying_changes_the_anchored_function_alone_and_its_bytecode(home: Path, tmp_path: Path) -> None:
    # given an unpacked vLLM with bytecode that nobody checks against its source
    root = unpacked(tmp_path)
    layers = root / "vllm/layers/linear.py"
    subprocess.run(
        [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", root], check=True
    )
    # when the patches are applied, and applied again
    first, second = run(home, "apply", root), run(home, "apply", root)
    # then the one line is another, the equal line of the other class is not, and what is imported is the new one
    assert layers.read_text() == LAYERS.replace(
        "        self.quant_config = None  # plain in every checkpoint\n",
        "        # decided per tensor\n        self.quant_config = quant_config\n",
        1,
    )
    assert "linear.diff.j2: vllm/layers/linear.py" in first and "was applied already" in second
    program = "from vllm.layers import Linear; print(Linear(1, 'exl3').quant_config)"
    assert subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True).stdout == "exl3\n"


@pytest.mark.parametrize("case", ["a body that matters changes", "the context of the patch is written differently"])
def test_nothing_is_applied_to_a_vllm_that_drifted(home: Path, tmp_path: Path, case: str) -> None:
    root = unpacked(tmp_path, DRIFT[case][0])
    before = {path: path.read_bytes() for path in root.rglob("*.py")}
    assert next(iter(DRIFT[case][1])) in run(home, "apply", root, code=5)
    assert {path: path.read_bytes() for path in root.rglob("*.py")} == before


def test_an_unknown_version_is_not_built_with(home: Path, tmp_path: Path) -> None:
    said = run(home, "apply", unpacked(tmp_path, version="9.9.10"), code=5)
    assert "not known to work with vLLM 9.9.10, only with 9.9.9" in said


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (",3 @@", ",4 @@", "its header says (2, 4)"),
        ("a/vllm/layers/linear.py", "a/vllm/base.py", "none of its anchors lies there"),
        ("{{ note }}", "{{ remark }}", "'remark' is undefined"),
        ("= quant_config\n", "= prefix\n", "the manifest says"),
        ("= quant_config\n", "= (quant_config\n", "no valid Python"),
    ],
)
def test_a_wrong_diff_is_refused(home: Path, tmp_path: Path, old: str, new: str, words: str) -> None:
    """Given a patch that is not what its manifest says, then nothing is written."""
    copy = tmp_path / "overlay"
    shutil.copytree(home, copy)
    template = copy / "patches/vllm-9.9.9/linear.diff.j2"
    assert old in template.read_text()
    template.write_text(template.read_text().replace(old, new))
    root = unpacked(tmp_path)
    said = run(copy, "apply", root, code=5)
    assert words in said
    assert (root / "vllm/layers/linear.py").read_text() == LAYERS


def test_a_hunk_outside_its_function_is_refused(home: Path, tmp_path: Path) -> None:
    """Given a hunk whose lines stand only in another function than the anchored one, then it does not fit."""
    copy = tmp_path / "overlay"
    shutil.copytree(home, copy)
    text = DIFF.replace("         self.size = size\n", "     def __init__(self, size):\n")
    (copy / "patches/vllm-9.9.9/linear.diff.j2").write_text(text)
    assert "fits at no place" in run(copy, "apply", unpacked(tmp_path), code=5)


def test_the_programs_modules_need_nothing_of_the_kit() -> None:
    """Given that the image runs them, then they import the standard library, PyYAML and Jinja2 (vLLM needs both)."""
    found = set()
    for file in (OVERLAY / "patches").glob("*.py"):
        imports = re.findall(r"^\s*(?:from|import) ([\w]+)", file.read_text(), re.MULTILINE)
        found |= {name for name in imports if name not in sys.stdlib_module_names}
    assert found == {"patches", "yaml", "jinja2"}
    assert importlib.util.find_spec("jinja2") is not None
