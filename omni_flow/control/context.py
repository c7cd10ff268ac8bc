"""What role code may ask for as its first parameter `ctx`."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import DTypeLike, NDArray

from omni_flow.control.plan import Path


class Facts(Protocol):
    """What an activation tells its context; most activations are not asked for most of it. Any thread."""

    def path(self) -> str:
        """Where it is, for people."""

    def seed(self) -> int:
        """See `seed_for`."""

    def retries(self) -> int:
        """See `Context.retries`."""

    def params(self) -> SimpleNamespace:
        """The snapshot of the request."""

    def iteration(self) -> tuple[int, bool]:
        """The number of the innermost loop iteration around it, and whether it is the last one allowed."""

    def progress(self, fraction: float, note: str) -> None:
        """See `Context.progress`."""

    def prefix(self, pool: str, marks: Sequence[tuple[int, bytes]]) -> None:
        """See `Context.prefix`."""

    def lineage(self) -> int:
        """See `Context.lineage`."""

    def advance(self, lineage: int) -> None:
        """See `Context.advance`."""


class Context:
    """One activation as role code sees it. Safe to read from any thread.

    `session`, `request`: ids. `tenant`: the salt of the caller's cached data (empty: there is one caller).
    `data`: the memory manager's client, if the deployment has one.
    """

    __slots__ = ("_cancelled", "_deadline", "_facts", "_params", "data", "interface", "log", "request", "session",
                 "tenant")  # fmt: skip

    def __init__(
        self,
        facts: Facts,
        *,
        interface: str,
        request: str,
        session: str | None,
        deadline: float | None,
        data: Any,
        log: logging.Logger,
        tenant: str,
    ) -> None:
        self.interface = interface
        self.request = request
        self.session = session
        self.tenant = tenant
        self.data = data
        self.log = log
        self._deadline = deadline
        self._facts = facts
        self._params: SimpleNamespace | None = None
        self._cancelled = False

    @property
    def params(self) -> SimpleNamespace:
        """The snapshot of the request, by attribute (`ctx.params.voice`)."""
        if self._params is None:
            self._params = self._facts.params()
        return self._params

    @property
    def path(self) -> str:
        """Which activation of the interface this is, for people."""
        return self._facts.path()

    @property
    def seed(self) -> int:
        """63 bits, the same whenever this activation of this request runs."""
        return self._facts.seed()

    @property
    def retries(self) -> int:
        """`retries` of the interface: how often this activation may be done again. Its replica's death is the runtime's
        business; a role whose work dies elsewhere, as with an engine process, does it again itself."""
        return self._facts.retries()

    @property
    def iteration(self) -> int:
        """Of the innermost loop around this activation, from 0."""
        return self._facts.iteration()[0]

    @property
    def last_iteration(self) -> bool:
        """Whether no further iteration of that loop is allowed."""
        return self._facts.iteration()[1]

    @property
    def cancelled(self) -> bool:
        """Whether the request is over; a method that runs long should look and return."""
        return self._cancelled

    def cancel(self) -> None:
        """Called by the runtime."""
        self._cancelled = True

    @property
    def deadline(self) -> float | None:
        """Seconds left until the request's deadline (may be negative), or None if it has none."""
        return None if self._deadline is None else self._deadline - time.monotonic()

    def empty(self, shape: tuple[int, ...] | int, dtype: DTypeLike = "float32") -> NDArray[Any]:
        """An array to compute an output into. Given as it is, it reaches its readers without a copy, whatever its size.

        Once given it must not be written any more. Without a memory manager it is an ordinary array.
        """
        if self.data is None:
            return np.empty(shape, dtype)
        made: NDArray[Any] = self.data.empty(shape, dtype)
        return made

    def progress(self, fraction: float, note: str = "") -> None:
        """Say how far this activation is (0 to 1); the last note stands in the timeline of the request."""
        self._facts.progress(fraction, note)

    def prefix(self, pool: str, marks: Sequence[tuple[int, bytes]]) -> None:
        """Say which KV pages the inputs of this activation became, for the `cache_aware` balance.

        Args:
            pool: of the memory manager.
            marks: (tokens up to there, key of the page that ends there) at some places of the prompt, in order.
        """
        self._facts.prefix(pool, marks)

    @property
    def lineage(self) -> int:
        """How far this role had come with the session when the request was admitted, as it said by `advance`; 0: the
        gateway knows of nothing.

        A replica that keeps less than that has not all of it: it was restarted, or the session was with another one.
        """
        return self._facts.lineage()

    def advance(self, lineage: int) -> None:
        """Say how far the role has come with the session: a number that grows with what it keeps, as of turns."""
        self._facts.advance(lineage)


def seed_for(request_seed: int, interface: str, path: Path) -> int:
    """The seed of one activation: a hash of the request's seed, the interface and the path."""
    key = f"{request_seed}/{interface}/{'.'.join(map(str, path))}"
    return xxhash.xxh3_64_intdigest(key.encode()) >> 1


__all__ = ["Context", "Facts", "seed_for"]
