"""The contract: every symbol of vLLM that the overlay leans on, and how each looked in the versions that were tested.

`contracts.yaml` says what is leaned on and why; `vllm-X.Y.Z/index.json` says how it looked in that version.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from patches import patchset, shapes
from patches.sources import Found, Sources

STATUSES = ("same", "moved", "changed", "missing")


@dataclass(frozen=True)
class Symbol:
    """One thing of vLLM that the overlay uses.

    Parameters
    ----------
    hold: `signature` when only its outside matters, `body` when any change inside it needs a look.
    attributes: what instances of the class must have.
    """

    module: str
    name: str
    why: str
    hold: str = "signature"
    attributes: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return f"{self.module}:{self.name}"


@cache
def symbols() -> tuple[Symbol, ...]:
    """All of `contracts.yaml`, in its order."""
    said = yaml.safe_load((patchset.HERE / "contracts.yaml").read_text(encoding="utf-8"))
    return tuple(
        Symbol(module, name, one["why"], one.get("hold", "signature"), tuple(one.get("attributes", ())))
        for module, names in said.items()
        for name, one in names.items()
    )


def record(sources: Sources) -> dict[str, dict[str, str]]:
    """How every symbol looks in one vLLM; symbols that it lacks are left out."""
    founds = ((symbol, sources.find(symbol.module, symbol.name)) for symbol in symbols())
    return {symbol.key: _shape(found) for symbol, found in founds if found is not None}


def _shape(found: Found) -> dict[str, str]:
    shape = {"in": found.module, "kind": shapes.kind_of(found.node), "signature": shapes.signature_of(found.node)}
    # The hash of a whole class would change with every method; those that matter are symbols of their own.
    return shape if shape["kind"] == "class" else {**shape, "sha256": shapes.digest(found.node)}


def recorded(version: str) -> dict[str, dict[str, str]]:
    """The index of a version that there is a set for."""
    text = (patchset.HERE / f"vllm-{version}" / "index.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def write_index(index: Mapping[str, Mapping[str, str]], folder: Path) -> Path:
    """One symbol a line, so that a change reads well in a diff."""
    lines = [f" {json.dumps(key)}: {json.dumps(shape)}" for key, shape in index.items()]
    target = folder / "index.json"
    target.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return target


@dataclass(frozen=True)
class Verdict:
    """What became of one symbol or patch: `subject`, its status, why, and what hangs on it."""

    kind: str
    subject: str
    status: str
    detail: str
    why: str


def check(sources: Sources, version: str) -> Iterator[Verdict]:
    """Every symbol and every patch of the set `version`, held against one vLLM."""
    index = recorded(version)
    for symbol in symbols():
        status, detail = _compare(sources, symbol, index[symbol.key])
        yield Verdict("symbol", symbol.key, status, detail, symbol.why)
    chosen = patchset.load(version)
    for patch in chosen.patches:
        if patchset.is_applied(sources, patch):
            status, detail = "same", "already applied"
        else:
            status, detail = patchset.problem_of(sources, patch, chosen.render(patch))
        yield Verdict("patch", patch.file, status, detail, patch.why)


def _compare(sources: Sources, symbol: Symbol, was: Mapping[str, str]) -> tuple[str, str]:
    found = sources.find(symbol.module, symbol.name)
    if found is None:
        others = sources.elsewhere(symbol.name)
        if not others:
            return "missing", _resembling(sources, symbol)
        places = [one.module + ("" if _shape(one) == {**was, "in": one.module} else " (changed)") for one in others]
        return "moved", f"now in {', '.join(places)}"
    is_now = _shape(found)
    for part in ("kind", "signature"):
        if is_now[part] != was[part]:
            return "changed", _difference(part, was[part], is_now[part])
    if symbol.hold == "body" and is_now.get("sha256") != was.get("sha256"):
        return "changed", "its body is another"
    if symbol.attributes:
        lost = sorted(set(symbol.attributes) - sources.attributes(found))
        if lost:
            return "changed", f"lost {', '.join(lost)}"
    return "same", ""


def _difference(part: str, was: str, is_now: str) -> str:
    """What a changed kind or signature lost and gained, in parameters."""
    before, after = ([one.strip("()") for one in text.split(", ")] for text in (was, is_now))
    lost, gained = [one for one in before if one not in after], [one for one in after if one not in before]
    told = [f"{word} {', '.join(names)}" for word, names in (("lost", lost), ("gained", gained)) if names]
    return f"{part} {'; '.join(told) or f'is now {is_now}'}"


def _resembling(sources: Sources, symbol: Symbol) -> str:
    """What may have taken the place of a symbol that is gone."""
    holder, _, leaf = symbol.name.rpartition(".")
    if sources.module(symbol.module) is None:
        return f"there is no module {symbol.module}"
    found = sources.find(symbol.module, holder) if holder else None
    tree = sources.module(symbol.module)
    names = sources.attributes(found) if found else {getattr(one, "name", "") for one in tree.body} if tree else set()
    near = difflib.get_close_matches(leaf, sorted(names - {""}), n=2, cutoff=0.75)
    return f"there is {' and '.join(near)}" if near else ""


def as_dict(verdict: Verdict) -> dict[str, Any]:
    """JSON-ready."""
    return dict(vars(verdict))
