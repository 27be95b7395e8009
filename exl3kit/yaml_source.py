"""YAML with positions: a small strict subset, read into a tree whose every key and value knows where it was written.

Refused with a place: tabs in indentation, invisible characters, duplicate keys, anchors, aliases, merge keys, tags,
keys that are not text, a second document, nesting deeper than `MAX_DEPTH`. A byte-order mark and CRLF line ends are
accepted: Windows editors write them, they change neither the meaning nor a column, and nothing hashes the raw file.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import yaml

from exl3kit.faults import Key, LocatedFault, Place, RecipeError

MAX_BYTES = 256 << 10  # a recipe is a page of text; a model file given by mistake must not be parsed for minutes
MAX_DEPTH = 16  # schema 1 needs 4

Value = bool | int | float | str | None

_NULL = {"", "~", "null", "Null", "NULL"}
_TRUE = {"true", "yes", "on"}
_FALSE = {"false", "no", "off"}
# One spelling per whole number: 010 and 1_000 mean different numbers to different YAML readers, so they stay text.
_INT = re.compile(r"0|-?[1-9][0-9]{0,30}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?")
_FORBIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp", "Zs"}  # Unicode categories: control, invisible, surrogate, separators


@dataclass(frozen=True)
class Origin:
    """Where a text comes from: a file, or the end of an argument of which `offset` characters come before it."""

    source: str
    offset: int | None = None

    def place(self, line: int, column: int) -> Place:
        if self.offset is None:
            return Place(self.source, line, column)
        return Place(self.source, 0, column + self.offset)


@dataclass(frozen=True)
class Scalar:
    """A single value; `text` is what was written."""

    value: Value
    text: str
    place: Place


@dataclass(frozen=True)
class Items:
    """A list."""

    items: tuple[Node, ...]
    place: Place


@dataclass(frozen=True)
class Entry:
    """A key's place and its value."""

    place: Place
    node: Node


@dataclass(frozen=True)
class Fields:
    """A mapping; keys keep their order."""

    entries: Mapping[str, Entry]
    place: Place


Node = Scalar | Items | Fields


def plain(node: Node) -> object:
    """The tree as dict, list and scalars."""
    if isinstance(node, Fields):
        return {key: plain(entry.node) for key, entry in node.entries.items()}
    if isinstance(node, Items):
        return [plain(item) for item in node.items]
    return node.value


def find(node: Node, path: tuple[Key, ...]) -> Node | None:
    """The value under `path`, or None."""
    for key in path:
        if isinstance(node, Fields) and key in node.entries:
            node = node.entries[str(key)].node
        elif isinstance(node, Items) and isinstance(key, int) and key < len(node.items):
            node = node.items[key]
        else:
            return None
    return node


def put(tree: Fields, path: tuple[str, ...], node: Node) -> Fields:
    """The tree with the existing value under `path` replaced."""
    entry = tree.entries[path[0]]
    if len(path) > 1:
        assert isinstance(entry.node, Fields)
        node = put(entry.node, path[1:], node)
    return replace(tree, entries={**tree.entries, path[0]: replace(entry, node=node)})


def merge(base: Node, over: Node) -> Node:
    """`over` on top of `base`: mappings merge, everything else replaces."""
    return merge_fields(base, over) if isinstance(base, Fields) and isinstance(over, Fields) else over


def merge_fields(base: Fields, over: Fields) -> Fields:
    """`over` on top of `base`, key by key; null takes the inherited value back."""
    entries = dict(base.entries)
    for key, entry in over.entries.items():
        inherited = entries.get(key)
        if inherited is None:
            entries[key] = entry
        elif isinstance(entry.node, Scalar) and entry.node.value is None:
            del entries[key]
        else:
            entries[key] = replace(entry, node=merge(inherited.node, entry.node))
    return replace(over, entries=entries)


def resolve(text: str) -> Value:
    """The value of an unquoted scalar: null, boolean, whole number, number or text."""
    if text in _NULL:
        return None
    if text.casefold() in _TRUE | _FALSE:
        return text.casefold() in _TRUE
    if _INT.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


def visible(text: str) -> str:
    """Text on one line in which nothing is invisible: such characters become YAML's escapes."""
    return "".join(_escape(c) if c not in " " and unicodedata.category(c) in _FORBIDDEN else c for c in text)


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def quoted(text: str) -> str:
    """Text as a double-quoted YAML scalar on one line."""
    return '"' + visible(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def decode(data: bytes, origin: Origin) -> str:
    """The text of a file; RecipeError when it is too large, not UTF-8, or holds characters that nobody sees."""
    if len(data) > MAX_BYTES:
        what = f"expected a recipe of at most {MAX_BYTES >> 10} KiB, found more"
        raise RecipeError([LocatedFault(origin.place(1, 1), what, "is this the right file?")])
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise RecipeError([LocatedFault(origin.place(1, 1), "expected UTF-8, found UTF-16", "save the file as UTF-8")])
    try:
        text = data.removeprefix(b"\xef\xbb\xbf").decode()
    except UnicodeDecodeError as error:
        before = data[: error.start].decode(errors="replace")
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        what = f"expected UTF-8, found the byte 0x{data[error.start]:02x}"
        raise RecipeError([LocatedFault(origin.place(line, column), what, "save the file as UTF-8")]) from None
    faults = [fault for number, line in enumerate(text.split("\n"), 1) for fault in _line_faults(origin, number, line)]
    if faults:
        raise RecipeError(faults)
    return text


def _line_faults(origin: Origin, number: int, line: str) -> list[LocatedFault]:
    faults: list[LocatedFault] = []
    line = line.removesuffix("\r")
    indent = line[: len(line) - len(line.lstrip(" \t"))]
    if "\t" in indent and indent != line:
        place = origin.place(number, indent.index("\t") + 1)
        what = "expected spaces as indentation, found a tab"
        faults.append(LocatedFault(place, what, "replace each tab by two spaces"))
    if line.isascii() and line.isprintable():
        return faults
    for column, character in enumerate(line, 1):
        if character in " \t" or unicodedata.category(character) not in _FORBIDDEN:
            continue
        code = f"U+{ord(character):04X}"
        name = unicodedata.name(character, "control character").lower()
        hint = "delete it, or write it as an escape in double quotes"
        faults.append(
            LocatedFault(origin.place(number, column), f"found the invisible character {code} ({name})", hint)
        )
        break
    return faults


class _Reader:
    """Builds the tree from parser events, collecting the faults that do not stop the parser."""

    def __init__(self, text: str, origin: Origin) -> None:
        self.origin = origin
        self.faults: list[LocatedFault] = []
        self.events: Iterator[Any] = iter(yaml.parse(text, Loader=yaml.SafeLoader))
        self.ahead: Any = None  # the event that was looked at but not taken
        self.here = origin.place(1, 1)  # start of the latest event, for errors that come without a mark

    def place(self, mark: Any) -> Place:
        return self.origin.place(mark.line + 1, mark.column + 1)

    def fault(self, place: Place, what: str, hint: str | None = None) -> None:
        self.faults.append(LocatedFault(place, what, hint))

    def stop(self, place: Place, what: str, hint: str | None = None) -> RecipeError:
        self.fault(place, what, hint)
        return RecipeError(self.faults)

    def peek(self) -> Any:
        if self.ahead is None:
            self.ahead = next(self.events)
            self.here = self.place(self.ahead.start_mark)
        return self.ahead

    def take(self) -> Any:
        event, self.ahead = self.peek(), None
        return event

    def document(self) -> Node | None:
        """The first document's tree; None for an empty stream."""
        self.take()  # stream start
        if isinstance(self.peek(), yaml.StreamEndEvent):
            return None
        self.take()  # document start
        tree = self.node(0)
        self.take()  # document end
        if not isinstance(self.peek(), yaml.StreamEndEvent):
            self.fault(self.here, "found a second document", "one recipe per file: remove the ---")
        return tree

    def node(self, depth: int) -> Node:
        event = self.take()
        place = self.place(event.start_mark)
        if depth > MAX_DEPTH:
            raise self.stop(place, f"found more than {MAX_DEPTH} levels of nesting", "is there a bracket too many?")
        if isinstance(event, yaml.AliasEvent):
            self.fault(place, f"found the alias *{event.anchor}", "write the value out, or use extends:")
            return Scalar(None, f"*{event.anchor}", place)
        if event.anchor is not None:
            self.fault(place, f"found the anchor &{event.anchor}", "recipes share values through extends: only")
        if event.tag is not None:
            self.fault(place, f"found the tag {event.tag}", "remove it: the type follows from the key")
        if isinstance(event, yaml.MappingStartEvent):
            return self.mapping(place, depth)
        if isinstance(event, yaml.SequenceStartEvent):
            items = []
            while not isinstance(self.peek(), yaml.SequenceEndEvent):
                items.append(self.node(depth + 1))
            self.take()
            return Items(tuple(items), place)
        return self.scalar(event, place)

    def scalar(self, event: Any, place: Place) -> Scalar:
        text: str = event.value
        if any("\ud800" <= character <= "\udfff" for character in text):
            self.fault(place, "found half a surrogate pair, which is no character", r"write \U and eight hex digits")
            text = text.encode(errors="replace").decode()
        return Scalar(text if event.style else resolve(text), text, place)

    def mapping(self, start: Place, depth: int) -> Fields:
        entries: dict[str, Entry] = {}
        while not isinstance(self.peek(), yaml.MappingEndEvent):
            place = self.here
            key, node = self.node(depth + 1), self.node(depth + 1)
            if not isinstance(key, Scalar) or not isinstance(key.value, str):
                found = (key.text or "nothing") if isinstance(key, Scalar) else "a mapping or a list"
                self.fault(place, f"expected a word as key, found {found}")
            elif key.value == "<<":
                self.fault(place, "found the merge key <<", "recipes share values through extends: only")
            elif key.value in entries:
                first = entries[key.value].place
                at = f"line {first.line}, column {first.column}" if first.line else f"column {first.column}"
                self.fault(place, f"the key {key.value} is given twice, first at {at}", "remove one of the two")
            else:
                entries[key.value] = Entry(key.place, node)
        self.take()
        return Fields(entries, start)


# What PyYAML's scanner and parser say, and what the writer most likely has to do.
_HINTS = {
    "mapping values are not allowed": "put text that holds ': ' in quotes, or check the indentation",
    "could not find expected ':'": "each line of a mapping is 'key: value'",
    "'\\t' that cannot": "replace the tab by a space",
    "cannot start any token": "put the text in quotes",
    "expected <block end>": "this line's indentation fits no line above",
    "expected <document start>": "this line's indentation fits no line above",
    "expected ',' or": "is a comma or a closing bracket missing?",
    "found unexpected end of stream": "the quote that opens here is never closed",
    "found unknown escape": "write a backslash twice, or use single quotes",
    "did not find expected": "check the line for a stray character",
}


def read(text: str, origin: Origin) -> tuple[Node | None, list[LocatedFault]]:
    """The tree of a text (None if it is empty) and its faults; RecipeError when the parser cannot go on."""
    reader = _Reader(text, origin)
    try:
        return reader.document(), reader.faults
    except yaml.MarkedYAMLError as error:
        problem = error.problem or "it cannot be read"
        # An unclosed quote and a lost line are found far below the place where they began.
        began = "end of stream" in problem or "could not find expected ':'" in problem
        mark = (error.context_mark if began else None) or error.problem_mark or error.context_mark
        hint = next((hint for words, hint in _HINTS.items() if words in problem), None)
        context = f"{error.context}, " if error.context else ""
        place = reader.place(mark) if mark else reader.here
        raise reader.stop(place, f"not YAML: {context}{problem}", hint) from None
    except (ValueError, OverflowError):
        raise reader.stop(reader.here, "not YAML: found an escape that is no character near here") from None


def read_inline(text: str, source: str, offset: int) -> tuple[Node, list[LocatedFault]]:
    """A one-line value whose first character is column `offset` + 1 of an argument called `source`."""
    origin = Origin(source, offset)
    if "\n" in text or "\r" in text:
        raise RecipeError([LocatedFault(origin.place(1, 1), "expected a value of one line")])
    tree, faults = read(decode(text.encode(errors="surrogateescape"), origin), origin)
    if tree is None:
        raise RecipeError([LocatedFault(origin.place(1, 1), "expected a value after =", "null unsets a key")])
    return tree, faults
