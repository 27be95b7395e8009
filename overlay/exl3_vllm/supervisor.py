"""The rank supervisor: agrees with its peers, runs vLLM in the incarnation they agreed on, and ends it with theirs."""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from exl3_vllm import api_gate, exits, post_mortem, refusals, watch
from exl3_vllm.gang import Gang, Identity, Phase
from exl3_vllm.gang_wire import Wire
from exl3_vllm.rank_api import Judge
from exl3_vllm.rank_settings import EXIT_PREFLIGHT, RankError, Settings, say, write_json
from exl3_vllm.state import State
from exl3_vllm.vllm_process import HANDLED, VllmProcess

TICK_S = 0.2
BEAT_S = 0.5
ENDED_BEAT_S = 0.1
LOOK_S = 0.5  # at the process tree
TELL_S = 1.0  # the status file
EXCHANGE_S = 2.0  # for the ranks to tell each other how they ended
LAST_WORDS_S = 0.3  # for a dead process's parent to say with which exit code it died
START_GRACE_S = 2.0  # for a vLLM that serves nothing yet
WORKER_GRACE_S = 4.0  # more than the head's, which answers what is in flight and needs its workers for that
PR_SET_CHILD_SUBREAPER = 36


class Supervisor:
    """One rank, from its start to its end.

    Parameters
    ----------
    argv, environ: vLLM's.
    alive: called often, as a sign of life.

    Raises `RankError` when the gang's port is taken.
    """

    def __init__(
        self, argv: Sequence[str], settings: Settings, environ: Mapping[str, str], alive: Callable[[], None]
    ) -> None:
        self.argv, self.settings, self.environ, self.alive = argv, settings, environ, alive
        self.limits = settings.limits
        self.head = settings.role == "head"
        self.state = State.load(settings.state_dir)
        me = Identity(settings.rank, settings.world, settings.generation, settings.spec, secrets.token_hex(8))
        self.gang = Gang(me, known=self.state.known, lost_s=self.limits.lost_s)
        self.wire = open_wire(settings)
        self.selector = selectors.DefaultSelector()
        self.vllm: VllmProcess | None = None
        self.judge: Judge | None = None
        self.progress: watch.Progress | None = None
        self.kills_before = watch.memory()["oom_kills"]
        self.asked = False  # this container was told to stop
        self.stop_by: float | None = None
        self.told_to_stop = False  # vLLM was
        self.resume_at = 0.0
        self.ended_at = 0.0
        self.served_since: float | None = None
        self.code: int | None = None
        self.why: str | None = None
        self._told: tuple[Any, ...] = ()
        self._since = time.time()
        self._born = time.monotonic()
        self._next = {"beat": 0.0, "look": 0.0, "tell": 0.0}
        self._said = ""
        self._pidfds: dict[int, int] = {}

    # The loop --------------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Supervise until the rank ends; returns its exit code."""
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.take_signals()
        if self.wire is not None:
            self.selector.register(self.wire.socket, selectors.EVENT_READ)
        self.report_unclean_end()
        self.begin()
        while self.code is None:
            self.alive()
            for key, _ in self.selector.select(TICK_S):
                if callable(key.data):
                    key.data()
            now = time.monotonic()
            self.hear(now)
            before = (self.gang.phase, self.gang.incarnation)
            self.gang.tick(now)
            self.act(now)
            if (self.gang.phase, self.gang.incarnation) != before:
                self._next["beat"] = 0.0
            self.speak(now)
            self.tell(now)
        self.tell(time.monotonic(), last=True)
        return self.code

    def take_signals(self) -> None:
        """Signals become readable bytes, so that the loop handles them where it stands."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        for number in HANDLED:
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(theirs.fileno())

        def taken() -> None:
            with suppress(BlockingIOError):
                if set(ours.recv(4096)) - {signal.SIGCHLD}:
                    self.asked = True

        self._signals = (ours, theirs)
        self.selector.register(ours, selectors.EVENT_READ, taken)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)

    def begin(self) -> None:
        self.state.forget_failures_of_others(self.settings.generation)
        pause = self.state.pause(self.limits.backoff_s)
        if pause:
            self.resume_at = time.monotonic() + pause
            self.why = f"{self.state.failures} failed starts in a row, the next in {pause:.0f} s"
            self.gang.back_off(self.why)
            say(self.settings, self.why)

    def hear(self, now: float) -> None:
        for event in self.wire.receive() if self.wire is not None else ():
            if event.beat is not None:
                self.gang.hear(event.beat, now)
            elif event.rank is not None and event.refused:
                self.gang.hear_refusal(event.rank, now)
            elif event.rank is not None and event.stranger:
                self.gang.hear_stranger(event.rank, event.stranger, now)

    def speak(self, now: float) -> None:
        if self.wire is None or now < self._next["beat"]:
            return
        self._next["beat"] = now + (ENDED_BEAT_S if self.gang.phase == Phase.ENDED else BEAT_S)
        self.gang.serving = self.is_serving()
        for rank in self.gang.peers:
            self.wire.send(rank, self.gang.beat_to(rank, now))

    def act(self, now: float) -> None:
        phase = self.gang.phase
        if phase == Phase.ENDED:
            if self.gang.is_settled(now) or now - self.ended_at > EXCHANGE_S:
                self.conclude()
        elif self.vllm is None and self.asked:
            self.finish(0, "told to stop before vLLM was started")
        elif phase == Phase.BACKING_OFF and now >= self.resume_at:
            self.why = None
            self.gang.be_ready()
        elif phase == Phase.RUNNING and self.vllm is None:
            self.start(now)
        elif self.vllm is not None:
            self.vllm.reap()
            if self.vllm.status is not None:
                self.vllm.tree.note_end(self.vllm.pid)
            if now >= self._next["look"]:
                self._next["look"] = now + LOOK_S
                self.look(now)
            if phase == Phase.RUNNING:
                self.check(now)
            elif phase == Phase.STOPPING:
                self.drain(now)

    # Start and watch -------------------------------------------------------------------------------------------------

    def start(self, now: float) -> None:
        """Start vLLM in the incarnation that the gang has agreed on."""
        self.state.enter(self.gang.incarnation, self.settings.generation)
        for old in self.settings.receipt_dir.glob("*.json"):
            old.unlink()
        (self.settings.run_dir / refusals.FILE).unlink(missing_ok=True)
        api_gate.open_gate(self.settings.run_dir)
        self.vllm = VllmProcess(self.argv, self.environ, head=self.head)
        for pipe in self.vllm.pipes:
            self.selector.register(pipe, selectors.EVENT_READ, lambda pipe=pipe: self.pump(pipe))
        self.look(now)
        if self.head:
            self.judge = Judge(self.settings, self.environ.get("VLLM_API_KEY"))
        of = f"incarnation {self.gang.incarnation} of generation {self.settings.generation}"
        say(self.settings, f"{of}, {self.settings.role} of {self.settings.world}, vLLM is process {self.vllm.pid}")

    def pump(self, pipe: int) -> None:
        if self.vllm is None or pipe not in self.vllm.pipes:
            return
        if not self.vllm.pump(pipe):
            self.selector.unregister(pipe)

    def look(self, now: float) -> None:
        """Read the process tree and the judge's samples; wake up at once when a named process ends."""
        assert self.vllm is not None
        self.vllm.tree.look(now)
        for pid in self.vllm.tree.named.keys() - self._pidfds.keys():
            with suppress(OSError):
                self._pidfds[pid] = handle = os.pidfd_open(pid)
                self.selector.register(handle, selectors.EVENT_READ, lambda pid=pid: self.process_ended(pid))
        if self.judge is not None:
            if self.judge.ready and self.progress is None:
                self.progress = watch.Progress(now)
                say(self.settings, f"first token after {now - self.vllm.started:.1f} s: serving")
            for at, sample in self.judge.samples:
                if self.progress is not None:
                    self.progress.take(sample, at)
            self.judge.samples.clear()
        if self.is_serving() and self.served_since is None:
            self.served_since = now

    def process_ended(self, pid: int) -> None:
        self.selector.unregister(self._pidfds[pid])
        assert self.vllm is not None
        self.vllm.tree.note_end(pid)

    def is_serving(self) -> bool:
        """Head: it gave a token, and still runs. Headless: it has loaded the model, and the head serves."""
        if self.gang.phase != Phase.RUNNING:
            return False
        if self.head:
            return self.progress is not None
        head = self.gang.peers[0].live
        return head is not None and head.serving and any(self.settings.receipt_dir.glob("*.json"))

    def check(self, now: float) -> None:
        """End the incarnation when anything in it has ended."""
        vllm = self.vllm
        assert vllm is not None
        if vllm.tree.has_lost():
            self.end_of_a_process(vllm, now)
        elif self.gang.loss is not None:
            loss = self.gang.loss
            self.end(loss.kind, "rank", loss.sentence, now, peer=loss.rank)
        elif self.asked or self.gang.stop_asked_by is not None:
            self.begin_stop(vllm, now)
        elif (name := vllm.tree.stopped(now)) is not None:
            self.end("stopped", name, f"{name} was stopped by a signal (state T)", now)
        elif not self.is_serving() and self.served_since is None and now - vllm.started > self.limits.start_s:
            self.end("start", "API server" if self.head else "launcher", self.late(now - vllm.started), now)
        elif self.progress is not None and self.progress.stalled_s(now) > self.limits.stall_s:
            self.end("stall", "engine", self.progress.why(now) + " (EXL3_STALL_S)", now)

    def late(self, seconds: float) -> str:
        return f"no token within {seconds:.0f} s after the start (EXL3_START_S)"

    def end_of_a_process(self, vllm: VllmProcess, now: float) -> None:
        """vLLM's main process or one that it cannot do without has ended by itself."""
        until = time.monotonic() + LAST_WORDS_S  # also for the control group to count an OOM kill
        while time.monotonic() < until:
            for pipe in list(vllm.pipes):
                os.set_blocking(pipe, False)
                with suppress(BlockingIOError):
                    self.pump(pipe)
            time.sleep(0.02)
            vllm.reap()
        process, status = vllm.tree.culprit(vllm.status)
        refusal = refusals.read(self.settings.run_dir)
        if refusal is not None:
            self.end("unfit", process, refusal, now)
            return
        code, number = exits.exit_words(status) if status is not None else exits.said_exit_code(vllm.lines)
        how = f"signal {number}" if number else f"status {code}" if code is not None else "an unknown status"
        sentence = f"{process} ended by itself with {how}"
        if self.head and exits.began_to_stop(vllm.lines):
            code = number = None  # its child's
            sentence = f"API server was told to stop, not by its supervisor; {process} ended with {how}"
            process = "API server"
        elif code == 0:
            sentence += "; a server that nobody stopped has failed (did a peer die?)"
        kills = watch.memory()["oom_kills"]
        oom = kills is not None and kills > (self.kills_before or 0)
        if oom:
            sentence += "; the kernel killed for lack of memory (the container's limit, or the machine's)"
        self.end("oom" if oom else "exit", process, sentence, now, exit_code=code, signal=number)

    # Stop and end ----------------------------------------------------------------------------------------------------

    def begin_stop(self, vllm: VllmProcess, now: float) -> None:
        """Answer what is in flight, take nothing new. The workers compute until the head has ended."""
        by = "this container" if self.asked else f"rank {self.gang.stop_asked_by}"
        grace = self.limits.grace_s if self.served_since is not None else START_GRACE_S
        self.stop_by = now + grace + (0.0 if self.head else WORKER_GRACE_S)
        self.why = f"{by} was told to stop"
        say(self.settings, f"{self.why}; vLLM has {self.stop_by - now:.0f} s")
        self.gang.stop(self.why)
        if self.head:
            api_gate.close_gate(self.settings.run_dir)

    def drain(self, now: float) -> None:
        assert self.vllm is not None and self.stop_by is not None
        if self.head and not self.told_to_stop and not api_gate.holds(self.settings.run_dir, api_gate.INSIDE):
            self.told_to_stop = True
            self.vllm.tell_to_stop()
        if self.vllm.status is not None or self.gang.loss is not None or now > self.stop_by:
            peer = {} if self.asked else {"peer": self.gang.stop_asked_by}
            self.end("stop", "rank", self.why or "told to stop", now, **peer)

    def end(self, kind: str, process: str, sentence: str, now: float, **more: Any) -> None:
        """Kill what is left of vLLM, and tell the others why."""
        assert self.vllm is not None
        processes, memory = self.vllm.tree.table(), watch.memory()
        for handle in self.selector_handles():
            self.selector.unregister(handle)
        self.vllm.kill()
        if self.judge is not None:
            self.judge.stop()
        self.ended_at = time.monotonic()
        self.why = sentence
        death = post_mortem.record(
            self.settings.rank,
            kind,
            process,
            sentence,
            now,
            role=self.settings.role,
            incarnation=self.gang.incarnation,
            when=time.time(),
            since_progress_s=None if self.progress is None else round(self.progress.stalled_s(now), 1),
            served_s=None if self.served_since is None else round(now - self.served_since, 1),
            memory=memory,
            processes=[one for one in processes if one["process"] != "helper"],
            lines=post_mortem.last_lines(list(self.vllm.lines), self.environ.get("VLLM_API_KEY")),
            **more,
        )
        self.gang.end(death)

    def selector_handles(self) -> list[int]:
        """What of vLLM is still listened to: its pipes and its processes."""
        assert self.vllm is not None
        ours = {*self.vllm.pipes, *self._pidfds.values()}
        return [key.fd for key in self.selector.get_map().values() if key.fd in ours]

    def conclude(self) -> None:
        """The deaths are exchanged as far as they can be: write the report and leave."""
        own = self.gang.deaths[self.settings.rank]
        if own["kind"] == "stop" and self.asked:
            self.state.leave(failed=False, kept=True)
            self.finish(0, str(own["sentence"]))
            return
        report = post_mortem.compose(
            self.gang.deaths,
            world=self.settings.world,
            generation=self.settings.generation,
            incarnation=self.gang.incarnation,
            offset=lambda rank: 0.0 if rank == self.settings.rank else self.gang.offset(rank),
            last_heard=self.gang.last_heard(),
        )
        self.publish(report)
        served = None if self.served_since is None else self.ended_at - self.served_since
        stopped = own["kind"] == "stop"  # a peer was, and this rank starts anew
        self.state.leave(failed=served is None or served < self.limits.steady_s, kept=stopped)
        first = report["first"]
        self.finish(
            exits.exit_code(own),
            f"incarnation {self.gang.incarnation} ended: rank {first['rank']}: {first['sentence']}",
        )

    def publish(self, report: Mapping[str, Any]) -> None:
        problem = post_mortem.save(report, self.settings.state_dir)
        if problem:
            say(self.settings, problem)
        say(self.settings, post_mortem.line(report))

    def finish(self, code: int, sentence: str) -> None:
        self.code, self.why = code, sentence
        say(self.settings, sentence)

    def report_unclean_end(self) -> None:
        """An incarnation that this rank left without a word: its container or its machine was killed."""
        left = self.state.left_open(self.settings.generation)
        if left is None:
            return
        incarnation, sentence = left
        self.state.leave(failed=False, kept=True)
        death = post_mortem.record(self.settings.rank, "killed", "rank", sentence, time.monotonic(), lines=[])
        self.publish(
            post_mortem.compose(
                {self.settings.rank: death},
                world=self.settings.world,
                generation=self.settings.generation,
                incarnation=incarnation,
                offset=lambda rank: 0.0,
                last_heard={},
            )
        )

    # Status ----------------------------------------------------------------------------------------------------------

    def word(self) -> str:
        """The rank's state in one word."""
        if self.code is not None or self.gang.phase == Phase.ENDED:
            return "ended"
        if self.gang.phase == Phase.JOINING:
            return "waiting"
        if self.gang.phase == Phase.RUNNING:
            return "serving" if self.is_serving() else "starting"
        return str(self.gang.phase)

    def tell(self, now: float, *, last: bool = False) -> None:
        """Renew the status file; log for whom this rank waits when that changes."""
        waiting = self.gang.waiting_for(now)
        word = self.word()
        changed = (word, self.gang.incarnation, [one["rank"] for one in waiting])
        if now < self._next["tell"] and changed == self._told and not last:
            return
        if (word, self.gang.incarnation) != self._told[:2]:
            self._since = time.time()
        self._next["tell"], self._told = now + TELL_S, changed
        missing = ", ".join(f"rank {one['rank']} (it {one['why']})" for one in waiting)
        if missing and re.sub(r"\d+ s", "", missing) != self._said and now - self._born > 2 * BEAT_S:
            say(self.settings, f"waits for {missing}")
            self._said = re.sub(r"\d+ s", "", missing)
        status = {
            "rank": self.settings.rank,
            "role": self.settings.role,
            "generation": self.settings.generation,
            "incarnation": self.gang.incarnation,
            "state": word,
            "since": self._since,
            "beat": time.time(),
            "waiting_for": waiting,
            "why": self.why,
            "progress": self.progress.report(now) if self.progress is not None else None,
            "memory": watch.memory(),
            "peers": self.gang.peer_table(now),
            "processes": self.vllm.tree.table() if self.vllm is not None and self.gang.phase != Phase.ENDED else [],
            "restarts": self.state.failures,
            "pid": self.vllm.pid if self.vllm is not None else None,
            "exit_code": self.code,
            "limits": asdict(self.limits),
        }
        with suppress(OSError):  # 16 MB of memory, full only when somebody fills it; the gang goes on
            write_json(self.settings.status_file, status)


def open_wire(settings: Settings) -> Wire | None:
    """The socket to the peers; None in a gang of one."""
    if settings.world == 1:
        return None
    try:
        return Wire(settings.rank, settings.peers, settings.secret())
    except OSError as error:
        host, port = settings.peers[settings.rank]
        raise RankError(
            f"cannot listen on {host}, UDP port {port}, for the gang: {error.strerror}", EXIT_PREFLIGHT
        ) from error
