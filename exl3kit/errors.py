"""What the kit says when it cannot go on, and the exit code it says it with."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every verb; scripts may rely on them."""

    OK = 0
    FAULT = 1  # an exception that nobody expected: a bug of the kit, never a verdict
    USAGE = 2
    PREFLIGHT = 3
    BUILD = 4
    VERIFICATION = 5
    UNREACHABLE = 6
    SERVING = 7
    BENCHMARK = 8
    INTERRUPTED = 130


MEANINGS = {
    ExitCode.OK: "fine",
    ExitCode.FAULT: "a fault of the kit itself, or stdout cannot be written",
    ExitCode.USAGE: "wrong usage, or an invalid recipe",
    ExitCode.PREFLIGHT: "refused before anything was changed",
    ExitCode.BUILD: "a build failed",
    ExitCode.VERIFICATION: "something is not what it must be: symbols, stamp, weights or receipts",
    ExitCode.UNREACHABLE: "a node or what it needs cannot be reached",
    ExitCode.SERVING: "serving failed, or took too long",
    ExitCode.BENCHMARK: "a measurement that proves nothing",
    ExitCode.INTERRUPTED: "interrupted",
}


class KitError(Exception):
    """A refusal that an operator can act on.

    Parameters
    ----------
    what: what is wrong, one sentence without a full stop.
    where: file:line:column, node, image or verb that it concerns.
    why: the cause, or the other side's own words.
    next_step: the command or edit that leads out.
    code: the exit code of the process.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        why: str | None = None,
        next_step: str | None = None,
        code: ExitCode = ExitCode.USAGE,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.why = why
        self.next_step = next_step
        self.code = code

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        cause = f" ({self.why})" if self.why else ""
        way_out = f"\n  next: {self.next_step}" if self.next_step else ""
        return f"{place}{self.what}{cause}{way_out}"

    def as_json(self) -> dict[str, object]:
        """The same as one JSON object, for `--json`."""
        fields = {"what": self.what, "where": self.where, "why": self.why, "next": self.next_step}
        return {"error": {k: v for k, v in fields.items() if v is not None}, "exit_code": int(self.code)}
