"""The pages hold: links, anchors, marks of blocks, verbs and options that exist, the generated reference, the nav."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import docs_blocks
import pytest
import typer
import yaml
from docs_blocks import REPO, Block

from exl3kit import cli
from exl3kit.errors import ExitCode

sys.path.insert(0, str(REPO / "scripts"))

ROOT: Any = typer.main.get_command(cli.app)
PROGRAMS = ("kit", "./kit.py")
# Only builds and tests set them.
NOT_FOR_USERS = {"EXL3_ARCH", "EXL3_RATES", "EXL3_CODEBOOKS", "EXL3_HOST", "EXL3_INT8_GEMV"}


def all_blocks() -> list[Block]:
    return [block for page in docs_blocks.pages() for block in docs_blocks.blocks(page)]


# ---- links -----------------------------------------------------------------------------------------------------------


def faults_of_links(page: str) -> Iterable[str]:
    folder = (REPO / page).parent
    for link in docs_blocks.links(page):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (folder / target).resolve() if target else REPO / page
        if not path.exists():
            yield f"{page}: {link} leads nowhere"
        elif anchor and anchor not in docs_blocks.anchors(path.relative_to(REPO).as_posix()):
            yield f"{page}: {link}: no such heading"


def test_links_lead_to_files_and_headings() -> None:
    """Given every page, then each link leads to a file of the repository, and each anchor to a heading there."""
    assert [fault for page in docs_blocks.pages() for fault in faults_of_links(page)] == []


def test_pages_that_the_code_names_exist() -> None:
    """Given sentences and comments of the code that name a page, then it is there."""
    folders = [REPO / name for name in ("exl3kit", "overlay", "scripts", "recipes", "compose", "tests")]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".j2", ".yaml", ".md")]
    named = {(name, path) for path in files for name in re.findall(r"\bdocs/[\w/.-]+\.md\b", path.read_text())}
    missing = [f"{path.relative_to(REPO)}: {name}" for name, path in named if not (REPO / name).exists()]
    assert [one for one in missing if "docs/new.md" not in one] == []


def test_every_page_has_its_place_in_the_nav() -> None:
    settings = yaml.safe_load((REPO / "mkdocs.yml").read_text())
    there = re.findall(r"[\w/.-]+\.md", str(settings["nav"]))
    pages = [page.removeprefix("docs/") for page in docs_blocks.pages() if page != "README.md"]
    assert sorted(there) == sorted(pages), "add new pages to `nav` in mkdocs.yml"


# ---- blocks ----------------------------------------------------------------------------------------------------------


def test_every_block_says_what_it_is_and_commands_are_sh() -> None:
    for block in all_blocks():
        assert block.info in docs_blocks.KINDS, f"{block.where}: ```{block.info}: one of {docs_blocks.KINDS}"
        commands = [line for line in block.text.splitlines() if re.match(r"(\./)?(kit(\.py)?|scripts/\S+) ", line)]
        assert block.info == "sh" or not commands, f"{block.where}: commands belong in ```sh"
        assert block.why is None or block.info == "sh", f"{block.where}: only blocks of commands are marked"
    for page in docs_blocks.pages():
        assert not re.search(r"^\n {4}\S", docs_blocks.prose(page), flags=re.MULTILINE), f"{page}: fence that block"
        marks = docs_blocks.prose(page).count("<!-- not run")
        assert marks == sum(block.why is not None for block in docs_blocks.blocks(page)), f"{page}: a mark is off"


def test_tests_that_marks_name_exist_and_what_is_run_all_the_same_is_there() -> None:
    """Given a block that is not run, then its reason names tests that exist, and its exceptions are lines of it."""
    for block in all_blocks():
        for test in re.findall(r"tests/[\w/]+\.py", block.why or ""):
            assert (REPO / test).is_file(), f"{block.where}: {test} is not there"
        for begin in block.but:
            assert any(line.startswith(begin) for line in block.text.splitlines()), f"{block.where}: no line: {begin}"


def test_tests_that_are_said_to_run_a_block_speak_its_verbs() -> None:
    """Given a mark that says that tests run the verbs of its block, then each verb is an argument in one of them."""
    claims = 0
    for block in all_blocks():
        said = re.search(r"((?:tests/[\w/]+\.py|, | and )+) runs? (?:it|these verbs|parity|bundles)\b", block.why or "")
        if said is None:
            continue
        text = "".join((REPO / test).read_text() for test in re.findall(r"tests/[\w/]+\.py", said[1]))
        for line in docs_blocks.logical_lines(block.text):
            for words in docs_blocks.commands(line):
                if words[0] in PROGRAMS and not line.startswith(block.but or ("nothing",)):
                    claims += 1
                    assert f'"{verb_of(words[1:])}"' in text, f"{block.where}: {line}: not in {said[1]}"
    assert claims > 30


def verb_of(words: list[str]) -> str:
    """The verb itself: `prefill` of `bench prefill demo`."""
    command, verb = ROOT, ""
    while hasattr(command, "commands") and words and words[0] in command.commands:
        command, verb, words = command.commands[words[0]], words[0], words[1:]
    return verb


def look_up(words: list[str]) -> str | None:
    """What is wrong with the words of a `kit` command by the command line itself; None when it would be taken."""
    command, rest = ROOT, words
    while hasattr(command, "commands"):
        if not rest or rest[0] in ("--help", "-h"):
            return None
        if rest[0] not in command.commands:
            return f"no verb {rest[0]}"
        command, rest = command.commands[rest[0]], rest[1:]
    if {"--help", "-h"} & set(rest):
        return None
    try:
        command.make_context(command.name, list(rest))
    except typer.TyperException as error:
        return str(error.format_message())
    return None


def test_commands_of_blocks_are_what_the_command_line_takes() -> None:
    """Given every command of every block, run or not, then its verb, options and arguments are taken as written."""
    seen = 0
    for block in all_blocks():
        for line in docs_blocks.logical_lines(block.text) if block.info == "sh" else ():
            for words in docs_blocks.commands(line):
                if words[0] in PROGRAMS:
                    seen += 1
                    fault = look_up(words[1:])
                    assert fault is None, f"{block.where}: {' '.join(words)}: {fault}"
                elif words[0].startswith("scripts/"):
                    seen += 1
                    assert options_are_known(words), f"{block.where}: {' '.join(words)}"
    assert seen > 100


def options_are_known(words: list[str]) -> bool:
    """Whether a script of the repository exists and its sources spell every option."""
    script = REPO / words[0]
    if not script.is_file():
        return False
    name = script.name.replace("-", "_")
    sources = [script, *script.parent.glob(f"{name}*.py"), *(script.parent / f"{name}_lib").glob("*.py")]
    sources += [*script.parent.glob("gpu_host/*.py")] if name == "gpu" else []
    text = "".join(path.read_text() for path in sources)
    return all(word.partition("=")[0] in text for word in words[1:] if word.startswith("--") and word != "--")


def test_commands_in_running_text_name_verbs_and_options_that_exist() -> None:
    for page in docs_blocks.pages():
        for code in docs_blocks.inline_commands(page):
            words = [word.strip("[]") for word in re.split(r"[\s|]+", code)[1:]]
            command = ROOT
            while hasattr(command, "commands") and words and re.fullmatch(r"[a-z-]+", words[0]):
                assert words[0] in command.commands, f"{page}: `{code}`: no verb {words[0]}"
                command, words = command.commands[words[0]], words[1:]
            known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
            options = {word.partition("=")[0] for word in words if word.startswith("-") and word.strip("-")}
            options = {option.rstrip(",;.") for option in options} - {"--help", "-h", "--install-completion"}
            assert options <= known, f"{page}: `{code}`: {sorted(options - known)}"


def test_a_wrong_verb_option_link_and_anchor_would_be_noticed(tmp_path: Path) -> None:
    assert look_up(["recipe", "shwo", "demo"]) and look_up(["up", "demo", "--jsn"]) and look_up(["up"])
    assert look_up(["up", "demo", "--nodes", "a,b"]) is None
    assert not options_are_known(["scripts/test", "--fulll"]) and options_are_known(["scripts/test", "--full"])
    assert docs_blocks.commands("A=b kit plan x > y  # no") == [["kit", "plan", "x"]]


def test_what_the_site_is_made_with_is_locked_and_no_part_of_the_kit() -> None:
    entries = re.split(r"\n(?=\S)", (REPO / "requirements-docs.lock").read_text())
    assert all("--hash=sha256:" in entry for entry in entries) and not any("://" in entry for entry in entries)
    assert any(entry.startswith("mkdocs-material==") for entry in entries)
    assert "mkdocs" not in (REPO / "requirements.lock").read_text() + (REPO / "requirements-dev.lock").read_text()


# ---- reference -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["recipe.md", "cli.md", "import.md"])
def test_the_generated_reference_is_up_to_date(name: str) -> None:
    """Given the models and the command line of today, then the committed page is what they make."""
    import docs_reference

    page = docs_reference.FOLDER / name
    assert page.read_text(encoding="utf-8") == docs_reference.pages()[name], f"run `{docs_reference.COMMAND}`, commit"


def test_exit_codes_are_all_on_their_page() -> None:
    rows = re.findall(r"^\| (\d+) \|", docs_blocks.read("docs/reference/exit-codes.md"), flags=re.MULTILINE)
    assert {int(code) for code in rows} == {int(code) for code in ExitCode} | {141}


def table_names(page: str) -> set[str]:
    """Names in backticks in the first column of a page's tables."""
    first = re.findall(r"^\| (`[^|]+) \|", docs_blocks.read(page), flags=re.MULTILINE)
    return {name for cell in first for name in re.findall(r"`([^`]+)`", cell)}


def test_environment_variables_are_all_on_their_page() -> None:
    """Given the names of ours that the kit and ranks spell, then the page has each, and no name that nobody spells."""
    sources = [REPO / "kit.py", *(REPO / "exl3kit").rglob("*.py"), *(REPO / "overlay" / "exl3_vllm").glob("*.py")]
    text = "\n".join(path.read_text() for path in sources)
    ours = set(re.findall(r"[\"\'](?:\$\{?)?((?:EXL3|EXL3KIT|VLLM_EXL3)_[A-Z][A-Z0-9_]*[A-Z0-9])[\"\']", text))
    settings = (REPO / "overlay" / "exl3_vllm" / "rank_settings.py").read_text()
    limits = {f"EXL3_{field.upper()}" for field in re.findall(r"^    (\w+_s): float = ", settings, flags=re.MULTILINE)}
    named = table_names("docs/reference/environment.md")
    assert {name for name in named if name not in text} <= limits
    assert (ours | limits) - named == NOT_FOR_USERS


def test_receipt_keys_are_all_on_their_page() -> None:
    """Given the schema of a receipt, and one that a real rank wrote, then the page has every key."""
    sys.path.insert(0, str(REPO / "overlay"))
    from exl3_vllm import diagnostics

    campaign = REPO / "docs" / "receipts" / "demo-tp2-prefill" / "campaign.jsonl"
    written = [receipt for line in campaign.read_text().splitlines() for receipt in receipts_in(json.loads(line))]
    keys = {key for receipt in written for key in receipt}
    assert written and set(diagnostics.EXL3_FAT_DIAG_KEYS) <= keys
    assert keys <= table_names("docs/reference/receipt.md")


def receipts_in(value: Any) -> Iterable[dict[str, Any]]:
    """Every receipt somewhere in a record of the bench."""
    if isinstance(value, dict) and {"fingerprint", "trellis_bytes"} <= value.keys():
        yield value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for one in inner:
        yield from receipts_in(one)


def test_sentences_that_the_trouble_page_quotes_are_spoken() -> None:
    """Given what docs/trouble.md says that the kit says, then its words stand in the sources, `…` being names."""
    sources = [*(REPO / "exl3kit").rglob("*.py"), *(REPO / "overlay").rglob("*.py")]
    text = " ".join("\n".join(path.read_text() for path in sources).split())
    rows = [line.split(" | ") for line in docs_blocks.read("docs/trouble.md").splitlines() if line.startswith("| ")]
    said = [quote for row in rows if len(row) == 3 for quote in re.findall(r"`([^`]+)`", row[1])]
    quotes = [quote for quote in said if " " in quote and not quote.startswith(("kit ", "require:", "--"))]
    assert len(quotes) > 20
    for quote in quotes:
        for words in re.split(r"\s*…\s*|[():]", quote):
            assert words.strip() in text, f"nothing says {words!r} of {quote!r}"
