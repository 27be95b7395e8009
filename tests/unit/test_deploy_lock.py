"""The deployment lock's own program, in this machine's real shell: who holds, who is refused, who may take over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from exl3kit import deploy_lock, nodes
from exl3kit.deploy_lock import Owner
from exl3kit.errors import ExitCode, KitError

ALICE: dict[str, Any] = {"user": "alice", "host": "desk", "pid": 11, "verb": "up demo-tp2"}
BOB: dict[str, Any] = {"user": "bob", "host": "laptop", "pid": 22, "verb": "down demo-tp2"}


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> nodes.Node:
    """This machine as a node whose lock lies in a folder of the test; its engine is never asked."""
    monkeypatch.setattr(deploy_lock, "FILE", str(tmp_path / "lock"))
    return nodes.Node("spark1", None, "", None, True, nodes._run_here, nodes._spawn_here)  # type: ignore[arg-type]


def until(true: Any, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(true())


def test_the_second_is_refused_with_owner_and_age_and_gets_it_after_the_first(node: nodes.Node) -> None:
    first, former = deploy_lock.take(node, ALICE)
    assert former is None
    time.sleep(1.1)
    with pytest.raises(KitError) as refused:
        deploy_lock.take(node, BOB)
    assert refused.value.code == ExitCode.PREFLIGHT
    assert refused.value.why in {f"alice@desk: `kit up demo-tp2`, process 11, for {age} s" for age in (1, 2)}
    assert "--break-lock" in str(refused.value)
    first.check()
    first.release()
    assert list(Path(deploy_lock.FILE).parent.iterdir()) == []
    second, former = deploy_lock.take(node, BOB)
    second.release()
    assert former is None


def test_ones_own_kit_is_called_so_with_how_to_end_it_and_a_namesake_is_not(node: nodes.Node) -> None:
    """Given a lock of this user's running process, then it is `your own`; of one that is not here, another's."""
    mine = {**ALICE, "pid": os.getpid(), "verb": "demo"}
    first, _ = deploy_lock.take(node, mine)
    with pytest.raises(KitError, match="your own `kit demo` is changing what runs there") as refused:
        deploy_lock.take(node, {**ALICE, "pid": 1})
    assert refused.value.code == ExitCode.PREFLIGHT and f"`kill {os.getpid()}`" in str(refused.value.next_step)
    for asking in (BOB, {**ALICE, "host": "laptop"}, {**ALICE, "user": "bob"}):
        with pytest.raises(KitError, match="another operator"):
            deploy_lock.take(node, asking)
    first.release()
    ended = subprocess.Popen(["true"])
    ended.wait()
    elsewhere, _ = deploy_lock.take(node, {**mine, "pid": ended.pid})
    with pytest.raises(KitError, match="another operator") as refused:
        deploy_lock.take(node, mine)
    assert "--break-lock" in str(refused.value.next_step)
    elsewhere.release()


def test_of_many_who_come_at_the_same_time_one_gets_it(node: nodes.Node) -> None:
    def attempt(number: int) -> deploy_lock.Lock | None:
        try:
            return deploy_lock.take(node, {**ALICE, "pid": number})[0]
        except KitError as error:
            assert error.code == ExitCode.PREFLIGHT
            return None

    for _ in range(3):
        with ThreadPoolExecutor(max_workers=8) as pool:
            held = [lock for lock in pool.map(attempt, range(8)) if lock is not None]
        assert len(held) == 1
        held[0].release()


def test_a_kit_that_is_killed_leaves_no_lock(node: nodes.Node) -> None:
    """Given a holder that gets SIGKILL, then its end of the pipe closes and the node's side clears the file away."""
    program = (
        "import sys, time; from exl3kit import deploy_lock, nodes\n"
        "deploy_lock.FILE = sys.argv[1]\n"
        "node = nodes.Node('n', None, '', None, True, nodes._run_here, nodes._spawn_here)\n"
        "lock = deploy_lock.take(node, {'user': 'alice'})\nprint('held', flush=True)\ntime.sleep(60)\n"
    )
    argv = [sys.executable, "-c", program, deploy_lock.FILE]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert Path(deploy_lock.FILE).exists()
        holder.send_signal(signal.SIGKILL)
    assert until(lambda: not Path(deploy_lock.FILE).exists())


def test_a_lock_that_has_fallen_silent_is_taken_over_and_says_whose_it_was(node: nodes.Node) -> None:
    first, _ = deploy_lock.take(node, ALICE)
    silent = time.time() - deploy_lock.STALE_SECONDS - 60
    os.utime(deploy_lock.FILE, (silent, silent))
    second, former = deploy_lock.take(node, BOB)
    assert former is not None and former.fields["user"] == "alice" and former.silent >= 90
    second.check()
    second.release()
    first.release()


def test_break_lock_takes_it_from_the_living_who_then_notice(node: nodes.Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy_lock, "BEAT_SECONDS", 0.1)
    first, _ = deploy_lock.take(node, ALICE)
    second, former = deploy_lock.take(node, BOB, break_lock=True)
    assert former is not None and str(former).startswith("alice@desk: `kit up demo-tp2`")
    assert until(lambda: first._process.poll() is not None)
    with pytest.raises(KitError, match="the deployment lock was lost") as lost:
        first.check()
    assert lost.value.code == ExitCode.PREFLIGHT
    first.release()
    second.check()
    assert '"bob"' in Path(deploy_lock.FILE).read_text()  # the loser's end does not take the winner's file away
    second.release()


def test_a_node_without_room_for_the_lock_says_so(node: nodes.Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy_lock, "FILE", "/nowhere/lock")
    with pytest.raises(KitError, match="cannot be taken") as refused:
        deploy_lock.take(node, ALICE)
    assert refused.value.code == ExitCode.PREFLIGHT


def test_a_user_without_a_name_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)
    assert deploy_lock.user() == "4000000000"


@pytest.mark.parametrize("told", ["", "x", "5 1 {", "5 1 []", "5 1 {}"])
def test_an_unreadable_owner_is_still_an_owner(told: str) -> None:
    assert "somebody@an unknown machine" in str(Owner.read(told))


@pytest.mark.parametrize(("seconds", "words"), [(0, "0 s"), (119, "119 s"), (600, "10 min"), (11_000, "3 h 3 min")])
def test_ages_read_well(seconds: int, words: str) -> None:
    assert deploy_lock.age(seconds) == words
