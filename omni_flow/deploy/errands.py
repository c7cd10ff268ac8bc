"""What a process's event loop does for its TempBuffers beside requests: tells the memory manager of what was released,
and gives back what it asks for or what lies idle."""

from __future__ import annotations

import asyncio
import logging
import select
import threading
from collections.abc import Callable

from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.errors import DataError
from omni_flow.data.link import UnixLink
from omni_flow.data.temp_client import TempClient

log = logging.getLogger("omni_flow.tensors")

IDLE_S = 5.0
"""Slots of a size that has not been asked for in this time go back to the pool."""


class Errands:
    """The errands of one connection. They begin with `start`, on the loop; `lost` is called when the server is gone, or
    takes no more messages."""

    def __init__(self, lost: Callable[[DataError], None]) -> None:
        self.started = False
        self._lost = lost
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._temp: TempClient
        self._ringing = False
        self._watch: select.epoll | None = None  # a loop that watched the socket itself would make it non-blocking
        self._idle: asyncio.TimerHandle | None = None

    def start(self, client: MemoryManagerClient, temp: TempClient) -> None:
        """Do them on the running loop from now on."""
        self.started = True
        self._temp = temp
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        if isinstance(client.link, UnixLink):
            self._watch = select.epoll()
            self._watch.register(client.link.fileno(), select.EPOLLIN)
            self._loop.add_reader(self._watch.fileno(), self._readable)
        self._idle = self._loop.call_later(IDLE_S, self._give_back_idle)

    def stop(self) -> None:
        """No more; any thread."""
        loop, self._loop = self._loop, None
        if loop is None or loop.is_closed():
            return
        if threading.get_ident() == self._thread:
            self._end(loop)
        else:
            loop.call_soon_threadsafe(self._end, loop)

    def _end(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._idle is not None:
            self._idle.cancel()
        if self._watch is not None:
            loop.remove_reader(self._watch.fileno())
            self._watch.close()
            self._watch = None

    def ring_soon(self) -> None:
        """Tell the server that shares have come back, after what the loop does now. Any thread, also a finalizer."""
        loop = self._loop
        if loop is None or self._ringing or loop.is_closed():
            return
        self._ringing = True
        if threading.get_ident() == self._thread:
            loop.call_soon(self._ring)
        else:
            loop.call_soon_threadsafe(self._ring)

    def _ring(self) -> None:
        self._ringing = False
        self._try(self._temp.ring)

    def _readable(self) -> None:
        self._try(self._temp.take_events)

    def _give_back_idle(self) -> None:
        if self._loop is not None:
            self._idle = self._loop.call_later(IDLE_S, self._give_back_idle)
            if self._temp.buffers.pending:
                self._try(self._temp.ring)
            self._try(lambda: self._temp.trim(idle=True))

    def _try(self, errand: Callable[[], None]) -> None:
        if self._loop is None:
            return
        try:
            errand()
        except DataError as gone:
            log.info("the memory manager is gone: %s", gone)
            self._lost(gone)
