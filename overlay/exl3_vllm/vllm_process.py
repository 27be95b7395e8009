"""vLLM as the supervisor's child: started from an argv list, its output passed on and its last lines kept."""

from __future__ import annotations

import os
import select
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress

from exl3_vllm import watch
from exl3_vllm.log_lines import Lines
from exl3_vllm.rank_settings import EXIT_SERVING, RankError

KEPT_LINES = 40
KEPT_BYTES = 4096  # of a line
BAR_S = "1"  # seconds between two states of a progress bar, each of which is a line of the log
KILL_S = 5.0  # for the kernel to end killed processes, which may be giving back gigabytes
HANDLED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)


class VllmProcess:
    """The running program. It is a session of its own with default signal handling.

    Raises `RankError` when it cannot be started.
    """

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str], *, head: bool) -> None:
        self.status: int | None = None  # wait status of the main process once it has ended
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.started = time.monotonic()
        out, err = os.pipe(), os.pipe()
        actions = [(os.POSIX_SPAWN_DUP2, out[1], 1), (os.POSIX_SPAWN_DUP2, err[1], 2)]
        try:
            self.pid = os.posix_spawnp(
                argv[0],
                list(argv),
                {"TQDM_MININTERVAL": BAR_S, **environ},
                file_actions=actions,
                setsid=True,
                setsigmask=(),
                setsigdef=(*HANDLED, signal.SIGPIPE),
            )
        except OSError as error:
            raise RankError(f"cannot start {argv[0]}: {error.strerror}", EXIT_SERVING) from error
        finally:
            os.close(out[1])
            os.close(err[1])
        self.pipes = {out[0]: 1, err[0]: 2}  # pipe -> where it is passed on to
        self._lines = {out[0]: Lines(), err[0]: Lines()}
        self._latest = 0  # the pipe that the last kept line came from
        self.tree = watch.Tree(self.pid, head)

    def pump(self, pipe: int) -> bool:
        """Pass on the lines that have come; False at the pipe's end, which is then closed."""
        chunk = os.read(pipe, 65536)
        lines = list(self._lines[pipe].feed(chunk) if chunk else self._lines[pipe].end())
        with suppress(OSError):  # the engine's log is gone with the engine; vLLM goes on
            view = memoryview(b"".join(line + b"\n" for line, _ in lines))
            while view:
                view = view[os.write(self.pipes[pipe], view) :]
        for line, again in lines:
            if again and self._latest == pipe:  # of a bar only the last state is kept
                self.lines.pop()
            self.lines.append(line[:KEPT_BYTES].decode("utf-8", "replace").rstrip())
            self._latest = pipe
        if not chunk:
            os.close(pipe)
            del self.pipes[pipe]
        return bool(chunk)

    def reap(self) -> None:
        """Collect every ended child; orphans of vLLM are ours too."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.pid:
                self.status = status
            self.tree.note_end(pid, status)

    def tell_to_stop(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End everything that vLLM started, and take its last words."""
        deadline = time.monotonic() + KILL_S
        while time.monotonic() < deadline:
            watch.kill_below(os.getpid())
            self.reap()
            if not watch.descendants(os.getpid()):
                break
            time.sleep(0.02)
        for pipe in list(self.pipes):
            while select.select([pipe], [], [], 0)[0] and self.pump(pipe):
                pass
