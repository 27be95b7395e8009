"""The site is built strictly: links, anchors and nav hold there too, and no page loads anything from elsewhere."""

from __future__ import annotations

import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from docs_blocks import REPO

LOADING = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("link", "href"), ("use", "href")}
NOT_LOADED = ("canonical", "next", "prev", "alternate")  # kinds of `link` that a browser does not fetch


class Loaded(HTMLParser):
    """What a browser fetches to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if tag == "link" and named.get("rel") in NOT_LOADED:
            return
        self.found += [value for name, value in attrs if (tag, name) in LOADING and value]


@pytest.fixture(scope="module")
def site() -> Path:
    done = subprocess.run([REPO / "scripts" / "docs"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return REPO / "build" / "site"


def test_every_page_is_in_the_site_and_loads_nothing_from_elsewhere(site: Path) -> None:
    html = {path.relative_to(site).as_posix(): path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    assert {"index.html", "trouble.html", "reference/cli.html", "CONTRIBUTING.html", "recipes/glm-4.5-air.html"} <= set(
        html
    )
    for name, text in html.items():
        parser = Loaded()
        parser.feed(text)
        assert parser.found, name
        elsewhere = [url for url in parser.found if re.match(r"(https?:)?//", url)]
        assert not elsewhere, f"{name}: {elsewhere}"
    styles = [path for path in site.rglob("*.css") if re.search(r"url\((['\"]?)(https?:)?//", path.read_text())]
    assert styles == []


def test_links_between_pages_of_the_root_and_of_docs_are_links_of_the_site(site: Path) -> None:
    """Given pages that lie outside of docs/, then links to them and from them lead to pages of the site."""
    assert 'href="docs/report.html' not in (site / "CONTRIBUTING.html").read_text()
    assert 'href="report.html"' in (site / "CONTRIBUTING.html").read_text()
    assert 'href="SECURITY.html"' in (site / "security.html").read_text()
    assert "README.md#" not in (site / "two-sparks.html").read_text()
