"""A reader of 64-bit ELF shared objects: as much as proves for which machine one is and what it asks of it.

It reads another machine's files too, which the host's own binutils refuse. Layout: System V gABI 4.1, "Object Files"
and "Symbol Table"; version sections: LSB Core 5.0, "Symbol Versioning".
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path

MACHINES = {62: "x86_64", 183: "aarch64"}
_SHT_SYMTAB, _SHT_DYNAMIC, _SHT_DYNSYM = 2, 6, 11
_SHT_VERNEED, _SHT_VERSYM = 0x6FFFFFFE, 0x6FFFFFFF
_DT_NEEDED = 1


class ElfError(Exception):
    """Not a file that this reader knows; the text says why."""


@dataclass(frozen=True)
class Section:
    """One section header: type, offset and size in the file, index of the linked section."""

    name: str
    kind: int
    offset: int
    size: int
    link: int


@dataclass(frozen=True)
class Wanted:
    """An undefined symbol: its version ("GLIBC_2.34", empty without one) and whether the loader may leave it unset."""

    name: str
    version: str
    weak: bool


@dataclass(frozen=True)
class SharedObject:
    """What a shared object is for, exports and asks for."""

    machine: str
    needed: tuple[str, ...]
    exported: frozenset[str]
    wanted: tuple[Wanted, ...]
    sections: tuple[Section, ...]
    content: bytes = field(repr=False)

    @property
    def has_symbol_table(self) -> bool:
        """False once the file has been stripped."""
        return any(section.kind == _SHT_SYMTAB for section in self.sections)

    def section(self, name: str) -> bytes | None:
        """Content of a section, or None if there is none of that name."""
        for section in self.sections:
            if section.name == name:
                return self.content[section.offset : section.offset + section.size]
        return None


def read(path: Path) -> SharedObject:
    """Read a little-endian 64-bit shared object for x86-64 or AArch64. Raises ElfError on anything else."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ElfError(f"{path}: {error.strerror}") from error
    if content[:4] != b"\x7fELF":
        raise ElfError(f"{path}: not an ELF file")
    if content[4:6] != b"\x02\x01":
        raise ElfError(f"{path}: not a 64-bit little-endian ELF file")
    try:
        return _read(content, path)
    except (struct.error, IndexError, ValueError) as error:
        raise ElfError(f"{path}: cut short or damaged ({error})") from error


def _read(content: bytes, path: Path) -> SharedObject:
    kind, number = struct.unpack_from("<HH", content, 16)
    if kind != 3:
        raise ElfError(f"{path}: not a shared object (ELF type {kind})")
    if number not in MACHINES:
        raise ElfError(f"{path}: for machine {number}, which is neither x86-64 nor AArch64")
    sections = _sections(content)
    exported, wanted = _dynamic_symbols(content, sections)
    return SharedObject(MACHINES[number], _needed(content, sections), exported, wanted, sections, content)


def _sections(content: bytes) -> tuple[Section, ...]:
    (table,) = struct.unpack_from("<Q", content, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", content, 0x3A)
    headers = [struct.unpack_from("<IIQQQQII", content, table + index * size) for index in range(count)]
    if not headers:
        return ()
    names = headers[names_index][4]
    return tuple(Section(_text(content, names + h[0]), h[1], h[4], h[5], h[6]) for h in headers)


def _text(content: bytes, offset: int) -> str:
    return content[offset : content.index(b"\0", offset)].decode()


def _needed(content: bytes, sections: tuple[Section, ...]) -> tuple[str, ...]:
    names = []
    for section in sections:
        if section.kind == _SHT_DYNAMIC:
            strings = sections[section.link].offset
            for tag, value in struct.iter_unpack("<qQ", _body(content, section)):
                if tag == _DT_NEEDED:
                    names.append(_text(content, strings + value))
    return tuple(names)


def _body(content: bytes, section: Section) -> bytes:
    return content[section.offset : section.offset + section.size]


def _dynamic_symbols(content: bytes, sections: tuple[Section, ...]) -> tuple[frozenset[str], tuple[Wanted, ...]]:
    exported: set[str] = set()
    wanted: list[Wanted] = []
    versions = _versions(content, sections)
    numbers: list[int] = []
    for section in sections:
        if section.kind == _SHT_VERSYM:
            numbers += [value for (value,) in struct.iter_unpack("<H", _body(content, section))]
    for section in sections:
        if section.kind != _SHT_DYNSYM:
            continue
        strings = sections[section.link].offset
        for index, entry in enumerate(struct.iter_unpack("<IBBHQQ", _body(content, section))):
            name, binding, where = _text(content, strings + entry[0]), entry[1] >> 4, entry[3]
            if where == 0 and name:
                version = versions.get(numbers[index] & 0x7FFF, "") if numbers else ""
                wanted.append(Wanted(name, version, weak=binding == 2))
            elif binding in (1, 2) and name:
                exported.add(name)
    return frozenset(exported), tuple(wanted)


def _versions(content: bytes, sections: tuple[Section, ...]) -> dict[int, str]:
    """Version number in the symbol table -> name, from the chain of needed versions."""
    found: dict[int, str] = {}
    for section in sections:
        if section.kind != _SHT_VERNEED:
            continue
        strings, at = sections[section.link].offset, section.offset
        while True:
            _, count, _, first, following = struct.unpack_from("<HHIII", content, at)
            entry = at + first
            for _ in range(count):
                _, _, number, name, step = struct.unpack_from("<IHHII", content, entry)
                found[number] = _text(content, strings + name)
                entry += step
            if not following:
                break
            at += following
    return found
