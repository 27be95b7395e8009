"""10,000 mutated recipes: each loads, or is refused with a place and one sentence; nothing else ever comes out."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from exl3kit import paths, recipes
from exl3kit.errors import ExitCode, KitError
from exl3kit.faults import RecipeError

COUNT = 10_000
SEED = 20261129

# Only to write mutants; the kit itself reads with the parser in Python, whose places do not depend on a C library.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

# Between them all keys of schema 1; short, because the time of the test is the time of reading them.
SEEDS = [
    """\
# A comment.
recipe: 1
name: build
hardware: "two DGX Sparks"
model: {repo: owner/name, revision: 0123456789abcdef0123456789abcdef01234567, served_name: m}
image:
  base: vllm/vllm-openai:v0.33.0
  vllm: 0.33.0
  arch: ["12.0", "12.1"]
  rates: [4, 2.5]
  codebooks: [mcg]
  platform: linux/arm64
parallel: {nodes: 2, tensor: 2, expert: true}
fabric: {require: rdma}
""",
    """\
recipe: 1
name: serving
model: {path: .}
image: {base: {rootfs: bookworm}, vllm: 0.32.0+cpu}
serve:
  max_num_batched_tokens: 2048
  kv_cache_memory: 64MiB
  kv_cache_dtype: fp8
  listen: open
  api_key_file: key.txt
  speculative: {method: mtp, num_speculative_tokens: 2}
  args: [--reasoning-parser, glm45, 5]
  env: {NCCL_DEBUG: INFO, EXL3_MOE_ROW_TILE: 0}
exl3: {tier: auto, prefill_reconstruct_m: 128, graph_decode: true}
""",
    """\
recipe: 1
extends: demo
name: small
purpose: 'a base and three changes'
serve:
  port: 9000
  args: ['--x', "y\\tz"]
probe:
  prompt: >-
    two lines
    of text
  max_tokens: 8
""",
]
FRAGMENTS = [
    *("\t", "\r", "\0", "\x1b[31m", "\ufeff", "\u200b", "\x85", "é", "名", "\U0001f600"),
    *(
        "'",
        '"',
        "\\",
        "{",
        "}",
        "[",
        "]",
        ":",
        ": ",
        "-",
        "- ",
        "#",
        " #",
        "&a ",
        "*a",
        "!!int ",
        "!x ",
        "<<: ",
        "? ",
        "|",
        ">",
    ),
    *(
        "%YAML 1.2\n",
        "---\n",
        "...\n",
        "@",
        "`",
        "~",
        "null",
        "off",
        "yes",
        "1e999",
        "-0",
        "010",
        "0x1F",
        ".nan",
        "9" * 5000,
    ),
    *(
        "[" * 50,
        "{a: " * 50,
        '"\\ud800"',
        '"\\U00110000"',
        "extends: ./r.yaml\n",
        "extends: demo\n",
        "2026-11-29",
        "12:30:45",
    ),
]
VALUES = [
    None,
    True,
    False,
    0,
    -1,
    10**30,
    0.5,
    float("inf"),
    "",
    "off",
    "x" * 300,
    [],
    {},
    [[]],
    {"a": {"b": []}},
    "\t",
    "1",
]

Mutation = Callable[[random.Random, str], str]


def lines_of(rng: random.Random, text: str) -> str:
    """Delete, repeat, swap, indent or outdent a line."""
    lines = text.split("\n")
    at, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    match rng.randrange(5):
        case 0:
            del lines[at]
        case 1:
            lines.insert(other, lines[at])
        case 2:
            lines[at], lines[other] = lines[other], lines[at]
        case 3:
            lines[at] = rng.choice([" ", "  ", "\t", "    "]) + lines[at]
        case 4:
            lines[at] = lines[at].removeprefix("  ")
    return "\n".join(lines)


def characters(rng: random.Random, text: str) -> str:
    """Insert a fragment, delete a stretch, or replace a character."""
    at = rng.randrange(len(text) + 1)
    match rng.randrange(3):
        case 0:
            return text[:at] + rng.choice(FRAGMENTS) + text[at:]
        case 1:
            return text[:at] + text[at + rng.randrange(1, 12) :]
        case _:
            return text[:at] + chr(rng.choice([rng.randrange(0x80), rng.randrange(0xD800)])) + text[at + 1 :]


def words(rng: random.Random, text: str) -> str:
    """Rename, misspell or exchange a word."""
    found = list(re.finditer(r"[\w.+-]+", text))
    if not found:
        return text
    one, other = rng.choice(found), rng.choice(found)
    spelled = list(one[0])
    rng.shuffle(spelled)
    return text[: one.start()] + rng.choice([other[0], "".join(spelled), one[0] * 2, one[0][:-1]]) + text[one.end() :]


def cut(rng: random.Random, text: str) -> str:
    """Stop in the middle, or continue with the middle of another recipe."""
    other = rng.choice(SEEDS)
    return text[: rng.randrange(len(text) + 1)] + rng.choice(["", other[rng.randrange(len(other)) :]])


def structure(rng: random.Random, text: str) -> str:
    """Replace a value, drop a key, or move a section, and write the recipe anew."""
    try:
        data = yaml.load(text, Loader=LOADER)
    except Exception:  # an earlier mutation left no YAML
        return text
    if not isinstance(data, dict) or not data:
        return text
    owner = data
    while (below := [v for v in owner.values() if isinstance(v, dict) and v]) and rng.random() < 0.6:
        owner = rng.choice(below)
    key = rng.choice(list(owner))
    match rng.randrange(4):
        case 0:
            owner[key] = rng.choice(VALUES)
        case 1:
            del owner[key]
        case 2:
            owner[rng.choice([str(key) + "s", str(key).upper(), 1, True, None])] = owner.pop(key)
        case 3:
            data[key] = owner[key]
    try:
        return yaml.safe_dump(
            data, sort_keys=False, allow_unicode=True, default_flow_style=rng.choice([None, False, True])
        )
    except Exception:  # keys of mixed types and the like
        return text


def mutants(count: int, seed: int) -> list[bytes]:
    rng = random.Random(seed)
    mutations: list[Mutation] = [lines_of, characters, words, cut, structure]
    made = []
    for _ in range(count):
        text = rng.choices(SEEDS, weights=[4, 4, 1])[0]
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            text = rng.choice(mutations)(rng, text)
        data = text.encode(errors="surrogatepass")
        if rng.random() < 0.03:
            at = rng.randrange(len(data) + 1)
            data = data[:at] + bytes([rng.randrange(128, 256)]) + data[at:]
        made.append(data)
    return made


def verdict(data: bytes, path: Path) -> str:
    """'valid' or 'refused'; AssertionError for a refusal that does not say where and what."""
    try:
        recipes.load_text(data, path)
    except KitError as error:
        assert error.code is ExitCode.USAGE
        assert isinstance(error, RecipeError), f"no place: {error}"
        for fault in error.faults:
            assert fault.place.line >= 1 and fault.place.column >= 1
            assert fault.what and str(fault).isprintable(), repr(str(fault))
            assert len(str(fault)) < 1000
        return "refused"
    return "valid"


def test_mutated_recipes_load_or_are_refused_with_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given 10,000 seeded mutants, when each is loaded, then it is valid or refused with exit 2 and places."""
    monkeypatch.chdir(tmp_path)
    path = Path("r.yaml")
    counts = {"valid": 0, "refused": 0}
    for number, data in enumerate(mutants(COUNT, SEED)):
        try:
            counts[verdict(data, path)] += 1
        except Exception as error:
            kept = Path(tempfile.gettempdir()) / f"mutant-{SEED}-{number}.yaml"
            kept.write_bytes(data)
            raise AssertionError(f"mutant {number}, kept as {kept}: {type(error).__name__}: {error}") from error
    # Both outcomes are exercised: a mutator that only broke the syntax would prove little.
    assert counts["valid"] > COUNT // 20 and counts["refused"] > COUNT // 2, counts


def test_mutants_through_the_command_line(tmp_path: Path) -> None:
    """Given mutants of each outcome, when the real program checks them, then it ends with 0 or 2 and no traceback."""
    files = []
    for number, data in enumerate(mutants(200, SEED + 1)):
        files.append(tmp_path / f"{number}.yaml")
        files[-1].write_bytes(data)
    kit = [sys.executable, "-m", "exl3kit.cli", "recipe", "check"]
    done = subprocess.run(
        [*kit, *map(str, files)], cwd=paths.REPO, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == ExitCode.USAGE
    assert "Traceback" not in done.stderr + done.stdout
    outcomes = re.findall(r"^(ok|invalid) ", done.stdout, flags=re.MULTILINE)
    assert len(outcomes) == len(files) and set(outcomes) == {"ok", "invalid"}
