"""Bringing a request's cached pages from L2 and L3 into L1 while other requests run.

A thread of its own has a connection of its own to the manager, because a fetch is answered when the pages are there.
What it brings is not pinned; the prefix cache finds and pins it like any other page. A fetch that fails or comes late
costs a hit, never a request.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.errors import DataError
from omni_flow.data.identity import PageHash
from omni_flow.data.messages import L1
from omni_flow.data.protocol import MAX_BATCH

log = logging.getLogger("omni_flow.compute")


class _Order(NamedTuple):
    request: Any
    keys: Sequence[PageHash]


class Loader:
    """See the module. Methods belong to the scheduler's thread.

    Args:
        connect: makes the connection of the thread.
        timeout: seconds a fetch may take before the request goes on without it.
    """

    def __init__(self, connect: Callable[[], MemoryManagerClient], pool: str, timeout: float = 10.0) -> None:
        self._connect = connect
        self._pool = pool
        self._timeout = timeout
        self._orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.waiting = 0
        self.loaded_pages = 0
        threading.Thread(target=self._run, name="kv-loader", daemon=True).start()

    def fileno(self) -> int:
        """Readable when a request may go on."""
        return self._read

    def order(self, request: Any, keys: Sequence[PageHash]) -> None:
        """Bring these pages, then hand the request back."""
        self.waiting += 1
        self._orders.put(_Order(request, keys))

    def ready(self) -> list[Any]:
        """Requests whose pages have come, or won't."""
        if not self.waiting:
            return []
        try:
            came = len(os.read(self._read, 4096))
        except BlockingIOError:
            return []
        self.waiting -= came
        return [self._done.get() for _ in range(came)]

    def _run(self) -> None:
        client = self._connect()
        while True:
            request, keys = self._orders.get()
            try:
                for start in range(0, len(keys), MAX_BATCH // 2):
                    batch = keys[start : start + MAX_BATCH // 2]
                    arrived = client.fetch(self._pool, batch, tier=L1, timeout=self._timeout)
                    self.loaded_pages += int(arrived.sum())
                    if not arrived.all():
                        break
            except DataError as error:
                log.warning("cached pages were not brought, they are computed again: %s", error)
            self._done.put(request)
            os.write(self._write, b"x")
