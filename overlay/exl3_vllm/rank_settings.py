"""What the environment of a container says about its rank, and the words in which a rank refuses and tells."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exl3_vllm import gang_wire

EXIT_USAGE, EXIT_PREFLIGHT, EXIT_VERIFICATION, EXIT_SERVING = 2, 3, 5, 7  # the kit's exit codes


class RankError(Exception):
    """A sentence for the operator and the exit code that goes with it."""

    def __init__(self, sentence: str, code: int) -> None:
        super().__init__(sentence)
        self.code = code


@dataclass(frozen=True)
class Limits:
    """Times in seconds, each an `EXL3_<NAME>` of the environment."""

    stall_s: float = 120.0  # requests wait, and nothing moves
    start_s: float = 1800.0  # from vLLM's start to its first token: loading 164 GiB from one disk
    grace_s: float = 20.0  # for requests in flight when told to stop; the engine kills after 30
    lost_s: float = 8.0  # silence of a peer: a link that is gone for 5 s is ridden out
    steady_s: float = 30.0  # an incarnation that served for this long was no failed start
    backoff_s: float = 60.0  # longest pause between failed starts


@dataclass(frozen=True)
class Settings:
    """The rank's place, folders and limits (the kit renders these names into the env file)."""

    rank: int
    generation: str
    spec: str
    role: str
    model_dir: Path
    run_dir: Path
    state_dir: Path
    receipt_dir: Path
    api: str
    api_key_file: Path | None
    peers: tuple[tuple[str, int], ...]  # empty: a gang of one
    secret_file: Path | None
    limits: Limits

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings:
        """Read `EXL3_*`; an absent or malformed name is a `RankError` that says which."""

        def need(name: str) -> str:
            value = environ.get(name, "")
            if not value:
                raise RankError(f"{name} is not set; start this container with the files of `kit render`", EXIT_USAGE)
            return value

        rank = need("EXL3_RANK")
        if not rank.isdecimal():
            raise RankError(f"EXL3_RANK={rank!r} is not a number from 0 on", EXIT_USAGE)
        run_dir = Path(need("EXL3_RUN_DIR"))
        key_file = environ.get("EXL3_API_KEY_FILE")
        peers = read_peers(environ.get("EXL3_PEERS", ""), int(rank))
        return cls(
            rank=int(rank),
            generation=need("EXL3_GENERATION"),
            spec=environ.get("EXL3_SPEC", ""),
            role="head" if rank == "0" else "headless",
            model_dir=Path(need("EXL3_MODEL_DIR")),
            run_dir=run_dir,
            state_dir=Path(environ.get("EXL3_STATE_DIR") or run_dir / "state"),
            receipt_dir=Path(environ.get("EXL3_RECEIPT_DIR") or run_dir / "receipts"),
            api=need("EXL3_API"),
            api_key_file=Path(key_file) if key_file else None,
            peers=peers,
            secret_file=Path(need("EXL3_GANG_SECRET_FILE")) if peers else None,
            limits=Limits(**{name: read_seconds(environ, name, of) for name, of in Limits().__dict__.items()}),
        )

    @property
    def world(self) -> int:
        return max(1, len(self.peers))

    @property
    def status_file(self) -> Path:
        return self.run_dir / "status.json"

    def api_key(self) -> str | None:
        """The key of the API, read from its mounted file so that `inspect`, argv and logs never show it."""
        return None if self.api_key_file is None else read_secret(self.api_key_file, "API key")

    def secret(self) -> bytes:
        """What the ranks prove to each other that they know."""
        return b"" if self.secret_file is None else read_secret(self.secret_file, "gang's secret").encode()


def read_peers(text: str, rank: int) -> tuple[tuple[str, int], ...]:
    if not text:
        return ()
    try:
        peers = tuple(gang_wire.parse_peers(text))
    except ValueError as error:
        raise RankError(f"EXL3_PEERS: {error}", EXIT_USAGE) from error
    if rank >= len(peers):
        raise RankError(f"EXL3_PEERS names ranks 0 to {len(peers) - 1}, and this is rank {rank}", EXIT_USAGE)
    return peers


def read_seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    variable = f"EXL3_{name.upper()}"
    text = environ.get(variable)
    if text is None:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e6:
        raise RankError(f"{variable}={text!r} is no number of seconds", EXIT_USAGE)
    return seconds


def read_secret(path: Path, what: str) -> str:
    try:
        secret = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise RankError(f"cannot read the {what} in {path}: {error.strerror}", EXIT_PREFLIGHT) from error
    if not secret:
        raise RankError(f"the {what} file {path} is empty", EXIT_PREFLIGHT)
    return secret


def say(settings: Settings, sentence: str) -> None:
    print(f"exl3 rank {settings.rank}: {sentence}", file=sys.stderr, flush=True)


def write_json(path: Path, fields: Mapping[str, Any]) -> None:
    """Replace `path` in one step: a reader sees the old or the new object, never half of one."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(fields, sort_keys=True), encoding="utf-8")
    new.replace(path)
