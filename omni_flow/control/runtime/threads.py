"""Worker threads for role code that blocks. The event loop never waits for them; they never touch a share."""

from __future__ import annotations

import asyncio
import functools
import queue
import threading
from collections import deque
from collections.abc import Callable


class Threads:
    """A few daemon threads with one queue. What they have to say runs on the loop, in order, through `post`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, count: int, name: str) -> None:
        self._loop = loop
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._said: deque[Callable[[], None]] = deque()
        self._scheduled = False
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{k}", daemon=True) for k in range(max(count, 1))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` in a thread. It must not raise: it reports through `post`."""
        self._jobs.put(job)

    @property
    def waiting(self) -> bool:
        """Whether jobs wait for a thread: a generator then gives its thread back after each frame."""
        return not self._jobs.empty()

    def post(self, said: Callable[[], None]) -> None:
        """From a thread: run `said` on the loop. One wake-up for all that is said before the loop looks."""
        with self._lock:
            self._said.append(said)
            if self._scheduled:
                return
            self._scheduled = True
        try:
            self._loop.call_soon_threadsafe(self._drain)
        except RuntimeError:
            # The loop is closed: the replica has ended and nobody waits for this any more.
            return

    def _drain(self) -> None:
        with self._lock:
            self._scheduled = False
            said, self._said = self._said, deque()
        for each in said:
            each()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except SystemExit as asked:  # of role code: it ends the process, as it does on the loop
                self.post(functools.partial(_leave, asked))
            del job  # an idle thread would hold what the method was given until the next comes

    def close(self) -> None:
        """Let threads end after the job they are at. Does not wait: a hanging job must not hang the replica."""
        for _ in self._threads:
            self._jobs.put(None)


def _leave(asked: SystemExit) -> None:
    raise asked
