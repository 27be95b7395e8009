"""The entry point of every container: one rank of a deployment. Standard library only.

    python -m exl3_vllm.rank -- vllm serve ...    start vLLM and stay its parent until it ends
    python -m exl3_vllm.rank --health             exit 0 when this rank is what its role promises
    python -m exl3_vllm.rank --report             status and receipts of this rank, one JSON object
    python -m exl3_vllm.rank --ask REQUEST        wait for the API, send one request, print the answer as JSON

vLLM's rank 0 ends with status 0 after a peer has died, and its `/health` stays green meanwhile, so neither is trusted
here: an end that nobody asked for is a failure, and the health of a headless rank is its receipt and its process.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

PLUGIN = "exl3"  # its name in the entry point group below
PLUGIN_GROUP = "vllm.general_plugins"
WATCHED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)
BUILT_CACHE = Path("/opt/exl3/vllm-cache")
BEAT_S = 1.0  # how often the status file is renewed
STALE_S = 15.0  # a status older than this belongs to a supervisor that no longer runs

# A headless rank holds no requests, but its executor needs 10 s to give up after SIGTERM; rank 0 answers what it has.
GRACE_S = {"head": 15.0, "headless": 2.0}

USAGE = "usage: python -m exl3_vllm.rank (-- COMMAND... | --health | --report | --ask REQUEST)"
EXIT_USAGE, EXIT_PREFLIGHT, EXIT_VERIFICATION, EXIT_SERVING = 2, 3, 5, 7  # the kit's exit codes


class RankError(Exception):
    """A sentence for the operator and the exit code that goes with it."""

    def __init__(self, sentence: str, code: int) -> None:
        super().__init__(sentence)
        self.code = code


@dataclass(frozen=True)
class Settings:
    """What the environment of a container says about its rank (the kit renders these names into the env file)."""

    rank: int
    generation: str
    role: str
    model_dir: Path
    run_dir: Path
    receipt_dir: Path
    api: str
    api_key_file: Path | None

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
        return cls(
            rank=int(rank),
            generation=need("EXL3_GENERATION"),
            role="head" if rank == "0" else "headless",
            model_dir=Path(need("EXL3_MODEL_DIR")),
            run_dir=run_dir,
            receipt_dir=Path(environ.get("EXL3_RECEIPT_DIR") or run_dir / "receipts"),
            api=need("EXL3_API"),
            api_key_file=Path(key_file) if key_file else None,
        )

    @property
    def status_file(self) -> Path:
        return self.run_dir / "status.json"

    def api_key(self) -> str | None:
        """The key of the API, read from its mounted file so that `inspect`, argv and logs never show it."""
        if self.api_key_file is None:
            return None
        try:
            key = self.api_key_file.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise RankError(
                f"cannot read the API key in {self.api_key_file}: {error.strerror}", EXIT_PREFLIGHT
            ) from error
        if not key:
            raise RankError(f"the API key file {self.api_key_file} is empty", EXIT_PREFLIGHT)
        return key


def say(settings: Settings, sentence: str) -> None:
    print(f"exl3 rank {settings.rank}: {sentence}", file=sys.stderr, flush=True)


# Before vLLM starts ---------------------------------------------------------------------------------------------------


def check_plugin(environ: Mapping[str, str]) -> None:
    """Refuse when vLLM could start without the EXL3 plugin: vLLM logs and skips a plugin that it cannot load.

    That it did load, with every tensor, is what the receipt says later; this catches the plain cases in milliseconds.
    """
    allowed = environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in [name.strip() for name in allowed.split(",")]:
        raise RankError(f"VLLM_PLUGINS={allowed!r} leaves out {PLUGIN!r}; unset it or add the name", EXIT_PREFLIGHT)
    found = [entry for entry in metadata.entry_points(group=PLUGIN_GROUP) if entry.name == PLUGIN]
    if not found:
        raise RankError(
            f"this image has no {PLUGIN!r} in the entry points {PLUGIN_GROUP}; build it again with `kit build`",
            EXIT_VERIFICATION,
        )
    try:
        present = util.find_spec(found[0].module) is not None
    except ImportError:
        present = False
    if not present:
        raise RankError(
            f"the plugin's module {found[0].module} is missing; build again with `kit build`", EXIT_VERIFICATION
        )


def check_model(model_dir: Path) -> None:
    """Refuse when the rank's user cannot read the model; vLLM would say so after 20 s, and only on this rank."""
    if not model_dir.is_dir():
        raise RankError(f"no model directory at {model_dir}; is it mounted?", EXIT_PREFLIGHT)
    if not os.access(model_dir, os.R_OK | os.X_OK):
        raise RankError(
            f"user {os.getuid()} cannot list {model_dir}; make it world-readable (chmod -R a+rX)", EXIT_PREFLIGHT
        )
    for path in sorted(model_dir.iterdir()):
        if not path.exists():
            raise RankError(f"{path} is a link to nothing; copy the weights again", EXIT_PREFLIGHT)
        if not os.access(path, os.R_OK):
            raise RankError(
                f"user {os.getuid()} cannot read {path}; make it world-readable (chmod a+r)", EXIT_PREFLIGHT
            )
    if not (model_dir / "config.json").is_file():
        raise RankError(f"{model_dir} has no config.json, so it is not a model directory", EXIT_PREFLIGHT)


def seed_cache(environ: Mapping[str, str]) -> None:
    """Lay what the image's build found out (`exl3_vllm.modelinfo`) where vLLM looks; it checks each file by its hash.

    Without it vLLM only starts later, so an image or a cache that does not take it is no reason to refuse.
    """
    cache = environ.get("VLLM_CACHE_ROOT")
    if cache and BUILT_CACHE.is_dir() and not Path(cache).exists():
        with contextlib.suppress(OSError):
            shutil.copytree(BUILT_CACHE, cache, copy_function=shutil.copyfile)


# While vLLM runs ------------------------------------------------------------------------------------------------------


def write_json(path: Path, fields: Mapping[str, Any]) -> None:
    """Replace `path` in one step: a reader sees the old or the new object, never half of one."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(fields, sort_keys=True), encoding="utf-8")
    new.replace(path)


def start(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Start vLLM in a session of its own with default signal handling; returns its pid."""
    try:
        return os.posix_spawnp(
            argv[0], list(argv), dict(environ), setsid=True, setsigmask=(), setsigdef=(*WATCHED, signal.SIGPIPE)
        )
    except OSError as error:
        raise RankError(f"cannot start {argv[0]}: {error.strerror}", EXIT_SERVING) from error


def reap(main_pid: int) -> int | None:
    """Collect every ended child (as process 1 we inherit orphans); the wait status of `main_pid` once it has ended."""
    ended = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        if pid == main_pid:
            ended = status


def kill_session(main_pid: int) -> None:
    """SIGKILL whatever is left of vLLM's process group."""
    try:
        os.killpg(main_pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def verdict(returncode: int, *, asked: bool) -> tuple[int, str]:
    """Exit code of the rank and the sentence for its log, from how vLLM ended.

    `returncode` is as in `subprocess`: negative for a signal. An end that was asked for is 0; any other end is not 0.
    """
    how = f"signal {signal.Signals(-returncode).name}" if returncode < 0 else f"status {returncode}"
    if asked:
        return 0, f"vLLM ended with {how} after it was told to stop"
    if returncode == 0:
        return 1, "vLLM ended by itself with status 0; a server that nobody stopped has failed (did a peer die?)"
    return (128 - returncode if returncode < 0 else returncode), f"vLLM ended by itself with {how}"


def supervise(argv: Sequence[str], settings: Settings, environ: Mapping[str, str]) -> int:
    """Run vLLM until it ends: forward SIGTERM and SIGINT, reap, beat; returns the rank's exit code."""
    pid = start(argv, environ)
    say(settings, f"generation {settings.generation}, {settings.role}, vLLM is process {pid}")
    status = {
        "rank": settings.rank,
        "generation": settings.generation,
        "role": settings.role,
        "pid": pid,
        "started": time.time(),
    }
    stop_by: float | None = None
    while True:
        state = "running" if stop_by is None else "stopping"
        write_json(settings.status_file, {**status, "state": state, "beat": time.time()})
        event = signal.sigtimedwait(WATCHED, BEAT_S)
        ended = reap(pid)
        if ended is not None:
            break
        if event is not None and event.si_signo != signal.SIGCHLD and stop_by is None:
            stop_by = time.monotonic() + GRACE_S[settings.role]
            say(settings, f"told to stop, vLLM has {GRACE_S[settings.role]:.0f} s")
            os.kill(pid, signal.SIGTERM)
        if stop_by is not None and time.monotonic() > stop_by:
            kill_session(pid)
    kill_session(pid)
    code, sentence = verdict(os.waitstatus_to_exitcode(ended), asked=stop_by is not None)
    end = {"state": "ended", "exit_code": code, "why": sentence, "beat": time.time()}
    write_json(settings.status_file, {**status, **end})
    say(settings, sentence)
    return code


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Check what can be checked in milliseconds, then run vLLM."""
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)  # a stop during the checks waits for the loop that handles it
    settings = Settings.from_environ(environ)
    check_plugin(environ)
    check_model(settings.model_dir)
    seed_cache(environ)
    try:
        settings.receipt_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RankError(f"cannot write receipts to {settings.receipt_dir}: {error.strerror}", EXIT_PREFLIGHT) from error
    child = {**environ, "EXL3_RECEIPT_DIR": str(settings.receipt_dir)}
    key = settings.api_key() if settings.role == "head" else None
    if key is not None:
        child["VLLM_API_KEY"] = key
    return supervise(argv, settings, child)


# Asked from outside, by the engine's health check and by the kit ------------------------------------------------------


def read_receipts(receipt_dir: Path) -> list[dict[str, Any]]:
    """Every receipt that the plugin has written in this container, by file name."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(receipt_dir.glob("*.json"))]


def alive(pid: int) -> bool:
    """Whether the process exists and is more than a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def health(settings: Settings) -> str | None:
    """Why this rank is not healthy, or None.

    Head: vLLM runs, has its receipt and answers `/health`. Headless: vLLM runs and has its receipt (it has no API).
    """
    try:
        status = json.loads(settings.status_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "the supervisor has not started yet"
    if status["state"] != "running":
        return str(status.get("why", status["state"]))
    if time.time() - status["beat"] > STALE_S:
        return f"the supervisor's last beat is {time.time() - status['beat']:.0f} s old"
    if not alive(status["pid"]):
        return "vLLM's process is gone"
    if not any(settings.receipt_dir.glob("*.json")):
        return "the model is not loaded yet (no receipt)"
    if settings.role == "head":
        code, words = get(settings.api + "/health", timeout=5)
        return None if code == 200 else f"the API answers {code or words}"
    return None


def get(url: str, *, timeout: float, body: bytes | None = None, key: str | None = None) -> tuple[int, str]:
    """HTTP status and text; status 0 and the reason when there is no answer."""
    headers = {"Content-Type": "application/json"} if body is not None else {}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url, data=body, headers=headers)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy on the way to oneself
    try:
        with direct.open(request, timeout=timeout) as answer:
            return answer.status, answer.read().decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode("utf-8", "replace")
    except OSError as error:  # URLError, timeouts and resets alike
        return 0, str(getattr(error, "reason", error))


def ask(settings: Settings, request: Mapping[str, Any]) -> dict[str, Any]:
    """Wait until the API is up, send one request, return `{status, seconds, waited, answer}`.

    `request`: `path`, `body` (JSON, or null for GET), `wait_s` (how long the API may take to come up), `timeout_s` (how
    long one answer may take). status is 0 when no API or no answer came; `answer` then says why.
    """
    begun = time.monotonic()
    while True:
        code, text = get(settings.api + "/health", timeout=5)
        if code == 200:
            break
        if time.monotonic() - begun > request["wait_s"]:
            why = f"no /health within {request['wait_s']:.0f} s, last: {code or text}"
            return {"status": 0, "seconds": 0.0, "waited": time.monotonic() - begun, "answer": why}
        time.sleep(0.25)
    waited = time.monotonic() - begun
    body = None if request.get("body") is None else json.dumps(request["body"]).encode()
    sent = time.monotonic()
    code, text = get(settings.api + request["path"], timeout=request["timeout_s"], body=body, key=settings.api_key())
    seconds = time.monotonic() - sent
    try:
        answer: Any = json.loads(text)
    except ValueError:
        answer = text
    return {"status": code, "seconds": seconds, "waited": waited, "answer": answer}


def report(settings: Settings) -> dict[str, Any]:
    """What this rank says about itself: its supervisor's status, its health and its receipts."""
    try:
        status = json.loads(settings.status_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        status = None
    return {"status": status, "unhealthy": health(settings), "receipts": read_receipts(settings.receipt_dir)}


def main(argv: Sequence[str]) -> int:
    try:
        match list(argv):
            case ["--", _, *_]:
                return run(argv[1:], os.environ)
            case ["--health"]:
                why = health(Settings.from_environ(os.environ))
                print(why or "healthy")
                return 0 if why is None else 1
            case ["--report"]:
                print(json.dumps(report(Settings.from_environ(os.environ))))
                return 0
            case ["--ask", request]:
                print(json.dumps(ask(Settings.from_environ(os.environ), json.loads(request))))
                return 0
        raise RankError(USAGE, EXIT_USAGE)
    except RankError as error:
        print(f"exl3 rank {os.environ.get('EXL3_RANK', '?')}: {error}", file=sys.stderr, flush=True)
        return error.code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
