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
from exl3_vllm.rank_settings import EXIT_SERVING, RankError

KEPT_LINES = 40
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
                dict(environ),
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
        self._rest = {out[0]: b"", err[0]: b""}
        self.tree = watch.Tree(self.pid, head)

    def pump(self, pipe: int) -> bool:
        """Pass on what has come; False at the pipe's end, which is then closed."""
        chunk = os.read(pipe, 65536)
        if not chunk:
            if self._rest[pipe]:
                self._keep(self._rest.pop(pipe))
            os.close(pipe)
            del self.pipes[pipe]
            return False
        with suppress(OSError):  # the engine's log is gone with the engine; vLLM goes on
            view = memoryview(chunk)
            while view:
                view = view[os.write(self.pipes[pipe], view) :]
        *whole, self._rest[pipe] = (self._rest[pipe] + chunk).split(b"\n")
        for line in whole:
            self._keep(line)
        self._rest[pipe] = self._rest[pipe][-4096:]
        return True

    def _keep(self, line: bytes) -> None:
        self.lines.append(line.decode("utf-8", "replace").rstrip())

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
