"""What role code may ask for as its first parameter `ctx`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import xxhash
from numpy.typing import DTypeLike, NDArray

from omni_flow.control.plan import Path


class Context:
    """One activation as role code sees it. Safe to read from any thread.

    `session`, `request`: ids. `tenant`: the salt of the caller's cached data (empty: there is one caller).
    `params`: the snapshot of the request, by attribute (`ctx.params.voice`). `seed`: 63 bits, the same whenever this
    activation of this request runs. `iteration`, `last_iteration`: of the innermost loop around it.
    `data`: the memory manager's client, if the deployment has one.
    """

    __slots__ = ("_cancelled", "_deadline", "_emit_prefix", "_emit_progress", "data", "interface", "iteration",
                 "last_iteration", "log", "params", "path", "request", "seed", "session", "tenant")  # fmt: skip

    def __init__(
        self,
        *,
        interface: str,
        path: str,
        request: str,
        session: str | None,
        params: SimpleNamespace,
        seed: int,
        iteration: int = 0,
        last_iteration: bool = False,
        deadline: float | None = None,
        data: Any = None,
        log: logging.Logger | None = None,
        progress: Callable[[float, str], None] | None = None,
        prefix: Callable[[str, Sequence[tuple[int, bytes]]], None] | None = None,
        tenant: str = "",
    ) -> None:
        self.interface = interface
        self.path = path
        self.request = request
        self.session = session
        self.tenant = tenant
        self.params = params
        self.seed = seed
        self.iteration = iteration
        self.last_iteration = last_iteration
        self.data = data
        self.log = log or logging.getLogger("omni_flow.role")
        self._deadline = deadline
        self._emit_progress = progress
        self._emit_prefix = prefix
        self._cancelled = False

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
        if self._emit_progress is not None:
            self._emit_progress(fraction, note)

    def prefix(self, pool: str, marks: Sequence[tuple[int, bytes]]) -> None:
        """Say which KV pages the inputs of this activation became, for the `cache_aware` balance.

        Args:
            pool: of the memory manager.
            marks: (tokens up to there, key of the page that ends there) at some places of the prompt, in order.
        """
        if self._emit_prefix is not None:
            self._emit_prefix(pool, marks)


def seed_for(request_seed: int, interface: str, path: Path) -> int:
    """The seed of one activation: a hash of the request's seed, the interface and the path."""
    key = f"{request_seed}/{interface}/{'.'.join(map(str, path))}"
    return xxhash.xxh3_64_intdigest(key.encode()) >> 1


__all__ = ["Context", "seed_for"]
