"""The client's ZMQ side: a DEALER socket with the same messages as over SEQPACKET."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

import zmq

from omni_flow.data.errors import BadArgument, BadMessage, Disconnected
from omni_flow.data.protocol import Message, decode
from omni_flow.data.zmq_keys import server_keys

KEEPALIVE_S: Final = 3.0


def _socket(context: zmq.Context[zmq.Socket[bytes]], address: str, shared: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 200)
    if shared:
        public, secret = zmq.curve_keypair()
        socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        socket.setsockopt(zmq.CURVE_SERVERKEY, server_keys(shared)[0])
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        socket.close(0)
        raise BadArgument(f"{address}: {error.strerror}", "give a path, tcp://host:port or ipc://path") from error
    return socket


class ZmqLink:
    """A connection over `ipc://` or `tcp://`. Raises BadArgument: the address is none of these."""

    def __init__(self, address: str, shared: str = "") -> None:
        self._address = address
        self._shared = shared
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self.socket = _socket(self._context, address, shared)
        except BadArgument:
            self._context.term()
            raise
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def fileno(self) -> int:
        return -1 if self.socket.closed else int(self.socket.getsockopt(zmq.FD))

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        if fds:
            raise BadMessage("descriptors do not travel over ZMQ", "use the Unix socket")
        try:
            self.socket.send(data, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise Disconnected(f"cannot send to {self._address}: {error}", "is the memory manager alive?") from error

    def receive(self, timeout: float | None, fds: bool = True) -> Message | None:
        if timeout is None:
            wait = -1
        else:
            wait = max(0, int(timeout * 1000))
        if not self.socket.poll(wait):
            return None
        data = self.socket.recv()
        return decode(data, len(data))

    def keep_alive(self, message: Callable[[], bytes]) -> None:
        """Send `message()` every few seconds on a socket of its own, for a client on another machine."""

        def run() -> None:
            socket = _socket(self._context, self._address, self._shared)
            try:
                while not self._stop.wait(KEEPALIVE_S):
                    socket.send(message())
            finally:
                socket.close(0)

        self._thread = threading.Thread(target=run, name="memory-keep-alive", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.socket.close()
        self._context.term()
