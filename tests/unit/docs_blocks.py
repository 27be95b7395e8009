"""What the pages hold: code blocks with their marks, links, headings. Standard library, no network.

A block of commands (info string `sh`) is run by the tests, line by line, unless a comment right above it says why not:

    <!-- not run: why -->                                        nothing of it is run
    <!-- not run but `kit plan`, `kit recipe check`: why -->     only lines that begin so are run
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
ROOT_PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
KINDS = ("sh", "text", "yaml", "json", "ini")

_MARK = re.compile(r"<!-- not run(?: but (?P<but>`[^`]+`(?:, `[^`]+`)*))?: (?P<why>.+?) -->")
_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>.*)$")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_IMAGE = re.compile(r"<img[^>]+src=\"([^\"]+)\"")
_INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


@dataclass(frozen=True)
class Block:
    """One fenced block; `why` is the reason of a mark above it, `but` what is run of it all the same."""

    page: str
    line: int
    info: str
    text: str
    why: str | None
    but: tuple[str, ...]

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    def script(self) -> str:
        """The lines that a test runs; empty when there are none."""
        if self.info != "sh" or (self.why is not None and not self.but):
            return ""
        lines = logical_lines(self.text)
        return "\n".join(line for line in lines if not self.but or line.startswith(self.but))


def pages() -> list[str]:
    """Every page by its path in the repository."""
    return [*ROOT_PAGES, *sorted(path.relative_to(REPO).as_posix() for path in (REPO / "docs").rglob("*.md"))]


def read(page: str) -> str:
    return (REPO / page).read_text(encoding="utf-8")


def blocks(page: str) -> Iterator[Block]:
    """The fenced blocks of a page."""
    lines = read(page).splitlines()
    opened: tuple[int, str, str] | None = None
    for number, line in enumerate(lines, 1):
        fence = _FENCE.match(line)
        if fence is None:
            continue
        if opened is None:
            opened = (number, fence["info"].strip(), fence["indent"])
            continue
        start, info, indent = opened
        opened = None
        text = "\n".join(one.removeprefix(indent) for one in lines[start : number - 1]) + "\n"
        mark = _MARK.fullmatch(above(lines, start - 1))
        but = tuple(re.findall(r"`([^`]+)`", mark["but"] or "")) if mark else ()
        yield Block(page, start, info, text, mark["why"] if mark else None, but)


def above(lines: list[str], index: int) -> str:
    """The paragraph that ends right above the line, its lines joined."""
    begin = index
    while begin and lines[begin - 1].strip():
        begin -= 1
    return " ".join(line.strip() for line in lines[begin:index])


def prose(page: str) -> str:
    """The page without its fenced blocks."""
    kept, inside = [], False
    for line in read(page).splitlines():
        if _FENCE.match(line):
            inside = not inside
        elif not inside:
            kept.append(line)
    return "\n".join(kept) + "\n"


def links(page: str) -> list[str]:
    """Where links and pictures of a page lead, inline code left out."""
    text = _INLINE.sub("", prose(page))
    return _LINK.findall(text) + _IMAGE.findall(text)


def inline_commands(page: str) -> list[str]:
    """Code in running text that begins with `kit `."""
    return [code for code in _INLINE.findall(prose(page)) if re.match(r"(kit|\./kit\.py) [a-z]", code)]


def anchors(page: str) -> set[str]:
    """Anchors of a page's headings, as git hosts make them."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *$", prose(page), flags=re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        slug = re.sub(r"[^\w\- ]", "", shown).strip().replace(" ", "-")
        found.add(slug if slug not in found else f"{slug}-1")
    return found


def logical_lines(text: str) -> list[str]:
    """Lines of a script with continued ones joined; blank ones and comments left out."""
    lines = text.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def commands(line: str) -> list[list[str]]:
    """The simple commands of one line, as words: comments, redirections and assignments in front are gone."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    words = list(lexer)
    skip = False
    for word in words:
        if skip:
            skip = False
        elif set(word) <= set("<>"):
            skip = True
        elif set(word) <= set(";&|"):
            found.append([])
        elif found[-1] or not re.fullmatch(r"[A-Z_]+=.*", word):
            found[-1].append(word)
    return [one for one in found if one]
