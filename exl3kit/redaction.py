"""Take secrets out of text that leaves the machine: known values, values of names that look secret, tokens by shape.

Pure. It rather takes too much: a masked word in a report costs a question, a token that got out costs an account.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

MASK = "********"
LEAST = 6  # characters of a known value: a shorter one would turn up in innocent words

_ENDING = (  # of a name that is a secret's; tiktoken is none
    r"(?:(?-i:(?<![a-z])token|Token|(?<![A-Z])TOKEN)|(?:access|auth|refresh|session|id)token"
    r"|secret|passw(?:or)?d|passphrase|credentials?|authorization|cookie"
    r"|(?:api|access|private|secret|signing|encryption|account|auth)[_-]?key(?:[_-]?id)?)"
)
_NAME = re.compile(rf"[\w.-]*{_ENDING}", re.IGNORECASE)
_ASSIGNED = re.compile(  # NAME=value, NAME: "value", "name": 'value', also with quotes escaped inside a JSON string
    rf"(?P<head>{_ENDING}(?:\\?[\"'])?\s*(?:=|:(?!//))\s*)"
    r"(?:(?P<quote>\\?[\"'])(?P<quoted>.*?)(?P=quote)|(?P<bare>(?:basic\s+|bearer\s+)?[^\s\"'\\,;})\]]+))",
    re.IGNORECASE,
)
_OPTION = re.compile(  # --api-key value, --hf-token=value, "--api-key", "value"
    rf"(?P<head>(?<!-)--(?!-)[\w.-]{{0,60}}{_ENDING}(?:\\?[\"']\s*,?\s*\\?[\"']|[ =]+\\?[\"']?))"
    r"(?P<value>[^\s\"'\\,]+)",
    re.IGNORECASE,
)
_SHAPES = tuple(
    re.compile(pattern if pattern.startswith("-----") else r"(?:(?<![A-Za-z0-9])|(?<=\\[nrt]))" + pattern)
    for pattern in (  # each at the beginning of a word, also behind a line break that JSON spells \n
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
        r"hf_[A-Za-z0-9]{16,}",
        r"sk-[A-Za-z0-9_-]{12,}",
        r"(?:gh[pousr]_|github_pat_|glpat-|npm_|nvapi-|pypi-)[A-Za-z0-9_-]{16,}",
        r"(?:AKIA|ASIA)[A-Z0-9]{16}\b",
        r"AIza[A-Za-z0-9_-]{30,}",
        r"xox[abeprs]-[A-Za-z0-9-]{10,}",
        r"eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{5,}",
    )
)
_BEARER = re.compile(r"(?P<head>\b(?:bearer|basic)\s+)(?P<value>[A-Za-z0-9._~+/=-]{8,})", re.IGNORECASE)
_IN_URL = re.compile(r"(?P<head>://)(?P<value>[^\s/@\"']+)(?=@)")
_HOME = re.compile(r"(?P<head>/(?:home|Users)/)(?P<value>[^/\s\"':,;]+)")


def is_secret_name(name: str) -> bool:
    """Whether a variable or key of this name holds what nobody else should read; `api_key_file` holds a path."""
    return _NAME.fullmatch(name) is not None


class Redactor:
    """Masks secrets in text and in JSON data, and counts how many it masked.

    Parameters
    ----------
    known: values that are secret wherever they turn up, also in base64 and as part of a URL.
    home: the user's home folder and name, when these are to be hidden too.
    """

    def __init__(self, known: Iterable[str] = (), home: tuple[str, str] | None = None) -> None:
        values = {value for value in known if len(value) >= LEAST}
        spelled = {text for value in values for text in (value, quote(value, safe=""), _base64(value), _escaped(value))}
        self._known = sorted(spelled, key=len, reverse=True)
        self._home = home
        self.count = 0

    def text(self, text: str) -> str:
        """The text with every secret masked."""
        for value in self._known:
            self.count += text.count(value)
            text = text.replace(value, MASK)
        for shape in _SHAPES:
            text = shape.sub(self._mask, text)
        for pattern in (_IN_URL, _BEARER, _OPTION):
            text = pattern.sub(self._mask_value, text)
        text = _ASSIGNED.sub(self._mask_assigned, text)
        return self._without_home(text) if self._home else text

    def data(self, value: Any) -> Any:
        """JSON data with every secret masked: texts, and whatever a key with a secret's name holds."""
        if isinstance(value, Mapping):
            named = is_secret_name(str(value.get("name", "")))  # {name: ..., value: ...}
            return {
                self.text(str(key)): self._held(item, secret=is_secret_name(str(key)) or (named and key == "value"))
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            before = ["", *(str(item) for item in value)]
            return [
                self._held(item, secret=option.startswith("--") and is_secret_name(option.lstrip("-")))
                for option, item in zip(before, value, strict=False)
            ]
        return self.text(value) if isinstance(value, str) else value

    def _held(self, item: Any, *, secret: bool) -> Any:
        if secret and isinstance(item, str) and item:
            self.count += 1
            return MASK
        return self.data(item)

    def _mask(self, match: re.Match[str]) -> str:
        self.count += 1
        return MASK

    def _mask_value(self, match: re.Match[str]) -> str:
        if match["value"] != MASK:
            self.count += 1
        return match["head"] + MASK

    def _mask_assigned(self, match: re.Match[str]) -> str:
        value = match["quoted"] if match["quoted"] is not None else match["bare"]
        if not value or value == MASK or value.lower() in ("null", "none", "true", "false"):
            return match[0]
        self.count += 1
        quoted = match["quote"] or ""
        return match["head"] + quoted + MASK + quoted

    def _without_home(self, text: str) -> str:
        assert self._home is not None
        folder, user = self._home
        if len(folder) > 1:
            text = text.replace(folder, "~")
        text = _HOME.sub(lambda match: match["head"] + "USER", text)
        return re.sub(rf"\b{re.escape(user)}\b", "USER", text) if user and user != "root" else text


def _escaped(value: str) -> str:
    return json.dumps(value)[1:-1]


def _base64(value: str) -> str:
    return base64.b64encode(value.encode()).decode().rstrip("=")
