"""Saying to a peer that its channel is dropped, for as long as it takes."""

import asyncio
import logging
from collections.abc import Callable

import zmq

from omni_flow.control.transport.zmq_monitor import ENDS, Monitor
from omni_flow.control.transport.zmq_sockets import connected

log = logging.getLogger(__name__)

_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0  # before the next try, twice as long each time
_LINGER_MS = 1_000  # for the frame to leave once hands are shaken


class Refusal:
    """One frame to one peer, by a connection for this alone.

    A peer shakes hands when its event loop has time (its loop answers who may speak), so no deadline would be right:
    this tries until hands are shaken, or until `close`, which whoever sees the refused channel closed calls.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        push: Callable[[], "zmq.Socket[bytes]"],
        endpoint: str,
        frame: bytes,
        descriptor: int,
    ) -> None:
        """`push` makes an unconnected PUSH; `descriptor` is where the refused channel comes in."""
        self._loop, self._make, self._endpoint, self._frame = loop, push, endpoint, frame
        self.descriptor = descriptor
        self._push: zmq.Socket[bytes] | None = None
        self._monitor: Monitor | None = None
        self._next_try: asyncio.TimerHandle | None = None
        self._pause_s = _PAUSE_S

    def start(self, on_end: Callable[[], object]) -> None:
        """`on_end` is called once, when nothing more is to be done."""
        self._on_end = on_end
        self._try()

    def _try(self) -> None:
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | sum(ENDS)
        try:
            self._push, self._monitor = connected(self._loop, self._make, self._endpoint, events, self._on_event)
            self._push.send(self._frame, zmq.NOBLOCK)
        except zmq.ZMQError as error:  # refused already, or no more files may be opened
            self._failed(str(error))

    def _on_event(self, event: int, _: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._disconnect(_LINGER_MS)
            self._on_end()
        else:
            self._failed(ENDS[event])

    def _failed(self, cause: str) -> None:
        log.debug("%s could not be told that its channel is dropped: %s", self._endpoint, cause)
        self._disconnect(0)
        self._next_try = self._loop.call_later(self._pause_s, self._try)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _disconnect(self, linger_ms: int) -> None:
        push, monitor, self._push, self._monitor = self._push, self._monitor, None, None
        if push is not None and monitor is not None:
            monitor.close()
            push.close(linger=linger_ms)

    def close(self) -> None:
        """Say no more. Before `on_end` only, which it calls."""
        if self._next_try is not None:
            self._next_try.cancel()
        self._disconnect(0)
        self._on_end()
