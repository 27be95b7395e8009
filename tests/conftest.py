"""One session and one closing line for every suite, though tests/vllm needs another Python.

Where vLLM is not installed (the kit's own environments), the tests of tests/vllm are collected and run by a second
pytest under the interpreter that scripts/vllm-env prints, and each of them is an item of this session: failed, skipped
and passed there is failed, skipped and passed here, and a test that never reported has failed. It runs beside the tests
that come before tests/vllm here: most of both wait for one core (12 minutes one after the other on two cores).
"""

from __future__ import annotations

import collections
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
REPORT = "EXL3KIT_SUITE_REPORT"  # in the second pytest: the file that it writes events to, one JSON object a line
SILENCE = 900.0  # seconds without an event after which the second pytest has hung


# ---- in the second pytest: tell what happens -------------------------------------------------------------------------


def tell(**event: object) -> None:
    with Path(os.environ[REPORT]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(event) + "\n")


def pytest_collection_finish(session: pytest.Session) -> None:
    if REPORT in os.environ:
        for item in session.items:
            tell(collected=item.nodeid, markers=sorted({mark.name for mark in item.iter_markers()}))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if REPORT in os.environ:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        expected = getattr(report, "wasxfail", None)
        tell(test=report.nodeid, when=report.when, outcome=report.outcome, text=reason, expected=expected,
             sections=report.sections, seconds=report.duration)  # fmt: skip


# ---- in the session that people start --------------------------------------------------------------------------------


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if path == REPOSITORY / "tests" / "vllm" and REPORT not in os.environ and not vllm_is_here():
        return ForeignSuite.from_parent(parent, path=path)
    return None


def vllm_is_here() -> bool:
    # By its metadata: this very folder, tests/vllm, passes for a module of that name.
    try:
        return bool(importlib.metadata.version("vllm"))
    except importlib.metadata.PackageNotFoundError:
        return False


class SecondPytest:
    """A pytest under vLLM's interpreter, and the events that it tells."""

    def __init__(self, *arguments: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="exl3kit-suite-")
        self._report = Path(self._folder.name, "events")
        self._report.touch()
        self.log = Path(self._folder.name, "log")
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | {REPORT: str(self._report)}
        command = [vllm_python(), "-m", "pytest", "-p", "no:cacheprovider", "--color=no", "-q", *arguments]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=REPOSITORY, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    def events(self) -> Iterator[dict[str, Any]]:
        """Events as they come, until the second pytest has ended."""
        said = time.monotonic()
        with self._report.open(encoding="utf-8") as file:
            rest = ""
            while True:
                ended = self.process.poll() is not None
                rest += file.read()
                *lines, rest = rest.split("\n")
                for line in lines:
                    said = time.monotonic()
                    yield json.loads(line)
                if ended:
                    return
                if time.monotonic() - said > SILENCE:
                    self.end()
                time.sleep(0.05)

    def end(self) -> int:
        """Its exit code; it is ended when it still runs."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def last_words(self) -> str:
        tail = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-40:]
        return f"the pytest under vLLM's Python ended with exit code {self.process.poll()}:\n" + "\n".join(tail)


def vllm_python() -> str:
    """The interpreter of vLLM's environment, made now when it is missing."""
    given = os.environ.get("EXL3KIT_VLLM_PYTHON")
    if given:
        return given
    made = subprocess.run([sys.executable, REPOSITORY / "scripts" / "vllm-env"], stdout=subprocess.PIPE, text=True)
    if made.returncode != 0:
        raise pytest.UsageError(f"scripts/vllm-env ended with exit code {made.returncode}; tests/vllm cannot run")
    return made.stdout.strip()


class ForeignSuite(pytest.Directory):
    """tests/vllm as this session sees it: files and tests as the second pytest collected them."""

    def collect(self) -> Iterator[pytest.Collector]:
        second = SecondPytest("--collect-only", str(self.path))
        found: dict[str, list[tuple[str, list[str]]]] = collections.defaultdict(list)
        for event in second.events():
            file, _, name = event["collected"].partition("::")
            found[file].append((name, event["markers"]))
        if second.end() != 0:
            raise self.CollectError(second.last_words())
        self.running = Running()
        for file, tests in found.items():
            yield ForeignFile.from_parent(self, path=REPOSITORY / file, tests=tests)


class ForeignFile(pytest.File):
    """One file of tests/vllm."""

    def __init__(self, *, tests: list[tuple[str, list[str]]], **options: Any) -> None:
        super().__init__(**options)
        self.tests = tests

    def collect(self) -> Iterator[pytest.Item]:
        for name, markers in self.tests:
            item = ForeignTest.from_parent(self, name=name)
            for marker in markers:
                item.add_marker(marker)
            yield item


class ForeignFailure(Exception):
    """What a test of tests/vllm said when it failed."""


class ForeignTest(pytest.Item):
    """One test of tests/vllm; running it waits for what the second pytest says of it."""

    seconds: float | None = None  # what it took over there

    @property
    def running(self) -> Running:
        return self.parent.parent.running  # type: ignore[union-attr]

    def runtest(self) -> None:
        phases = self.running.phases_of(self)
        self.seconds = sum(event["seconds"] for event in phases)
        for title, content in phases[-1]["sections"]:
            self.add_report_section("call", title.removeprefix("Captured "), content)
        for event in sorted(phases, key=lambda phase: phase["outcome"] == "failed", reverse=True):
            if event["expected"] is not None and event["outcome"] == "skipped":
                pytest.xfail(event["expected"])
            if event["outcome"] == "skipped":
                pytest.skip(event["text"].removeprefix("Skipped: "))
            if event["outcome"] == "failed":
                raise ForeignFailure(event["text"] if event["when"] == "call" else f"{event['when']}: {event['text']}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, ForeignFailure):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, self.name


class Running:
    """The one run of the second pytest."""

    def __init__(self) -> None:
        self.second: SecondPytest | None = None
        self._events: Iterator[dict[str, Any]] = iter(())
        self._phases: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)

    def start(self, tests: Iterable[ForeignTest], config: pytest.Config) -> None:
        self.second = SecondPytest(*(test.nodeid for test in tests))
        self._events = self.second.events()
        config.add_cleanup(self.second.end)

    def phases_of(self, item: ForeignTest) -> list[dict[str, Any]]:
        """setup, call and teardown of one test; raises `ForeignFailure` when they never came."""
        assert self.second is not None
        phases = self._phases[item.nodeid]
        while not (phases and phases[-1]["when"] == "teardown"):
            event = next(self._events, None)
            if event is None:
                raise ForeignFailure(self.second.last_words())
            if "test" in event:
                self._phases[event["test"]].append(event)
        return phases


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    foreign = [item for item in session.items if isinstance(item, ForeignTest)]
    if foreign and not session.config.option.collectonly and not session.testsfailed:
        foreign[0].running.start(foreign, session.config)


# ---- how long each suite took ----------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: pytest.TestReport = yield  # type: ignore[misc]
    if call.when == "call" and isinstance(item, ForeignTest) and item.seconds is not None:
        report.duration = item.seconds
    return report  # type: ignore[return-value]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    spent: dict[str, float] = collections.defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                spent["/".join(report.nodeid.split("/")[:2])] += report.duration
    if REPORT not in os.environ and len(spent) > 1:
        terminalreporter.section("seconds per suite")
        for suite, seconds in spent.items():
            terminalreporter.write_line(f"{seconds:8.1f}  {suite}")
