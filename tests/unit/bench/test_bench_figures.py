"""Figures in documents: drawn from receipts, and a document that says otherwise fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from exl3kit import paths
from exl3kit.bench import figures, records, selftest
from exl3kit.errors import KitError


def receipts(folder: Path, *, cached: int = 0) -> Path:
    """Five cold rows of a real vLLM, told of in a campaign's file."""
    folder.mkdir()
    row = selftest.recorded()["cold"]
    row["requests"][0]["usage"]["prompt_tokens_details"]["cached_tokens"] = cached
    head = {"record": "campaign", "schema": 1, "verb": "prefill", "kit": "0", "at": 1.8e9, "facts": {"model": "demo"}}
    lines = [head, *[{"record": "observation", "boot": 0, **row}] * 5]
    (folder / records.FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(paths, "REPO", tmp_path)
    receipts(tmp_path / "r")
    file = tmp_path / "page.md"
    file.write_text("# Speed\n\n<!-- figures: r -->\n| 255 | 1 |\n<!-- end of figures -->\nand more\n")
    return file


def test_a_figure_that_no_receipt_says_is_found_and_drawn_anew(document: Path) -> None:
    found = list(figures.stale([document]))
    error = figures.refusal(found)
    assert [(one.line, one.folder) for one in found] == [(3, "r")] and error is not None and error.code == 8
    assert figures.write([document]) == [document]
    text = document.read_text()
    assert list(figures.stale([document])) == [] and figures.refusal([]) is None
    assert "| 255 | 5 |" in text and text.startswith("# Speed\n") and text.endswith("and more\n")


def test_one_changed_digit_is_found(document: Path) -> None:
    figures.write([document])
    document.write_text(document.read_text().replace("| 255 | 5 |", "| 255 | 6 |"))
    assert len(list(figures.stale([document]))) == 1


def test_receipts_that_prove_nothing_may_not_be_quoted(document: Path, tmp_path: Path) -> None:
    receipts(tmp_path / "hit", cached=128)
    document.write_text(document.read_text().replace("figures: r ", "figures: hit "))
    with pytest.raises(KitError, match="prove nothing"):
        list(figures.stale([document]))


def test_readme_and_docs_say_what_their_receipts_say() -> None:
    found = list(figures.stale(figures.documents()))
    assert found == []
