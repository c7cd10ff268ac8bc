"""Socket monitors of ZeroMQ: connections that come and go are events on the loop."""

import asyncio
import os
from collections.abc import Callable
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

ENDS: Final = {
    int(zmq.EVENT_DISCONNECTED): "the connection closed",
    int(zmq.EVENT_CLOSED): "nobody listens there",
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "the handshake failed",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "the handshake failed (is the shared key the same?)",
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "refused: not the shared key of the peer",
}
"""The events that end the connection of a PUSH, and the cause in words."""


class Monitor:
    """The monitor of one ZeroMQ socket; calls `on_event(event, descriptor)` on the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: "zmq.Socket[bytes]", events: int) -> None:
        self._loop, self._sock = loop, sock
        self._pair = sock.get_monitor_socket(events, addr=f"inproc://monitor-{id(self)}-{os.urandom(4).hex()}")
        self._pair.setsockopt(zmq.LINGER, 0)

    def watch(self, on_event: Callable[[int, int], None]) -> None:
        self._on_event = on_event
        self._loop.add_reader(self._pair.FD, self.drain)
        self.drain()  # the descriptor wakes only for a reader that has found nothing before

    def drain(self) -> None:
        """Report every event that has happened until now."""
        while not self._pair.closed:
            try:
                event = recv_monitor_message(self._pair, zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_event(int(event["event"]), int(event["value"]))

    def close(self) -> None:
        """Before the socket is closed. In this order: an event for a pair that is gone would block the IO thread."""
        self._sock.disable_monitor()
        self._loop.remove_reader(self._pair.FD)
        self._pair.close()
