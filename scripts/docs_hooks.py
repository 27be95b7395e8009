"""mkdocs: the pages that lie at the root of the repository, where git hosts look for them, are pages of the site too.

Links are written so that they work on a git host; here those that lead from `docs/` to the root and back are turned
into links between pages of the site. A link to a file that is no page (a source, a licence) becomes its plain name.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
ROOT_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s:]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the root beside those of `docs/`."""
    from mkdocs.structure.files import File

    for name in ROOT_PAGES:
        files.append(File.generated(config, name, content=(REPO / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The page with its links as the site needs them."""
    here = page.file.src_uri
    folder = "" if here in ROOT_PAGES else posixpath.join("docs", posixpath.dirname(here))
    return _LINK.sub(lambda link: turned(link, folder, posixpath.dirname(here)), markdown)


def turned(link: re.Match[str], folder: str, site_folder: str) -> str:
    """One link: `folder` is where the page lies in the repository, `site_folder` where it lies on the site."""
    text, target, anchor = link[1], link[2], link[3] or ""
    path = posixpath.normpath(posixpath.join(folder, target))
    if path.startswith("docs/"):
        page = path.removeprefix("docs/")
    elif path in ROOT_PAGES:
        page = path
    else:
        return str(text)
    return f"[{text}]({posixpath.relpath(page, site_folder or '.')}{anchor})"
