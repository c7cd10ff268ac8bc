"""A FIFO of waiters with deadlines. Pure: the time is passed in."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Waiter:
    """One who waits.

    Args:
        owner: id of the session.
        want: pages or bytes wanted, for the books.
        deadline: monotonic seconds.
        attempt: tries to serve the waiter; True when served. `last` says that the deadline has come.
        expire: tells the waiter that its time is over.
    """

    owner: int
    want: int
    deadline: float
    attempt: Callable[[bool], bool]
    expire: Callable[[], None]
    done: bool = field(default=False)


class WaitQueue:
    """First come, first served: nobody behind the head is served before it."""

    def __init__(self) -> None:
        self._queue: deque[Waiter] = deque()

    def __len__(self) -> int:
        return sum(not waiter.done for waiter in self._queue)

    def __bool__(self) -> bool:
        self._trim()
        return bool(self._queue)

    @property
    def wanted(self) -> int:
        return sum(waiter.want for waiter in self._queue if not waiter.done)

    def _trim(self) -> None:
        while self._queue and self._queue[0].done:
            self._queue.popleft()

    def add(self, waiter: Waiter) -> None:
        self._queue.append(waiter)

    def pump(self) -> None:
        """Serve from the head for as long as that works."""
        self._trim()
        while self._queue:
            head = self._queue[0]
            if not head.attempt(False):
                return
            head.done = True
            self._trim()

    def tick(self, now: float) -> float | None:
        """Give those whose time is over a last attempt, then expire them. Returns the next deadline."""
        for waiter in [w for w in self._queue if not w.done and w.deadline <= now]:
            waiter.done = True
            if not waiter.attempt(True):
                waiter.expire()
        self._trim()
        self.pump()
        return min((w.deadline for w in self._queue if not w.done), default=None)

    def forget(self, owner: int) -> None:
        """Drop the waiters of a session that has gone."""
        for waiter in self._queue:
            if waiter.owner == owner:
                waiter.done = True
        self._trim()
