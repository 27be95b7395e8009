"""An engine's builders: BuildKit through the docker CLI (its buildx, or built into 20.10), else the classic one.

All get the same context over the same socket, build without a network, and report their steps with seconds. BuildKit is
worth its two dialects: on engine 20.10 the classic builder reads and writes the 2 GB of wheels twice as often.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from exl3kit import context, paths
from exl3kit.errors import ExitCode, KitError

if TYPE_CHECKING:
    from exl3kit.nodes import Node
    from exl3kit.progress import Progress, Stage

DOCKER_VARIABLE = "EXL3KIT_DOCKER"
RAWJSON_SINCE = (0, 13)  # of buildx; older ones cannot report their steps to a program
BUILTIN_MAJORS = (20, 22)  # of the CLI (there is no 21); from 23 on, BuildKit needs the plugin
SILENT_SECONDS = 1800  # longest wait for one line of the classic builder (an install of 2 GB says nothing)
SHOWN_SECONDS = 0.5  # shorter steps are not worth a line
LOG_TAIL = 12

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """One build: its tag, build arguments, labels, files, and whether cached steps may be used."""

    tag: str
    args: Mapping[str, str]
    labels: Mapping[str, str]
    entries: Sequence[context.Entry]
    cache: bool = True


class Log:
    """What the steps printed: all of it in a file, the end for an error."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pieces: list[str] = []

    def add(self, text: str) -> None:
        """Add a piece of output; pieces need not end where lines do."""
        self._pieces.append(text)

    @property
    def lines(self) -> list[str]:
        text = "".join(self._pieces).replace("\r\n", "\n").replace("\r", "\n")
        return [line.rstrip() for line in text.splitlines() if line.strip()]

    def save(self) -> None:
        self.path.write_text("\n".join(self.lines) + "\n", encoding="utf-8")


def docker_cli() -> str | None:
    """The docker program: `EXL3KIT_DOCKER`, or the one on PATH."""
    return os.environ.get(DOCKER_VARIABLE) or shutil.which("docker")


def buildkit() -> str | None:
    """How the docker CLI here reaches BuildKit: `buildx`, `builtin` (20.10 to 22), or None."""
    said = _said("buildx", "version")
    version = re.search(r"\bv?(\d+)\.(\d+)", said)
    if version and "buildx" in said and (int(version[1]), int(version[2])) >= RAWJSON_SINCE:
        return "buildx"
    major = re.search(r"^Docker version (\d+)\.", _said("--version"))
    return "builtin" if major and int(major[1]) in BUILTIN_MAJORS else None


def _said(*argv: str) -> str:
    """What the docker CLI says, or nothing when there is none."""
    cli = docker_cli()
    if cli is None:
        return ""
    try:
        return subprocess.run([cli, *argv], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def build(request: Request, node: Node, stage: Stage, progress: Progress) -> None:
    """Build on the node's engine; afterwards the tag is there, or nothing is.

    Raises `KitError` (build) with the failed step and the end of its output; the whole log is in the cache.
    """
    log = Log(paths.cache_dir("logs") / f"build-{request.tag.replace(':', '-').replace('/', '-')}.log")
    stage.total = sum(entry.size for entry in request.entries)
    try:
        if kind := buildkit():
            _buildkit(kind, request, node, stage, progress, log)
        else:
            _classic(request, node, stage, progress, log)
    finally:
        log.save()
        logger.debug("what the builder printed for %s:\n%s", request.tag, "\n".join(log.lines))


def _failed(node: Node, log: Log, step: str, why: str, progress: Progress) -> KitError:
    for line in log.lines[-LOG_TAIL:]:
        progress.tell(line)
    full = "no space left on device" in why or any("no space left on device" in line.lower() for line in log.lines[-5:])
    return node.error(
        f"the build failed in `{step}`" if step else "the build failed",
        why="no space left on device" if full else why,
        next_step=f"free space on the node (`docker system df`); log: {log.path}" if full else f"read {log.path}",
        code=ExitCode.BUILD,
    )


# ---- BuildKit --------------------------------------------------------------------------------------------------------


def buildkit_argv(cli: str, kind: str, request: Request) -> list[str]:
    """argv of one BuildKit build with the context on stdin.

    `--builder default` is the engine's own BuildKit, whatever builder the user has chosen for other work.
    """
    buildx = ["buildx", "build", "--builder", "default", "--progress", "rawjson"]
    argv = [cli, *(buildx if kind == "buildx" else ["build", "--progress", "plain"]), "--network", "none"]
    argv += ["--tag", request.tag, *(() if request.cache else ("--no-cache",))]
    for name, value in sorted(request.args.items()):
        argv += ["--build-arg", f"{name}={value}"]
    for name, value in sorted(request.labels.items()):
        argv += ["--label", f"{name}={value}"]
    return [*argv, "-"]


def _buildkit(kind: str, request: Request, node: Node, stage: Stage, progress: Progress, log: Log) -> None:
    cli = docker_cli()
    assert cli is not None
    # An attestation would turn the image into an index, whose digest differs from store to store.
    environment = {**os.environ, "DOCKER_HOST": node.engine_url, "BUILDX_NO_DEFAULT_ATTESTATIONS": "1"}
    environment |= {"DOCKER_BUILDKIT": "1"}
    environment.pop("DOCKER_CONTEXT", None)
    steps = (Steps if kind == "buildx" else PlainSteps)(stage, progress, log)
    with context.streamed(request.entries, stage) as tar:
        process = subprocess.Popen(
            buildkit_argv(cli, kind, request),
            stdin=tar,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        tar.close()  # the builder's copy is the only one, so that its end is noticed
        try:
            assert process.stderr is not None
            rest = steps.follow(process.stderr)
            process.wait()
        finally:
            process.terminate()
            process.wait()
    if process.returncode:
        failed, why = steps.failure()
        raise _failed(node, log, failed, why or (rest.strip().splitlines() or ["it said nothing"])[-1], progress)


class Steps:
    """BuildKit's status stream: vertexes with start, end and error, and what they print."""

    def __init__(self, stage: Stage, progress: Progress, log: Log) -> None:
        self._stage, self._progress, self._log = stage, progress, log
        self._vertexes: dict[str, dict[str, Any]] = {}
        self._reported: set[str] = set()

    def follow(self, stream: IO[bytes]) -> str:
        """Read statuses to the end of the stream; returns the plain text that came after them."""
        decoder = json.JSONDecoder()
        text = ""
        for chunk in iter(lambda: os.read(stream.fileno(), 1 << 16), b""):
            text += chunk.decode(errors="replace")
            while (start := text.find("{")) >= 0:
                try:
                    status, end = decoder.raw_decode(text, start)
                except ValueError:
                    break  # the rest of it is still to come (or it is no status)
                text = text[end:]
                self.take(status)
        return text

    def take(self, status: Mapping[str, Any]) -> None:
        """Take one status: remember its vertexes, log its output, report what has ended."""
        for vertex in status.get("vertexes") or ():
            known = self._vertexes.setdefault(vertex["digest"], {})
            known.update({key: value for key, value in vertex.items() if value})
            if "started" in known and "completed" not in known:
                self._stage.say(shortened(known["name"]))
            elif "completed" in known and "started" in known:
                self._report(vertex["digest"], known)
        for printed in status.get("logs") or ():
            self._log.add(base64.b64decode(printed["data"]).decode(errors="replace"))

    def _report(self, digest: str, vertex: Mapping[str, Any]) -> None:
        if digest in self._reported or vertex["name"].startswith("[internal]"):
            return
        self._reported.add(digest)
        seconds = (_moment(vertex["completed"]) - _moment(vertex["started"])).total_seconds()
        cached = "cached" if vertex.get("cached") else ""
        if (seconds >= SHOWN_SECONDS or cached) and not vertex.get("error"):
            self._progress.step(shortened(vertex["name"]), seconds, cached)

    def failure(self) -> tuple[str, str]:
        """(step, error) of the vertex that failed; the steps beside it were only cancelled."""
        failed = [vertex for vertex in self._vertexes.values() if vertex.get("error")]
        failed.sort(key=lambda vertex: "canceled" in vertex["error"])
        if not failed:
            return "", ""
        # "process "/bin/sh -c ..." did not complete successfully: exit code: 1": the step is named already
        why = str(failed[0]["error"]).replace("\n", " ").rpartition(" did not complete successfully: ")[2]
        return shortened(failed[0]["name"]), why


def _moment(stamp: str) -> datetime:
    """RFC 3339 with nanoseconds, which Python cuts at microseconds."""
    return datetime.fromisoformat(re.sub(r"(\.\d{6})\d*", r"\1", stamp).replace("Z", "+00:00"))


def shortened(step: str) -> str:
    """A step's name on one line of at most 72 characters."""
    line = re.sub(r"\s+", " ", step).strip()
    return line if len(line) <= 72 else f"{line[:69]}..."


class PlainSteps:
    """BuildKit's plain progress of the 20.10 CLI: `#7 [2/3] RUN make`, `#7 0.41 output`, `#7 DONE 3.2s`."""

    def __init__(self, stage: Stage, progress: Progress, log: Log) -> None:
        self._stage, self._progress, self._log = stage, progress, log
        self._names: dict[str, str] = {}
        self._failed = ("", "")

    def follow(self, stream: IO[bytes]) -> str:
        """Read lines to the end of the stream; returns the last one that belongs to no step."""
        last = ""
        for raw in stream:
            line = raw.decode(errors="replace").rstrip()
            if match := re.match(r"#(\d+) (.+)", line):
                self.take(match[1], match[2])
            elif line and not line.startswith(("-", " ", ">", "#")):
                last = line
        return last

    def take(self, number: str, said: str) -> None:
        """Take one line of one step; the first is its name."""
        name = self._names.setdefault(number, shortened(said))
        if match := re.fullmatch(r"DONE (\d+\.\d+)s", said):
            if float(match[1]) >= SHOWN_SECONDS and not name.startswith("[internal]"):
                self._progress.step(name, float(match[1]))
        elif said == "CACHED":
            self._progress.step(name, 0.0, "cached")
        elif said.startswith("ERROR: "):
            self._failed = (name, said.removeprefix("ERROR: ").rpartition("]: ")[2])
        elif match := re.match(r"\d+\.\d+ (.*)", said):
            self._log.add(f"{match[1]}\n")
        else:
            self._stage.say(name)

    def failure(self) -> tuple[str, str]:
        """(step, error) of the step that failed."""
        return self._failed


# ---- the classic builder ---------------------------------------------------------------------------------------------


def _classic(request: Request, node: Node, stage: Stage, progress: Progress, log: Log) -> None:
    from docker.errors import APIError
    from requests.exceptions import RequestException

    steps = ClassicSteps(stage, progress, log)
    with node.patient_engine(SILENT_SECONDS) as engine, context.streamed(request.entries, stage) as tar:
        try:
            answer: Iterator[dict[str, Any]] = engine.api.build(
                fileobj=tar,
                custom_context=True,
                decode=True,
                tag=request.tag,
                buildargs=dict(request.args),
                labels=dict(request.labels),
                network_mode="none",
                nocache=not request.cache,
                rm=True,
                forcerm=True,
            )
            for message in answer:
                steps.take(message)
        except (APIError, RequestException) as error:
            raise _failed(node, log, steps.current, str(error), progress) from error
        finally:
            drop_intermediate(node)
    steps.end()
    if steps.error:
        raise _failed(node, log, steps.current, steps.error, progress)


class ClassicSteps:
    """The classic builder's stream: `Step 3/9 : RUN ...` lines, output, and an error at the end."""

    def __init__(self, stage: Stage, progress: Progress, log: Log) -> None:
        self._stage, self._progress, self._log = stage, progress, log
        self._since = time.monotonic()
        self._cached = False
        self.current = ""
        self.error = ""

    def take(self, message: Mapping[str, Any]) -> None:
        """Take one message of the stream."""
        self._log.add(str(message.get("stream", "")))
        text = str(message.get("stream", "")).strip()
        if match := re.match(r"Step \d+/\d+ : (.*)", text, re.DOTALL):
            self.end()
            self.current, self._since, self._cached = shortened(match[1]), time.monotonic(), False
            self._stage.say(self.current)
        elif text == "---> Using cache":
            self._cached = True
        if "error" in message:
            self.error = str(message["error"]).replace("\n", " ")
            self._log.add(f"\n{self.error}\n")

    def end(self) -> None:
        """The current step has ended."""
        seconds = time.monotonic() - self._since
        if self.current and not self.error and (seconds >= SHOWN_SECONDS or self._cached):
            self._progress.step(self.current, seconds, "cached" if self._cached else "")


def drop_intermediate(node: Node) -> None:
    """Remove the stages that the classic builder leaves behind untagged (wheels: 2.5 GB, compiled: 1 GB)."""
    from docker.errors import DockerException

    filters = {"dangling": True, "label": "io.exl3kit.stage"}
    for image in node.engine.images.list(filters=filters):
        with suppress(DockerException):
            node.engine.images.remove(str(image.id))
