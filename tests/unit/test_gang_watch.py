"""What a supervisor makes of processes, counters, memory and deaths: pure judgements, each as a table."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "overlay"))

from exl3_vllm import exits, log_lines, post_mortem, watch
from exl3_vllm.state import State
from exl3_vllm.vllm_process import VllmProcess

KILLED, TOLD, FINE, FAILED = signal.SIGKILL.value, signal.SIGTERM.value, 0, 1 << 8  # wait statuses


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("VLLM::EngineCore", "engine core"),
        ("VLLM::EngineCore_DP0", "engine core"),
        ("VLLM::Worker_TP1", "worker TP1"),
        ("VLLM::Worker", "worker"),
        ("python -c from multiprocessing.resource_tracker import main", None),
        ("", None),
    ],
)
def test_processes_are_called_by_what_they_are(command: str, name: str | None) -> None:
    assert watch.process_name(command, is_main=False, head=True) == name
    assert watch.process_name(command, is_main=True, head=True) == "API server"
    assert watch.process_name(command, is_main=True, head=False) == "launcher"


@pytest.mark.parametrize(
    ("ended", "main_status", "culprit"),
    [
        ([(3, KILLED), (2, FAILED), (1, None)], FINE, "worker"),  # the worker took the others with it
        ([(2, FINE), (1, None)], KILLED, "API server"),  # the core was collected before its killed parent
        ([(2, KILLED), (3, TOLD), (1, None)], FAILED, "engine core"),
        ([(3, TOLD), (2, FINE), (1, None)], FINE, "API server"),  # it ended by itself and told the others to
        ([(3, FAILED), (2, FAILED), (1, None)], FAILED, "worker"),
        ([(3, None), (1, None)], FINE, "worker"),  # its parent was faster; the exit code is in the log
    ],
)
def test_who_took_the_others_with_it(ended: list[tuple[int, int | None]], main_status: int, culprit: str) -> None:
    tree = watch.Tree(main=1, head=True)
    tree.named = {1: ("API server", 0), 2: ("engine core", 0), 3: ("worker", 0)}
    tree.ended = dict(ended)
    assert tree.culprit(main_status)[0] == culprit


def test_a_stopped_process_is_found_in_a_real_tree() -> None:
    child = subprocess.Popen(["sleep", "600"])
    tree = watch.Tree(main=child.pid, head=False)
    try:
        tree.look(0.0)
        os.kill(child.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 5
        while watch.read_process(child.pid).state != "T" and time.monotonic() < deadline:  # type: ignore[union-attr]
            time.sleep(0.01)
        tree.look(1.0)
        assert tree.stopped(1.0 + watch.STOPPED_S - 0.1) is None
        assert tree.stopped(1.0 + watch.STOPPED_S) == "launcher"
        os.kill(child.pid, signal.SIGCONT)
    finally:
        child.kill()
        child.wait()
    tree.look(9.0)
    assert tree.has_lost() and tree.stopped(99.0) is None


def test_a_child_that_a_worker_forks_may_end() -> None:
    """Given a titled worker that forks a helper, then the helper bears its title, and its end ends nothing."""
    program = "import os, time\nif os.fork() == 0: time.sleep(600)\ntime.sleep(600)"
    worker = subprocess.Popen(["VLLM::Worker_TP0", "-c", program], executable=sys.executable)
    main = subprocess.Popen(["sleep", "600"])
    tree = watch.Tree(main=main.pid, head=False)
    children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children")
    helper = 0
    try:
        deadline = time.monotonic() + 20
        while not children.read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        helper = int(children.read_text())
        tree.look(0.0)
        assert {name for name, _ in tree.named.values()} == {"launcher", "worker TP0"}
        os.kill(helper, signal.SIGKILL)
        time.sleep(0.1)
        tree.look(1.0)
        assert not tree.has_lost()
    finally:
        for one in (worker, main):
            one.kill()
            one.wait()
    tree.look(2.0)
    assert tree.has_lost()


def test_a_worker_that_is_collected_before_it_was_looked_at_keeps_its_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    # given a worker that was killed, whose parent died of it, so that it is ours to collect before anybody looked
    vllm = VllmProcess(["sleep", "600"], dict(os.environ), head=True)
    gone = iter([(4_000_001, signal.SIGKILL), (0, 0), (4_000_000, 256), (0, 0)])
    vllm.tree.named |= {4_000_000: ("engine core", 1), 4_000_001: ("worker TP0", 1)}
    monkeypatch.setattr(os, "waitpid", lambda pid, options: next(gone))
    # when
    vllm.reap()
    assert vllm.tree.has_lost()
    vllm.reap()
    # then its signal is known, and it is named before the parent that ended with an error
    assert vllm.tree.culprit(None) == ("worker TP0", signal.SIGKILL)
    monkeypatch.undo()
    os.kill(vllm.pid, signal.SIGKILL)
    os.waitpid(vllm.pid, 0)


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        ([b"a\nb", b"c\n\nd"], ["a", "bc", "", "d"]),
        ([b"a\r\nb\r", b"\nc\r\n"], ["a", "b", "c"]),
        # a bar: a state is given as soon as it stands there, and takes the place of the one before
        ([b"\rload 1", b"\rload 2", b"\n", b"after\n"], ["load 1", "=load 2", "after"]),
        ([b"\rload 1\rload 2\n\rgraph 1\n"], ["load 1", "=load 2", "graph 1"]),
        ([b"load 1\r", b"load 2\r", b"      \r", b"after\n"], ["load 1", "=load 2", "=after"]),
        # vLLM writes the name of its process once, before the first state
        ([b"(W pid=7) ", b"\rload 1", b"\rload 2\n", b"x\n"], ["(W pid=7) load 1", "=(W pid=7) load 2", "x"]),
        ([b"\x1b[36m(W pid=7)\x1b[0;0m \rload 1\n"], ["\x1b[36m(W pid=7)\x1b[0;0m load 1"]),
        ([b"no end"], ["no end"]),
        ([b"x" * (log_lines.LONGEST + 1), b"y\n"], ["x" * (log_lines.LONGEST + 1), "y"]),
    ],
)  # fmt: skip
def test_every_state_of_a_progress_bar_is_a_line(chunks: list[bytes], lines: list[str]) -> None:
    output = log_lines.Lines()
    told = [pair for chunk in chunks for pair in output.feed(chunk)] + list(output.end())
    assert [f"{'=' if again else ''}{line.decode()}" for line, again in told] == lines


def test_a_bar_is_in_the_log_while_it_runs_and_its_last_state_in_the_post_mortem(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Given a bar that waits in the middle, then the engine has its first state already; kept is the last one."""
    bar = "import sys; say = sys.stderr.write; say('before\\n'); say('\\rload 1'); input(); say('\\rload 2\\n')"
    ours, theirs = os.pipe()
    saved = os.dup(0)
    os.dup2(ours, 0)
    try:
        vllm = VllmProcess([sys.executable, "-c", bar], dict(os.environ), head=True)
    finally:
        os.dup2(saved, 0)
        os.close(saved)
        os.close(ours)
    err = next(pipe for pipe, to in vllm.pipes.items() if to == 2)
    seen = ""
    while "load 1\n" not in seen:
        assert vllm.pump(err)
        seen += capfd.readouterr().err
    os.write(theirs, b"\n")
    os.close(theirs)
    while vllm.pump(err):
        pass
    os.waitpid(vllm.pid, 0)
    assert seen + capfd.readouterr().err == "before\nload 1\nload 2\n"
    assert list(vllm.lines) == ["before", "load 2"]


METRICS = """# HELP vllm:num_requests_running Number of requests
vllm:num_requests_running{engine="0",model_name="a b"} 2.0
vllm:num_requests_waiting{engine="0"} 1.0
vllm:generation_tokens_total{engine="0"} 40.0
vllm:generation_tokens_total{engine="1"} 2.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:generation_tokens_created{engine="0"} 1.7e+09
process_open_fds 30
vllm:prompt_tokens_total 7
"""


def test_counters_are_read_from_metrics() -> None:
    wanted = {"running": 2, "waiting": 1, "generation_tokens": 42, "kv_usage": 0.25, "prompt_tokens": 7}
    assert watch.parse_metrics(METRICS) == wanted
    assert watch.parse_metrics("nonsense {\nvllm:num_requests_running{} x") == {}


@pytest.mark.parametrize(
    ("samples", "stalled"),
    [
        ([{"running": 1, "generation_tokens": 5}] * 10, True),
        ([{"waiting": 1}] * 10, True),
        ([{"running": 0, "generation_tokens": 5}] * 10, False),  # nobody waits
        ([{"running": 1, "generation_tokens": n} for n in range(10)], False),
        ([{"running": 1, "kv_usage": n / 100} for n in range(10)], False),  # a long prefill fills the cache
        ([], True),  # the API does not answer
        ([{"running": 0, "unanswered": 1.0}] * 10, True),  # the first step of an engine that had nothing to do hangs
        ([{"running": 0, "unanswered": 1.0, "generation_tokens": n} for n in range(10)], False),
    ],
)
def test_requests_that_wait_while_nothing_moves_are_a_stall(samples: list[dict[str, float]], stalled: bool) -> None:
    progress = watch.Progress(since=0.0)
    for number, sample in enumerate(samples):
        progress.take(sample, float(number))
    assert (progress.stalled_s(9.0) > 5) == stalled


@pytest.mark.parametrize(
    "files",
    [
        {"memory.max": "max\n", "memory.current": "500\n", "memory.events": "low 0\noom 3\noom_kill 2\n"},
        {
            "memory/memory.limit_in_bytes": "9223372036854771712\n",
            "memory/memory.usage_in_bytes": "500\n",
            "memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
        },
    ],
)
def test_memory_of_both_versions_of_control_groups(files: dict[str, str], tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = watch.memory(group=tmp_path)
    assert (found["limit"], found["used"], found["oom_kills"]) == (None, 500, 2)
    assert found["available"] > 0
    nothing = watch.memory(proc=tmp_path / "none", group=tmp_path / "none")
    assert set(nothing.values()) == {None}


def death(rank: int, kind: str, at: float, **more: Any) -> dict[str, Any]:
    return post_mortem.record(rank, kind, more.pop("process", "worker"), f"{kind} of {rank}", at, **more)


@pytest.mark.parametrize(
    ("records", "first"),
    [
        ([death(0, "ended", 5.0, peer=1), death(1, "exit", 4.9)], (1, "exit")),
        ([death(0, "exit", 5.0, exit_code=1), death(1, "exit", 4.0, exit_code=1)], (1, "exit")),
        ([death(0, "exit", 4.0, exit_code=1), death(1, "exit", 5.0, signal="SIGKILL")], (1, "exit")),  # by force
        ([death(0, "exit", 4.0, exit_code=1), death(1, "exit", 30.0, signal="SIGKILL")], (0, "exit")),  # much later
        ([death(0, "exit", 4.0, signal="SIGTERM"), death(1, "oom", 5.0)], (1, "oom")),
        ([death(0, "silent", 5.0, peer=1)], (1, "silent")),  # rank 1 could say nothing
    ],
)
def test_who_died_first(records: list[dict[str, Any]], first: tuple[int, str]) -> None:
    for order in (records, records[::-1]):
        found = post_mortem.find_first({one["rank"]: one for one in order}, lambda rank: 0.0, {})
        assert (found["rank"], found["kind"]) == first


@pytest.mark.parametrize(
    ("own", "heard", "first"),
    [
        (death(0, "exit", 10.0, exit_code=1), 9.6, 1),  # its power went, and its closed connections ended our worker
        (death(0, "exit", 10.0, exit_code=1), 11.9, 0),  # it beat on: it was not the cause
        (death(0, "exit", 10.0, signal="SIGKILL"), 9.6, 0),  # nobody's death kills a process here
        (death(0, "stall", 10.0), 9.6, 0),
    ],
)
def test_a_rank_that_vanished_before_an_exit_is_its_cause(own: dict[str, Any], heard: float, first: int) -> None:
    assert post_mortem.find_first({0: own}, lambda rank: 0.0, {1: heard})["rank"] == first


def test_times_of_another_machine_are_put_on_this_ones_clock() -> None:
    records = {0: death(0, "exit", 100.0), 1: death(1, "exit", 5000.0)}
    assert post_mortem.find_first(records, lambda rank: -4901.0 * rank, {})["rank"] == 1
    assert post_mortem.find_first(records, lambda rank: -4899.0 * rank, {})["rank"] == 0


def test_reports_are_kept_but_not_for_ever_and_a_full_disk_is_said(tmp_path: Path) -> None:
    for incarnation in range(15):
        report = post_mortem.compose(
            {0: death(0, "exit", 1.0)},
            world=2,
            generation="g",
            incarnation=incarnation,
            offset=lambda rank: 0.0,
            last_heard={},
        )
        assert post_mortem.save(report, tmp_path) is None
    newest = post_mortem.newest(tmp_path)
    assert newest is not None and (newest["incarnation"], newest["missing"]) == (14, [1])
    assert len(list(tmp_path.glob("post-mortem-*.json"))) == post_mortem.KEPT
    assert "cannot write the post-mortem to /proc" in str(post_mortem.save(report, Path("/proc")))
    assert post_mortem.newest(tmp_path / "none") is None


def test_the_api_key_is_in_no_report() -> None:
    assert post_mortem.last_lines(["key sesame here", ""], "sesame") == ["key *** here"]
    assert len(post_mortem.last_lines(["x" * 1000] * 100, None)) == post_mortem.LINES


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down", (None, "SIGKILL")),
        ("died (exit code: 3)", (3, None)),
        ("nothing of it", (None, None)),
    ],
)
def test_exit_codes_that_only_a_log_tells(line: str, told: tuple[int | None, str | None]) -> None:
    assert exits.said_exit_code(["before", line, "after"]) == told


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"kind": "exit", "process": "API server", "exit_code": 0}, 1),
        ({"kind": "exit", "process": "API server", "exit_code": 9}, 9),
        ({"kind": "exit", "process": "launcher", "signal": "SIGKILL"}, 137),
        ({"kind": "exit", "process": "worker", "signal": "SIGKILL"}, 7),
        ({"kind": "stall", "process": "engine"}, 7),
    ],
)
def test_the_exit_code_of_a_rank(fields: dict[str, Any], code: int) -> None:
    assert exits.exit_code(fields) == code


def test_pauses_grow_to_a_cap_and_memory_outlives_the_process(tmp_path: Path) -> None:
    state = State.load(tmp_path)
    pauses = []
    for number in range(9):
        pauses.append(state.pause(60.0))
        state.enter(number + 1, "g")
        state.leave(failed=True)
        state = State.load(tmp_path)
    assert pauses == [0, 0, 2, 4, 8, 16, 32, 60, 60]
    assert state.known == 9
    state.forget_failures_of_others("g")
    assert state.pause(60.0) == 60
    state.forget_failures_of_others("what an operator started anew")
    assert state.pause(60.0) == 0
    state.leave(failed=False)
    assert State.load(tmp_path).pause(60.0) == 0


def test_an_incarnation_left_without_a_word_is_told_unless_an_operator_removed_it(tmp_path: Path) -> None:
    state = State.load(tmp_path)
    state.enter(4, "g1")
    again = State.load(tmp_path)
    assert again.left_open("g2") is None
    told = again.left_open("g1")
    assert told is not None and told[0] == 4 and "was killed" in told[1]
    again.boot = "another"
    assert "machine was restarted" in str(again.left_open("g1"))
    (tmp_path / "gang.json").write_text("{")
    assert State.load(tmp_path).known == 0
