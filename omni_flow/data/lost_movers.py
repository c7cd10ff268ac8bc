"""What jobs of a lost mover hold, until nothing of it can touch the pages any more.

A mover whose session has ended may live on: stopped by a signal, or waiting in the kernel for a disk. Its copy, read
or DMA would still write into the target slots, and what it reads from the source slots it may yet store under their
keys. So both stay held until its process, with all threads, has gone (pidfd)."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from omni_flow.data.jobs import PoolJobs, Work

log = logging.getLogger("omni_flow.data")
Held = Sequence[tuple[PoolJobs, Work]]
DEVICE_CLOSED_S: Final = 1.0
UNSEEN_S: Final = 60.0
RETRY_S: Final = 1.0


class Watcher(Protocol):
    """The part of the server that tells when a descriptor can be read."""

    def watch_fd(self, fd: int, ready: Callable[[int], None]) -> None: ...
    def unwatch_fd(self, fd: int) -> None: ...


class LostMovers:
    """Holds abandoned jobs and buries them.

    Args:
        clock: monotonic seconds.
        freed: called when slots have come back.
    """

    def __init__(self, watcher: Watcher, clock: Callable[[], float], freed: Callable[[], None]) -> None:
        self._watcher = watcher
        self._clock = clock
        self._freed = freed
        self._again: list[tuple[float, int, Held]] = []

    def hold(self, pid: int, held: Held) -> None:
        """Keep the memory of abandoned jobs until the process has gone. A process that can't be seen from here (pid 0)
        counts as gone after `UNSEEN_S`."""
        if not held:
            return
        if not pid:
            self._again.append((self._clock() + UNSEEN_S, 0, held))
            return
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._bury(held)
            return
        except OSError as error:
            log.error("cannot watch a lost mover, trying again", extra={"pid": pid, "error": str(error)})
            self._again.append((self._clock() + RETRY_S, pid, held))
            return
        self._watcher.watch_fd(fd, lambda _events: self._gone(fd, held))

    def _gone(self, fd: int, held: Held) -> None:
        self._watcher.unwatch_fd(fd)
        os.close(fd)
        self._bury(held)

    def _bury(self, held: Held) -> None:
        """The slots go back; those that a device may still be writing after `DEVICE_CLOSED_S` more."""
        now = self._clock()
        for jobs, work in held:
            spec = jobs.pool.spec
            on_device = spec.l1_device >= 0 and work.kind == "copy"
            jobs.bury(work, now + max(DEVICE_CLOSED_S, spec.death_quarantine_s) if on_device else None)
        self._freed()

    def tick(self, now: float) -> float | None:
        """Do what is due; returns when to come again."""
        due = [entry for entry in self._again if entry[0] <= now]
        self._again = [entry for entry in self._again if entry[0] > now]
        for _, pid, held in due:
            if pid:
                self.hold(pid, held)
            else:
                self._bury(held)
        return min((entry[0] for entry in self._again), default=None)
