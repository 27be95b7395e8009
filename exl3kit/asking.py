"""Questions to a running rank, put from inside its container: one way for this machine, remote nodes and any network.

`exl3_vllm.rank --ask` waits for the API in the container and sends one request, so a wait costs one small process and
no polling over ssh, and the API needs to listen nowhere but on the container's loopback.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from exl3kit import exec_output
from exl3kit.errors import ExitCode

if TYPE_CHECKING:
    from types import ModuleType

    from exl3kit.containers import Standing

RANK = ("python3", "-m", "exl3_vllm.rank")
REPORT_SECONDS = 30.0
ANSWER_SECONDS = 300.0  # a cold first completion compiles and autotunes


@dataclass(frozen=True)
class Answer:
    """One answer of the API. `status` 0: none came, and `body` says why; `waited` is until the API was up at all."""

    status: int
    seconds: float
    waited: float
    body: Any

    @property
    def text(self) -> str:
        """The text of a completion."""
        return str(self.body["choices"][0]["text"])

    @property
    def tokens(self) -> int:
        """Tokens that the completion generated."""
        return int(self.body["usage"]["completion_tokens"])

    def refusal(self) -> str | None:
        """Why this is no completion, or None."""
        if self.status != 200:
            return f"status {self.status}: {json.dumps(self.body)[:300]}" if self.status else str(self.body)
        try:
            return None if self.tokens > 0 else "the answer holds no token"
        except (KeyError, IndexError, TypeError):
            return f"the answer is no completion: {json.dumps(self.body)[:300]}"


def complete(head: Standing, model: str, prompt: str, max_tokens: int, *, wait_s: float) -> Answer:
    """A greedy completion from the served model.

    Parameters
    ----------
    head: the running container of rank 0.
    wait_s: how long the API may take to come up.

    Raises `KitError` (serving) when the container cannot be asked at all.
    """
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    return ask(head, "/v1/completions", body, wait_s=wait_s)


def ask(
    head: Standing, path: str, body: Mapping[str, Any] | None, *, wait_s: float, answer_s: float = ANSWER_SECONDS
) -> Answer:
    """One request to the API of rank 0, after waiting for it to come up; the answer may take `answer_s`."""
    request = {"path": path, "body": body, "wait_s": wait_s, "timeout_s": answer_s}
    told = run(head, [*RANK, "--ask", json.dumps(request)], patience=wait_s + answer_s + REPORT_SECONDS)
    return Answer(int(told["status"]), float(told["seconds"]), float(told["waited"]), told["answer"])


def report(rank: Standing) -> dict[str, Any]:
    """What a running rank says of itself (docs/gang.md lists the keys)."""
    return run(rank, [*RANK, "--report"], patience=REPORT_SECONDS)


def program(rank: Standing, module: ModuleType, *, patience: float) -> dict[str, Any]:
    """Run a module of `exl3kit.aboard` in the container of a running rank; its one JSON object."""
    return run(rank, ["python3", "-I", "-c", inspect.getsource(module)], patience=patience)


def run(rank: Standing, argv: list[str], *, patience: float) -> dict[str, Any]:
    """Run a program in the rank's container; the one JSON object that it prints.

    Raises `KitError` (serving) when it cannot be run or prints none.
    """
    from docker.errors import APIError
    from requests import RequestException

    name = str(rank.container.name)
    try:
        with rank.node.patient_engine(patience) as engine:
            pieces = list(exec_output.of(engine.api, str(rank.container.id), argv))
        stdout, stderr = (b"".join(piece[end] or b"" for piece in pieces) for end in (0, 1))
        return dict(json.loads(stdout))
    except (APIError, RequestException, OSError) as error:
        raise rank.node.error(f"{name} cannot be asked", why=str(error)[:300], code=ExitCode.SERVING) from error
    except ValueError as error:
        said = (stderr or stdout).decode("utf-8", "replace").strip()
        raise rank.node.error(f"{name} gave no answer", why=said[-300:] or "it ended", code=ExitCode.SERVING) from error
