"""Each class of mistake in a recipe is refused at the exact line and column, in one sentence, with all others."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from exl3kit import recipes
from exl3kit.errors import ExitCode, KitError
from exl3kit.faults import RecipeError

# A whole recipe without a GPU; tests put mistakes into copies of it.
GOOD = """\
recipe: 1
name: good
model: {path: .}
image:
  base: {rootfs: bookworm}
  vllm: 0.32.0+cpu
"""
# The same for a GPU.
GPU = """\
recipe: 1
name: good
model: {path: .}
image: {base: "vllm/vllm-openai:v0.33.0", vllm: 0.33.0, arch: ["12.1"], rates: [4], codebooks: [mcg]}
"""
MARK = "§"  # stands in a text before the character that a fault must point at


def write(directory: Path, text: str, name: str = "r.yaml") -> Path:
    path = directory / name
    path.write_text(text, encoding="utf-8", newline="")
    return path


def marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without marks, and the (line, column) of each mark."""
    places, lines = [], []
    for number, line in enumerate(text.split("\n"), 1):
        while MARK in line:
            places.append((number, line.index(MARK) + 1))
            line = line.replace(MARK, "", 1)
        lines.append(line)
    return "\n".join(lines), places


def faults_of(path: Path, *sets: str) -> list[tuple[int, int, str]]:
    with pytest.raises(RecipeError) as caught:
        recipes.load(str(path), sets)
    assert caught.value.code is ExitCode.USAGE
    return [(f.place.line, f.place.column, f"{f.what} ({f.hint})") for f in caught.value.faults]


BROKEN = {
    # Misspelt, misplaced, missing and repeated keys.
    "unknown key": (GOOD + "§modle: {}\n", ["unknown key modle (did you mean model?)"]),
    "unknown key in a section": (GOOD + "serve: {§prot: 9000}\n", ["unknown key serve.prot (did you mean port?)"]),
    "key of another section": (
        GOOD + "serve: {§tensor: 2}\n",
        ["unknown key serve.tensor (it belongs under parallel:)"],
    ),
    "unknown key near nothing": (GOOD + "probe: {§zzz: 2}\n", ["(known keys: prompt, max_tokens)"]),
    "unknown key in the base": (GOOD.replace("{rootfs:", "{§suite: x, rootfs:"), ["unknown key image.base.suite"]),
    "missing key": ("§recipe: 1\nname: x\nmodel: {path: .}\n", ["the key image is missing"]),
    "missing key in a section": (
        "recipe: 1\nname: x\nmodel: {path: .}\n§image: {base: {rootfs: bookworm}}\n",
        ["the key image.vllm is missing (A release of vLLM"],
    ),
    "duplicate key": (GOOD + "§name: again\n", ["the key name is given twice, first at line 2, column 1"]),
    "duplicate key in a section": (
        GOOD + "serve: {port: 8000, §port: 8001}\n",
        ["the key port is given twice, first at line 7, column 9"],
    ),
    "key that is no word": (GOOD + "§1: x\n", ["expected a word as key, found 1"]),
    "key that is a boolean": (GOOD + "§on: x\n", ["expected a word as key, found on"]),
    "key that is null": (GOOD + "§~: x\n", ["expected a word as key, found ~"]),
    "key that is a list": (GOOD + "? §[a]\n: x\n", ["expected a word as key, found a mapping or a list"]),
    # Types.
    "boolean where an enum is meant": (
        GOOD + "exl3: {tier: §off}\n",
        [
            "exl3.tier: expected one of auto, none, legacy",
            "found the boolean off (off is a boolean in YAML: write none)",
        ],
    ),
    "boolean with no enum counterpart": (GOOD + "fabric: {require: §yes}\n", ["(yes is a boolean in YAML)"]),
    "misspelt choice": (GOOD + "exl3: {tier: §kernal}\n", ['found the text "kernal" (did you mean kernel?)']),
    "text where a number is meant": (
        GOOD + "serve: {port: §'80'}\n",
        ["serve.port: expected a whole number, found the te"],
    ),
    "number with two meanings": (
        GOOD + "serve: {port: §010000}\n",
        ['expected a whole number, found the text "010000"'],
    ),
    "fraction where a whole number is meant": (
        GOOD + "parallel: {nodes: §1.5}\n",
        ["a whole number, found the number 1.5"],
    ),
    "boolean where a number is meant": (
        GOOD + "parallel: {nodes: §true}\n",
        ["a whole number, found the boolean true"],
    ),
    "text where a boolean is meant": (GOOD + "exl3: {graph_decode: §'on'}\n", ["true or false, found the text"]),
    "number where a version is meant": (GOOD.replace("0.32.0+cpu", "§0.32"), ['(put it in quotes: "0.32")']),
    "number where a capability is meant": (GPU.replace('"12.1"', "§12.1"), ["image.arch[0]: expected text", '"12.1"']),
    "nothing where a mapping is meant": (
        GOOD + "serve:§\n",
        ["serve: expected a mapping (key: value), found nothing"],
    ),
    "list where a mapping is meant": (GOOD + "probe: §[a]\n", ["probe: expected a mapping (key: value), found a list"]),
    "mapping where text is meant": (GOOD.replace("good", "§{a: b}"), ["name: expected text, found a mapping"]),
    "text where a list is meant": (GOOD + "serve: {args: §--x}\n", ["serve.args: expected a list, found the text"]),
    "null where a choice is meant": (GOOD + "exl3: {tier: §null}\n", ["exl3.tier: expected one of", "found null"]),
    "schema that only equals 1": (GOOD.replace("recipe: 1", "recipe: §true"), ["expected 1, found the boolean true"]),
    "another schema": (GOOD.replace("recipe: 1", "recipe: §2"), ["recipe: expected 1, found the number 2"]),
    # Values.
    "name": (GOOD.replace("good", "§Good"), ["name: expected at most 63 lower-case"]),
    "port too low": (GOOD + "serve: {port: §80}\n", ["serve.port: expected at least 1024, found the number 80"]),
    "port too high": (GOOD + "serve: {port: §65536}\n", ["serve.port: expected at most 65535"]),
    "huge number": (GOOD + f"serve: {{port: §{'9' * 5000}}}\n", ["serve.port: expected a whole number", "999…"]),
    "share of memory": (GOOD + "serve: {gpu_memory_utilization: §1.5}\n", ["expected at most 1, found the number 1.5"]),
    "infinite share": (GOOD + "serve: {gpu_memory_utilization: §1e999}\n", ["gpu_memory_utilization: expected"]),
    "size without a unit": (
        GOOD + "serve: {kv_cache_memory: §64}\n",
        ["a size such as 64MiB or 2GiB, found the number 64"],
    ),
    "size in another unit": (GOOD + "serve: {kv_cache_memory: §64MB}\n", ["a size such as 64MiB", '"64MB"']),
    "rate": (
        GPU.replace("[4]", "[4, §4.5]"),
        ["image.rates[1]: expected one of 1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8"],
    ),
    "codebook": (GPU.replace("[mcg]", "[§mcq]"), ["expected one of 3inst, mcg, mul1", "(did you mean mcg?)"]),
    "capability": (GPU.replace('"12.1"', "§sm_121"), ['a compute capability such as "12.0"']),
    "the same rate twice": (
        GPU.replace("[4]", "§[4, 4.0]"),
        ["image.rates: expected each entry once", "remove the second 4"],
    ),
    "reference without a tag": (GPU.replace('"vllm/vllm-openai:v0.33.0"', "§vllm/vllm-openai"), ["an image reference"]),
    "short digest": (GPU.replace(':v0.33.0"', '@sha256:12"').replace('"vllm/', '§"vllm/'), ["an image reference"]),
    "version": (GOOD.replace("0.32.0+cpu", "§0.32+cpu"), ["a release of vLLM such as 0.33.0 or 0.32.0+cpu"]),
    "platform": (GOOD + "  platform: §linux/arm\n", ["image.platform: expected one of linux/amd64, linux/arm64"]),
    "rows": (GOOD + "exl3: {prefill_reconstruct_m: §-1}\n", ["expected auto, or a number of rows"]),
    "blank prompt": (GOOD + "probe: {prompt: §' '}\n", ["a prompt that is not blank"]),
    "path that is no text": (GOOD.replace("path: .", "path: §3"), ["model.path: expected a path, found the number 3"]),
    # Keys that exclude or need each other.
    "no weights": (
        "recipe: 1\nname: x\n§model: {}\nimage: {base: {rootfs: bookworm}, vllm: 0.33.0}\n",
        ["either repo and"],
    ),
    "two sources of weights": (
        GOOD.replace("path: .", f"repo: a/b, revision: {'0123456789' * 4}, path: §."),
        ["both repo and path are given"],
    ),
    "branch instead of a commit": (
        GOOD.replace("path: .", "repo: a/b, revision: §main"),
        ["a commit of 40 hex digits"],
    ),
    "commit of a path": (GOOD.replace("path: .", f"path: ., revision: §'{'0' * 40}'"), ["revision belongs to repo"]),
    "ranks over nodes": (
        GOOD + "parallel: {nodes: §3, tensor: 2, pipeline: 2}\n",
        ["= 4 ranks do not divide over 3 nodes"],
    ),
    "experts over one rank": (GOOD + "parallel: {expert: §true}\n", ["experts spread over the tensor ranks"]),
    "open without a key": (GOOD + "serve: {listen: §open}\n", ["an open API needs a key (set api_key_file"]),
    "fewer tokens than requests": (
        GOOD + "serve: {max_num_seqs: 4, max_num_batched_tokens: §2}\n",
        ["max_num_batched_tokens 2 is less than max_num_seqs 4"],
    ),
    "two sizes of the cache": (
        GOOD + "serve: {gpu_memory_utilization: 0.5, kv_cache_memory: §64MiB}\n",
        ["kv_cache_memory replaces gpu_memory_utilization"],
    ),
    "GPU code without a GPU": (GOOD + '  arch: §["12.0"]\n', ["a +cpu image compiles no GPU code (write arch: []"]),
    "arch without rates": (
        GPU.replace(", rates: [4]", "").replace("image:", "§image:"),
        ["arch is given without rates"],
    ),
    "codebooks without arch": (GOOD + "  codebooks: §[mcg]\n", ["codebooks are compiled in only for an arch"]),
    "RDMA without a GPU": (GOOD + "fabric: {require: §rdma}\n", ["a +cpu image talks over TCP only"]),
    "graphs without graphs": (
        GPU + "exl3: {graph_decode: §true}\nserve: {enforce_eager: true}\n",
        ["serve.enforce_eager turns them off (remove it)"],
    ),
    "graphs without a GPU": (GOOD + "exl3: {graph_decode: §true}\n", ["a +cpu image has none"]),
    "probe longer than the model": (
        GOOD + "serve: {max_model_len: 8}\nprobe: {max_tokens: §8}\n",
        ["8 tokens and the prompt do not fit into serve.max_model_len 8"],
    ),
    "tier without symbols": (
        "recipe: 1\nname: x\nmodel: {path: .}\nimage: {base: a:b, vllm: 0.33.0}\nexl3: {tier: §grouped}\n",
        ["tier grouped needs the fat symbols, and image.arch compiles none"],
    ),
    # Arguments and environment that the kit owns.
    "argument with a key": (
        GOOD + "serve: {args: [§--max-model-len, 4]}\n",
        ["(set serve.max_model_len and remove it"],
    ),
    "argument with a value": (
        GOOD + "serve: {args: [§--api-key=x]}\n",
        ["--api-key is not for args (set serve.api_key_file"],
    ),
    "argument with underscores": (GOOD + "serve: {args: [§--tensor_parallel_size, 2]}\n", ["set parallel.tensor"]),
    "shortened argument": (GOOD + "serve: {args: [§--max-num-b, 2]}\n", ["set serve.max_num_batched_tokens"]),
    "argument of many gangs": (GOOD + "serve: {args: [§--data-parallel-rank, 2]}\n", ["one gang per recipe"]),
    "end of the options": (GOOD + "serve: {args: [§--]}\n", ["would no longer be read as options"]),
    "argument that hides the API": (GOOD + "serve: {args: [§--uds=/x]}\n", ["the kit probes the API on serve.port"]),
    "second name of an argument": (
        GOOD + "serve: {args: [§--device-memory-utilization, '0.9', §--spec-method=x]}\n",
        ["set serve.gpu_memory_utilization", "set serve.speculative"],
    ),
    "argument that is a secret": (GOOD + "serve: {args: [§--hf-token=x]}\n", ["a secret in a recipe"]),
    "argument after which vLLM ends": (GOOD + "serve: {args: [§--help=all, §-h]}\n", ["nothing would serve"]),
    "random weights": (
        GOOD + "serve: {args: [§--load-format, dummy, §--load_format=dummy]}\n",
        ["serves random weights"],
    ),
    "option and value in one entry": (
        GOOD + "serve: {args: [§'--reasoning-parser glm45']}\n",
        ["(write two entries: --reasoning-parser, glm45)"],
    ),
    "value without an option": (GOOD + "serve: {args: [§––port, 1]}\n", ["expected an option first"]),
    "short argument with its value": (GOOD + "serve: {args: [§-n2, §-dpr, 1]}\n", ["vLLM reads -n2 as --nnodes"]),
    "argument of three letters": (GOOD + "serve: {args: [§--por=1]}\n", ["set serve.port"]),
    "argument of two letters": (GOOD + "serve: {args: [§--ho=x]}\n", ["set serve.listen"]),
    "short argument": (GOOD + "serve: {args: [§-tp, 2]}\n", ["-tp is not for args (set parallel.tensor"]),
    "negated argument": (GOOD + "serve: {args: [§--no-enforce-eager]}\n", ["set serve.enforce_eager"]),
    "argument with a field": (GOOD + "serve: {args: [§--speculative-config.method, x]}\n", ["set serve.speculative"]),
    "argument of the gang": (GOOD + "serve: {args: [--x, §--node-rank, 1]}\n", ["the kit gives each rank its place"]),
    "argument that is a boolean": (GOOD + "serve: {args: [--x, §true]}\n", ["serve.args[1]: expected text", '"true"']),
    "environment of the kit": (GOOD + "serve: {env: {VLLM_HOST_IP: §x}}\n", ["the kit sets it for each rank"]),
    "secret": (GOOD + "serve: {env: {HF_TOKEN: §x}}\n", ["a secret in a recipe ends up in git, logs and images"]),
    "secret of another service": (GOOD + "serve: {env: {AWS_SECRET_ACCESS_KEY: §x, hf_token: §x}}\n", ["a secret in"]),
    "library put before the image's": (GOOD + "serve: {env: {LD_AUDIT: §/x}}\n", ["it belongs to the image"]),
    "setting with a key": (GOOD + "serve: {env: {EXL3_TIER: §x}}\n", ["not for a recipe (set exl3.tier)"]),
    "name in lower case": (GOOD + "serve: {env: {nccl_ib_hca: §x}}\n", ["did you mean NCCL_IB_HCA?"]),
    "foreign extension": (
        GOOD + "serve: {env: {VLLM_EXL3_EXT_PATH: §/x}}\n",
        ["VLLM_EXL3_EXT_PATH is not for a recipe (no foreign extension is loaded"],
    ),
    "flag that is neither on nor off": (
        GOOD + "serve: {env: {EXL3_FAT_KERNEL: §'off'}}\n",
        ["expected 0, 1, true or false"],
    ),
    "flag that is empty": (GOOD + "serve: {env: {EXL3_FAT_KERNEL: §''}}\n", ['0, 1, true or false, found ""']),
    "flag that is a boolean": (GOOD + "serve: {env: {EXL3_FAT_SORTED: §off}}\n", ['(write "0" or "1")']),
    "misspelt flag": (GOOD + "serve: {env: {EXL3_FAT_KERNAL: §1}}\n", ["(did you mean EXL3_FAT_KERNEL?)"]),
    "row tile": (GOOD + "serve: {env: {EXL3_MOE_ROW_TILE: §x}}\n", ["expected a number of rows"]),
    "name that no process can have": (GOOD + "serve: {env: {A-B: §x}}\n", ["a name of letters, digits"]),
    "value of two lines": (GOOD + 'serve: {env: {X: §"a\\nb"}}\n', ["serve.env.X: expected a value of one line"]),
    "two doors to the tier": (
        GOOD + "exl3: {tier: sorted}\nserve: {env: {EXL3_FAT_SORTED: §1}}\n",
        ["EXL3_FAT_SORTED and exl3.tier say the same thing"],
    ),
    # YAML itself.
    "tab as indentation": (GOOD + "serve:\n§\tport: 8000\n", ["expected spaces as indentation, found a tab"]),
    "tab after spaces": (GOOD + "serve:\n  §\tport: 8000\n", ["expected spaces as indentation, found a tab"]),
    "tab after a colon": (GOOD + "probe:§\t{}\n", ["not YAML", "(replace the tab by a space)"]),
    "invisible character": (
        GOOD + "serve: {§\u200bport: 8000}\n",
        ["the invisible character U+200B (zero width space)"],
    ),
    "non-breaking space": (GOOD + "serve:\n§\u00a0 port: 8000\n", ["the invisible character U+00A0 (no-break space)"]),
    "NUL": (GOOD + "probe: {prompt: a§\0b}\n", ["the invisible character U+0000"]),
    "line separator": (GOOD + "probe: {prompt: a§\u2028b}\n", ["the invisible character U+2028"]),
    "lone carriage return": (GOOD + "probe: {prompt: a§\rb}\n", ["the invisible character U+000D"]),
    "anchor and alias": (
        GOOD + "serve: §&s {port: 8000}\nprobe: §*s\n",
        ["found the anchor &s (recipes share values through extends: only)", "found the alias *s"],
    ),
    "merge key": (GOOD + "serve: {§<<: {port: 8000}}\n", ["found the merge key <<"]),
    "tag": (GOOD + "serve: §!!python/object/apply:os.system {}\n", ["found the tag tag:yaml.org,2002:python/object"]),
    "second document": (GOOD + "§---\nname: x\n", ["found a second document (one recipe per file: remove the ---)"]),
    "deep nesting": (GOOD + "probe: " + "[" * 16 + "§[" + "[" * 4000, ["found more than 16 levels of nesting"]),
    "unclosed quote": (GOOD + 'probe: {prompt: §"2+2=}\nserve: {}\n', ["the quote that opens here is never closed"]),
    "unclosed bracket": (
        GOOD + "probe: {prompt: x§",
        ["not YAML: while parsing a flow mapping", "closing bracket missing?"],
    ),
    "colon in text": (GOOD + "purpose: tiny§: a demo\n", ["mapping values are not allowed", "in quotes"]),
    "line without a colon": (GOOD + "§serve\nprobe: {}\n", ["(each line of a mapping is 'key: value')"]),
    "indentation that fits nothing": (
        GOOD + "serve:\n    port: 8000\n  §listen: loopback\n",
        ["indentation fits no line"],
    ),
    "reserved character": (GOOD + "probe: {prompt: §@x}\n", ["that cannot start any token (put the text in quotes)"]),
    "escape that is no character": (GOOD + 'probe: {§prompt: "\\U00110000"}\n', ["an escape that is no character"]),
    "half a surrogate pair": (GOOD + 'probe: {prompt: §"\\ud800"}\n', ["found half a surrogate pair"]),
    "not a mapping": ("§- recipe: 1\n", ["expected a mapping (key: value), found a list"]),
    "a single word": ("§hello\n", ['expected a mapping (key: value), found the text "hello"']),
    "empty": ("§", ["the recipe is empty"]),
    "only a comment": ("§# nothing\n", ["the recipe is empty"]),
    "only null": ("§~\n", ["the recipe is empty"]),
}


@pytest.mark.parametrize("case", BROKEN)
def test_fault_is_located_and_named(case: str, tmp_path: Path) -> None:
    """Given one mistake, when the recipe is loaded, then the fault stands where the mark is and says what to do."""
    marked, expected = BROKEN[case]
    text, places = marks(marked)

    faults = faults_of(write(tmp_path, text))

    if case == "lone carriage return":  # counted as a character of its line, which editors may show as two
        places = [(7, 18)]
    assert [(line, column) for line, column, _ in faults] == places
    said = "\n".join(sentence for _, _, sentence in faults)
    for fragment in expected:
        assert fragment in said


def test_arguments_that_are_the_recipes_own_business_pass(tmp_path: Path) -> None:
    """Given arguments that only look like the kit's, or values with dashes, when loaded, then they pass unchanged."""
    args = [
        "--reasoning-parser",
        "glm45",
        "--max-logprobs",
        "5",
        "--model-impl",
        "vllm",
        "--master",
        "-1",
        "-",
        "",
    ]
    args += ["--kv-cache-dtype-skip-layers", "0", '--hf-overrides={"a": "--port"}', "a b", "--port-is-not-a-flag"]
    recipe = recipes.load(str(write(tmp_path, GOOD + f"serve: {{args: {json.dumps(args)}}}\n")))
    assert recipe.serve.args == args


@pytest.mark.parametrize("name", ["NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "NCCL_IB_GID_INDEX", "GLOO_SOCKET_IFNAME"])
def test_a_name_of_the_fabric_is_the_recipes_to_set(name: str, tmp_path: Path) -> None:
    recipe = recipes.load(str(write(tmp_path, GOOD + f"serve: {{env: {{{name}: 3}}}}\n")))
    assert recipe.serve.env == {name: "3"}


@pytest.mark.parametrize("text", [GOOD, GPU])
def test_the_recipes_that_mistakes_are_put_into_are_good(text: str, tmp_path: Path) -> None:
    assert recipes.load(str(write(tmp_path, text))).name == "good"


def test_all_faults_come_at_once_and_in_the_order_of_the_file(tmp_path: Path) -> None:
    """Given five mistakes of different kinds, when loaded once, then five faults are reported, sorted by line."""
    marked = """\
recipe: 1
name: good
§modle: {}
model: {path: .}
image: {base: {rootfs: bookworm}, vllm: §0.32}
serve:
  port: §80
  §port: 8000
  env: {EXL3_FAT_KERNAL: §1}
exl3: {tier: §off}
"""
    text, places = marks(marked)
    assert [(line, column) for line, column, _ in faults_of(write(tmp_path, text))] == places


def test_every_fault_is_one_line_with_file_line_and_column(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + "modle: {}\nprobe: {prompt: 3.5}\n")
    with pytest.raises(RecipeError) as caught:
        recipes.load(str(path))
    head, *lines = str(caught.value).splitlines()
    assert head == "2 faults in the recipe"
    for line, number in zip(lines, (7, 8), strict=True):
        assert line.strip().startswith(f"{path}:{number}:")


def test_a_file_full_of_faults_is_cut_short(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        recipes.load(str(write(tmp_path, GOOD + "".join(f"key{number}: 1\n" for number in range(70)))))
    head, *lines = str(caught.value).splitlines()
    assert (head, len(lines), lines[-1].strip()) == ("70 faults in the recipe", 51, "… and 20 more")


@pytest.mark.parametrize(
    ("data", "line", "column", "said"),
    [
        (GOOD.encode() + b"purpose: caf\xe9\n", 7, 13, "expected UTF-8, found the byte 0xe9"),
        ("\ufeff".encode("utf-16-le") + GOOD.encode("utf-16-le"), 1, 1, "expected UTF-8, found UTF-16"),
        (b"# " + b"x" * (256 << 10), 1, 1, "expected a recipe of at most 256 KiB, found more"),
        (b"\x93NUMPY\x01\x00v\x00{", 1, 1, "expected UTF-8, found the byte 0x93"),
        (
            b"a: &a [x]\n" + b"".join(b"%c: &%c [*%c,*%c]\n" % (c, c, c - 1, c - 1) for c in b"bcdefgh"),
            1,
            4,
            "anchor &a",
        ),
    ],
)
def test_bytes_that_are_no_recipe(data: bytes, line: int, column: int, said: str, tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(data)
    faults = faults_of(path)
    assert (line, column) in [fault[:2] for fault in faults]
    assert any(said in fault[2] for fault in faults)


@pytest.mark.parametrize("prefix", [b"", b"\xef\xbb\xbf"])
def test_windows_line_ends_and_byte_order_mark_change_neither_meaning_nor_place(prefix: bytes, tmp_path: Path) -> None:
    """Given a recipe saved by a Windows editor, when loaded, then meaning and places are as without."""
    path = tmp_path / "r.yaml"
    path.write_bytes(prefix + GOOD.replace("\n", "\r\n").encode())
    assert recipes.load(str(path)) == recipes.load(str(write(tmp_path, GOOD, "unix.yaml")))
    path.write_bytes(prefix + (GOOD + "serve: {prot: 1}\n").replace("\n", "\r\n").encode())
    assert faults_of(path)[0][:2] == (7, 9)
    path.write_bytes(prefix + GOOD.replace("recipe", "recipes", 1).encode())
    assert (1, 1) in [fault[:2] for fault in faults_of(path)]


def test_a_recipe_may_come_through_a_pipe_but_nobody_waits_for_one_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a pipe, when its writer is late, then the recipe is read; when there is none, then that is said."""
    pipe = tmp_path / "r.yaml"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: (time.sleep(0.2), pipe.write_text(GOOD)))
    writer.start()
    assert recipes.load(str(pipe)).name == "good"
    writer.join()
    monkeypatch.setattr(recipes, "PATIENCE_S", 0.1)
    with pytest.raises(KitError, match=r"nothing came out of this pipe"):
        recipes.load(str(pipe))


def test_a_source_without_end_is_cut() -> None:
    with pytest.raises(RecipeError, match="expected a recipe of at most 256 KiB"):
        recipes.load("/dev/zero")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """Given a missing file, a directory, a bare wrong name and a NUL, then each is one sentence with a way out."""
    (tmp_path / "mine-tp2.yaml").write_text(GOOD)
    for ref, said, way_out in [
        (str(tmp_path / "demo-tp3.yaml"), "there is no such recipe", "did you mean demo-tp2?"),
        (str(tmp_path / "mine-pt2.yml"), "there is no such recipe", "did you mean mine-tp2.yaml?"),
        (
            str(tmp_path / "zzzzzz.yaml"),
            "there is no such recipe",
            f"nothing of that name is in {tmp_path}; `kit recipe",
        ),
        (str(tmp_path / "no" / "zzzzzz.yaml"), "there is no such recipe", f"{tmp_path}/no; `kit recipe list` has"),
        (str(tmp_path) + "/", "expected a recipe, found a directory", "name a .yaml file"),
        ("dmeo", "no shipped recipe is called 'dmeo'", "did you mean demo?"),
        ("zzzzzz", "no shipped recipe is called 'zzzzzz'", "shipped recipes: demo, demo-moe"),
        ("a\0/b.yaml", "expected the name of a recipe or a path", "shipped recipes"),
        ("", "expected the name of a recipe or a path", "shipped recipes"),
        ("x" * 5000 + ".yaml", "the recipe cannot be read", ""),
    ]:
        with pytest.raises(KitError) as caught:
            recipes.load(ref)
        assert caught.value.code is ExitCode.USAGE
        assert said in caught.value.what
        assert way_out in (caught.value.next_step or "")
