"""The processes a memory manager runs beside it (movers): started, watched by pidfd, started again with back-off."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from omni_flow.data.session import BaseService

if TYPE_CHECKING:
    from omni_flow.data.server import Server

log = logging.getLogger("omni_flow.data")
FIRST_BACKOFF_S: Final = 0.2
LAST_BACKOFF_S: Final = 30.0
END_S: Final = 2.0
"""How long children may take to end by themselves, all together: whoever ends the manager waits for it."""
SHORTCUTS: Final = {
    "copy": ("{python}", "-m", "omni_flow.data.mover", "{path}"),
    "cuda-copy": ("{python}", "-m", "omni_flow.data.cuda_mover", "{path}"),
}


KINDS: Final = {
    "omni_flow.data.mover": ("copy",),
    "omni_flow.data.cuda_mover": ("cuda-copy",),
    "omni_flow.data.ssd.mover": ("store", "load"),
    "omni_flow.data.transfer.node": ("pull", "push"),
}
"""Kinds of jobs that the movers of this package execute, by their module."""


@dataclass(slots=True, eq=False)
class Child:
    command: tuple[str, ...]
    process: subprocess.Popen[bytes] | None = None
    pid: int = 0
    pidfd: int = -1
    started: float = 0.0
    backoff: float = FIRST_BACKOFF_S
    due: float = 0.0
    restarts: int = 0


class Children(BaseService):
    """Runs command lines; `{path}` in them is the socket's path, `{python}` this interpreter, `copy` and
    `cuda-copy` the copy movers.

    A child ends by itself when its connection to the manager ends, so a SIGKILL of the manager leaves none behind.
    """

    def __init__(self, server: Server, commands: Sequence[Sequence[str]]) -> None:
        self._server = server
        self._children: list[Child] = []
        for command in commands:
            words = SHORTCUTS.get(command[0], tuple(command)) if len(command) == 1 else tuple(command)
            filled = tuple(w.replace("{path}", server.config.path).replace("{python}", sys.executable) for w in words)
            self._children.append(Child(filled))
        self._stopped = False

    @property
    def kinds(self) -> set[str]:
        """Kinds of jobs for which movers of this package are run."""
        return {kind for child in self._children for word in child.command for kind in KINDS.get(word, ())}

    def tick(self, now: float) -> float | None:
        """Start what is due."""
        if self._stopped:
            return None
        for child in self._children:
            if child.process is None and child.due <= now:
                self._start(child, now)
        return min((child.due for child in self._children if child.process is None), default=None)

    def _start(self, child: Child, now: float) -> None:
        child.started = now
        try:
            child.process = subprocess.Popen(child.command, stdin=subprocess.DEVNULL)
            child.pid = child.process.pid
            child.pidfd = os.pidfd_open(child.process.pid)
        except OSError as error:
            log.error("cannot start %s: %s", child.command, error)
            self._later(child, now)
            return
        self._server.watch_fd(child.pidfd, lambda _events: self._ended(child))

    def _ended(self, child: Child) -> None:
        assert child.process is not None
        self._server.unwatch_fd(child.pidfd)
        os.close(child.pidfd)
        code = child.process.wait()
        child.process = None
        if self._stopped:
            return
        now = time.monotonic()
        log.warning("mover ended", extra={"command": child.command[-2:], "code": code})
        child.restarts += 1
        if now - child.started > LAST_BACKOFF_S:
            child.backoff = FIRST_BACKOFF_S
        self._later(child, now)

    @staticmethod
    def _later(child: Child, now: float) -> None:
        child.due = now + child.backoff
        child.backoff = min(2 * child.backoff, LAST_BACKOFF_S)

    def runs(self, pid: int) -> bool:
        """Whether a process is or was the last of a child, so that another will take its place."""
        return not self._stopped and any(child.pid == pid for child in self._children)

    def kill(self, pid: int) -> None:
        """End a child that no longer does what it is told; other processes are left alone. It is started again."""
        for child in self._children:
            if child.process is not None and child.process.pid == pid:
                child.process.kill()

    def stop(self) -> None:
        """End the children: they see their connection end; those that have not after `END_S` are killed."""
        self._stopped = True
        running = [child.process for child in self._children if child.process is not None]
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        until = time.monotonic() + END_S
        for process in running:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def stats(self) -> dict[str, int | float]:
        return {
            "children_running": sum(child.process is not None for child in self._children),
            "children_restarts": sum(child.restarts for child in self._children),
        }
