"""The environment of the overlay, read once, strictly: what can not be understood stops the start.

A misread switch once turned a tier on: everything but "0" counted as yes, "off" and the empty string included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from exl3_vllm.errors import SettingError
from exl3_vllm.tiers import FLAGS, TIERS

TIER = "EXL3_TIER"
FOREIGN_EXTENSION = "VLLM_EXL3_EXT_PATH"
TRUE, FALSE = ("1", "true"), ("0", "false")

DEFAULT_CAP = 128
"""Rows per expert that the thin path takes in one launch."""


@dataclass(frozen=True)
class Settings:
    """What the operator asked for.

    asked: tier that the recipe names (or `auto`); None when it says nothing.
    flagged: highest tier that a flag switches on; None when none does.
    cap: rows per expert above which an expert is fat. row_tile: rows per tile, 0 = off.
    reconstruct_rows: rows from which a dense layer is reconstructed first; None = the table of the GPU, 0 = never.
    """

    asked: str | None = None
    flagged: str | None = None
    cap: int = DEFAULT_CAP
    row_tile: int = 0
    reconstruct_rows: int | None = None
    graph_decode: bool = True

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings:
        """Read every name of the overlay.

        Raises
        ------
        SettingError: a value that is not understood, a foreign extension, or two doors that ask for different things.
        """
        if FOREIGN_EXTENSION in environ:
            what = "names a foreign extension, and the overlay loads none but its own kernels"
            raise SettingError(FOREIGN_EXTENSION, what, "Remove it; the image holds the kernels")
        asked = _asked(environ)
        flagged = [tier for tier, flag in FLAGS.items() if _switch(environ, flag, False)]
        if flagged and asked not in (None, "auto"):
            what = f"asks for {asked}, and {FLAGS[flagged[-1]]} asks for {flagged[-1]}"
            raise SettingError(TIER, what, "Name the tier in one place")
        threshold = environ.get("VLLM_EXL3_PREFILL_RECONSTRUCT_M")
        return cls(
            asked=asked,
            flagged=flagged[-1] if flagged else None,
            cap=_number(environ, "EXL3_TEMP_ROWS_FUSED", DEFAULT_CAP, least=1),
            row_tile=_number(environ, "EXL3_MOE_ROW_TILE", 0),
            reconstruct_rows=None if threshold is None else _number(environ, "VLLM_EXL3_PREFILL_RECONSTRUCT_M", 0),
            graph_decode=_switch(environ, "VLLM_EXL3_GRAPH_DECODE", True),
        )


def _asked(environ: Mapping[str, str]) -> str | None:
    asked = environ.get(TIER)
    if asked is not None and asked not in ("auto", "none", *TIERS):
        raise SettingError(TIER, f"is {asked!r}", f"Use auto, none, {', '.join(TIERS)}")
    return asked


def _switch(environ: Mapping[str, str], name: str, default: bool) -> bool:
    value = environ.get(name)
    if value is None:
        return default
    if value not in TRUE + FALSE:
        raise SettingError(name, f"is {value!r}", "Use 0, 1, true or false")
    return value in TRUE


def _number(environ: Mapping[str, str], name: str, default: int, least: int = 0) -> int:
    value = environ.get(name)
    if value is None:
        return default
    if not (value.isascii() and value.isdecimal() and len(value) < 8 and int(value) >= least):
        raise SettingError(name, f"is {value!r}", f"Use a whole number from {least} on")
    return int(value)
