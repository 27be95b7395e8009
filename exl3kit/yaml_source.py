"""YAML with positions: a small strict subset, read into a tree whose every key and value knows where it was written.

Refused with a place: tabs in indentation, invisible characters, duplicate keys, anchors, aliases, merge keys, tags, keys that are
not text, a second document, nesting deeper than `MAX_DEPTH`. A byte-order mark and CRLF line ends are accepted: Windows editors
write them, they change neither the meaning nor a column, and nothing hashes the raw file.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

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
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_FORBIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp", "Zs"}  # Unicode categories: control, invisible, surrogate, separators


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


def merge(base: Node, over: Node) -> Node:
    """`over` on top of `base`: mappings merge, everything else replaces, and null takes the inherited value back."""
    if not (isinstance(base, Fields) and isinstance(over, Fields)):
        return over
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
    if _FLOAT.fullmatch(text):
        return float(text.replace(".inf", "inf").replace(".nan", "nan")) if text[-1].isdigit() or "." in text else text
    return text


def decode(data: bytes, source: str) -> str:
    """The text of a file; RecipeError when it is too large, not UTF-8, or holds characters that nobody sees."""
    if len(data) > MAX_BYTES:
        what = f"expected a recipe of at most {MAX_BYTES >> 10} KiB, found {len(data):,} bytes"
        raise RecipeError([LocatedFault(Place(source, 1, 1), what, "is this the right file?")])
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise RecipeError([LocatedFault(Place(source, 1, 1), "expected UTF-8, found UTF-16", "save the file as UTF-8")])
    try:
        text = data.removeprefix(b"\xef\xbb\xbf").decode()
    except UnicodeDecodeError as error:
        before = data[: error.start].decode(errors="replace")
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        what = f"expected UTF-8, found the byte 0x{data[error.start]:02x}"
        raise RecipeError([LocatedFault(Place(source, line, column), what, "save the file as UTF-8")]) from None
    faults = [fault for number, line in enumerate(text.split("\n"), 1) for fault in _line_faults(source, number, line)]
    if faults:
        raise RecipeError(faults)
    return text


def _line_faults(source: str, number: int, line: str) -> list[LocatedFault]:
    faults = []
    line = line.removesuffix("\r")
    indent = line[: len(line) - len(line.lstrip(" \t"))]
    if "\t" in indent and indent != line:
        place = Place(source, number, indent.index("\t") + 1)
        faults.append(LocatedFault(place, "expected spaces as indentation, found a tab", "replace each tab by two spaces"))
    if line.isascii() and line.isprintable():
        return faults
    for column, character in enumerate(line, 1):
        if character in " \t" or unicodedata.category(character) not in _FORBIDDEN:
            continue
        code = f"U+{ord(character):04X}"
        name = unicodedata.name(character, "control character").lower()
        hint = "delete it, or write it as an escape in double quotes"
        faults.append(LocatedFault(Place(source, number, column), f"found the invisible character {code} ({name})", hint))
        break
    return faults


@dataclass
class _Reader:
    """Builds the tree from parser events, collecting the faults that do not stop the parser."""

    source: str
    loader: yaml.SafeLoader
    faults: list[LocatedFault] = field(default_factory=list)

    def place(self, mark: yaml.Mark) -> Place:
        return Place(self.source, mark.line + 1, mark.column + 1)

    def fault(self, mark: yaml.Mark, what: str, hint: str | None = None) -> None:
        self.faults.append(LocatedFault(self.place(mark), what, hint))

    def stop(self, mark: yaml.Mark, what: str, hint: str | None = None) -> RecipeError:
        self.fault(mark, what, hint)
        return RecipeError(self.faults)

    def document(self) -> Node | None:
        """The first document's tree; None for an empty stream."""
        self.loader.get_event()  # stream start
        if self.loader.check_event(yaml.StreamEndEvent):
            return None
        self.loader.get_event()  # document start
        tree = self.node(0)
        self.loader.get_event()  # document end
        if not self.loader.check_event(yaml.StreamEndEvent):
            self.fault(self.loader.peek_event().start_mark, "found a second document", "one recipe per file: remove the '---'")
        return tree

    def node(self, depth: int) -> Node:
        event = self.loader.get_event()
        if depth > MAX_DEPTH:
            raise self.stop(event.start_mark, f"found more than {MAX_DEPTH} levels of nesting", "is a bracket too many here?")
        if isinstance(event, yaml.AliasEvent):
            raise self.stop(event.start_mark, f"found the alias *{event.anchor}", "write the value out, or use extends:")
        if event.anchor is not None:
            self.fault(event.start_mark, f"found the anchor &{event.anchor}", "recipes share values through extends: only")
        if event.tag is not None:
            self.fault(event.start_mark, f"found the tag {event.tag}", "remove it: the type follows from the key")
        if isinstance(event, yaml.MappingStartEvent):
            return self.mapping(event, depth)
        if isinstance(event, yaml.SequenceStartEvent):
            items = []
            while not self.loader.check_event(yaml.SequenceEndEvent):
                items.append(self.node(depth + 1))
            self.loader.get_event()
            return Items(tuple(items), self.place(event.start_mark))
        value = resolve(event.value) if event.style is None else event.value
        return Scalar(value, event.value, self.place(event.start_mark))

    def mapping(self, start: yaml.MappingStartEvent, depth: int) -> Fields:
        entries: dict[str, Entry] = {}
        while not self.loader.check_event(yaml.MappingEndEvent):
            mark = self.loader.peek_event().start_mark
            key = self.node(depth + 1)
            node = self.node(depth + 1)
            if not isinstance(key, Scalar) or not isinstance(key.value, str):
                found = key.text or "nothing" if isinstance(key, Scalar) else "a mapping or list"
                self.fault(mark, f"expected a word as key, found {found}")
            elif key.value == "<<":
                self.fault(mark, "found the merge key <<", "recipes share values through extends: only")
            elif key.value in entries:
                first = entries[key.value].place
                what = f"the key {key.value} is given twice, first at line {first.line}, column {first.column}"
                self.fault(mark, what, "remove one of the two")
            else:
                entries[key.value] = Entry(key.place, node)
        self.loader.get_event()
        return Fields(entries, self.place(start.start_mark))


def read(text: str, source: str) -> tuple[Node | None, list[LocatedFault]]:
    """The tree of a text (None if it is empty) and its faults; RecipeError when the parser cannot go on."""
    loader = yaml.SafeLoader(text)
    reader = _Reader(source, loader)
    try:
        return reader.document(), reader.faults
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark or loader.get_mark()
        raise reader.stop(mark, f"not YAML: {error.problem}") from None
    except (ValueError, OverflowError):
        raise reader.stop(loader.get_mark(), "not YAML: found an escape that is no character") from None


def read_inline(text: str, source: str, offset: int) -> tuple[Node, list[LocatedFault]]:
    """A one-line value whose first character is column `offset` + 1 of an argument called `source`."""
    if "\n" in text or "\r" in text:
        raise RecipeError([LocatedFault(Place(source.split("\n")[0], 0, offset + 1), "expected a value of one line")])

    def shift(fault: LocatedFault) -> LocatedFault:
        return replace(fault, place=Place(source, 0, fault.place.column + offset))

    try:
        tree, faults = read(decode(text.encode(errors="surrogateescape"), source), source)
    except RecipeError as error:
        raise RecipeError([shift(fault) for fault in error.faults]) from None
    if tree is None:
        raise RecipeError([LocatedFault(Place(source, 0, offset + 1), "expected a value after =", "null unsets a key")])
    return _shifted(tree, source, offset), [shift(fault) for fault in faults]


def _shifted(node: Node, source: str, offset: int) -> Node:
    place = Place(source, 0, node.place.column + offset)
    if isinstance(node, Fields):
        entries = {
            key: Entry(Place(source, 0, entry.place.column + offset), _shifted(entry.node, source, offset))
            for key, entry in node.entries.items()
        }
        return Fields(entries, place)
    if isinstance(node, Items):
        return Items(tuple(_shifted(item, source, offset) for item in node.items), place)
    return replace(node, place=place)
