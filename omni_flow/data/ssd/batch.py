"""A batch of blocking I/Os on worker threads, awaited with a deadline for each I/O."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from omni_flow.data.ssd.io import Workers

T = TypeVar("T")


class IoBatch(Generic[T]):
    """Submit, then wait once.

    A job that overruns its deadline can't be stopped: the kernel goes on with its buffers. `wait` gives it
    up, so its outcome is never used, and `settled` tells when the buffers are free of it.

    Args:
        workers: who runs the jobs.
        clock: monotonic seconds.
        deadline_s: seconds a job may take once a worker has begun it.
    """

    def __init__(self, workers: Workers, clock: Callable[[], float], deadline_s: float) -> None:
        self._workers = workers
        self._clock = clock
        self._deadline = deadline_s
        self._cond = threading.Condition()
        self._waiting: dict[int, Callable[[], None]] = {}
        self._started: dict[int, float] = {}
        self._count = 0
        self._closed = False
        self.outcomes: dict[int, T | OSError] = {}
        self.settled = threading.Event()

    def submit(self, job: Callable[[], T], always: Callable[[], None]) -> int:
        """Queues a job; returns its number.

        Args:
            job: does the I/O; what it returns, or the OSError it raises, is its outcome.
            always: called exactly once when the job will touch nothing any more, whether it ran or not.
        """
        number = self._count
        self._count += 1
        with self._cond:
            self._waiting[number] = always
        self._workers.submit(lambda: self._run(number, job, always))
        return number

    def _run(self, number: int, job: Callable[[], T], always: Callable[[], None]) -> None:
        with self._cond:
            if self._waiting.pop(number, None) is None:
                return
            self._started[number] = self._clock()
        outcome: T | OSError
        try:
            outcome = job()
        except OSError as error:
            outcome = error
        always()
        with self._cond:
            del self._started[number]
            if not self._closed:
                self.outcomes[number] = outcome
            elif not self._started:
                self.settled.set()
            if not self._waiting and not self._started:
                self._cond.notify_all()

    def wait(self, healthy: Callable[[], bool]) -> list[int]:
        """Waits until every job has ended, one is past its deadline, or the tier is off; returns the jobs
        still running.

        Jobs that no worker has begun by then never run.
        """
        with self._cond:
            while self._waiting or self._started:
                now = self._clock()
                due = min(self._started.values(), default=now) + self._deadline
                if due <= now or not (self._started or healthy()):
                    break
                self._cond.wait(due - now)
            self._closed = True
            skipped = list(self._waiting.values())
            self._waiting.clear()
            late = sorted(self._started)
            if not late:
                self.settled.set()
        for always in skipped:
            always()
        return late
