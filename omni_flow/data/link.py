"""The client's end of a connection: messages over SEQPACKET, and the descriptors of arenas that come with them."""

from __future__ import annotations

import array
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from omni_flow.data.errors import BadMessage, CallTimeout, DataError, Disconnected, SystemRefusal
from omni_flow.data.messages import ArenaInfo, ArenaRef
from omni_flow.data.protocol import ERROR, MAX_MESSAGE, Failure, Message, Op, decode, encode

_ANCILLARY: Final = socket.CMSG_SPACE(253 * 4)
_CLOEXEC: Final = int(socket.MSG_CMSG_CLOEXEC)
_FDS_LOST: Final = int(socket.MSG_CTRUNC)
_MORE_FILES: Final = "raise the limit on open files of this process (ulimit -n)"
_ALIVE: Final = "is the memory manager alive?"
_DONTWAIT: Final = int(socket.MSG_DONTWAIT)
_TIMEVAL: Final = struct.Struct("@ll")


class Link(Protocol):
    """A connection as the clients see it."""

    def fileno(self) -> int: ...
    def send(self, data: bytes, fds: Sequence[int] = ()) -> None: ...
    def receive(self, timeout: float | None, fds: bool = True) -> Message | None:
        """The next message, its columns valid until the next call; None when the time is over.

        Args:
            fds: take descriptors that come along; without it they are lost.
        """

    def keep_alive(self, message: Callable[[], bytes]) -> None:
        """Send `message()` now and then for as long as the link is open, if the server can't see the client's end."""

    def close(self) -> None: ...


class UnixLink:
    """A SEQPACKET connection.

    Args:
        timeout: seconds that the server may take to have room for this connection, or for a message.
        spin: seconds in which `receive` looks again and again before its thread sleeps, which takes tens of
            microseconds to wake up.

    Raises:
        Disconnected: there is no server at `path`.
        CallTimeout: it takes no connection in time; `send` raises it likewise.
        SystemRefusal: this process can open nothing more.
    """

    def __init__(self, path: str, timeout: float = 30.0, spin: float = 0.0) -> None:
        try:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        except OSError as error:
            raise SystemRefusal(f"no socket to reach the memory manager: {error}", _MORE_FILES) from error
        try:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(timeout))
            self.sock.connect(path)
        except BlockingIOError as error:
            self.sock.close()
            raise CallTimeout(f"the memory manager at {path} takes no connection within {timeout} s", _ALIVE) from error
        except OSError as error:
            self.sock.close()
            raise Disconnected(f"no memory manager at {path}: {error}", "start `omni-flow memory serve`") from error
        self._buffer = bytearray(MAX_MESSAGE + 4096)
        self._timeout: float | None = None
        self._spin = spin
        self._poll = select.poll()
        self._poll.register(self.sock, select.POLLIN)

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        try:
            if fds:
                self.sock.send(encode(Op.FDS_NEXT, 0, 0, 0))
                socket.send_fds(self.sock, [data], list(fds))
            else:
                self.sock.send(data)
        except BlockingIOError as error:
            if self.sock.gettimeout() == 0.0:  # an event loop's: it sends it later
                raise
            raise CallTimeout("the memory manager takes no message, so many wait already", _ALIVE) from error
        except OSError as error:
            raise Disconnected(f"the memory manager is gone: {error}", "connect again") from error

    def receive(self, timeout: float | None, fds: bool = True) -> Message | None:
        if self._spin and (timeout is None or timeout > 0):
            timeout = self._look(timeout)
        flags = 0
        if timeout is not None and timeout <= 0:
            flags |= _DONTWAIT
        elif timeout != self._timeout:
            self._timeout = timeout
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(timeout))
        ancillary: list[tuple[int, int, bytes]] = []
        lost = 0
        try:
            if fds:
                length, ancillary, lost, _ = self.sock.recvmsg_into([self._buffer], _ANCILLARY, flags | _CLOEXEC)
            else:
                length = self.sock.recv_into(self._buffer, 0, flags)
        except BlockingIOError:
            return None
        except OSError as error:
            raise Disconnected(f"the memory manager is gone: {error}", "connect again") from error
        came: list[int] = []
        for _, _, data in ancillary:
            received = array.array("i")
            received.frombytes(data)
            came.extend(received)
        try:
            if not length:
                raise Disconnected("the memory manager closed the connection", "connect again")
            if lost & _FDS_LOST:
                raise SystemRefusal("no room for a descriptor that the memory manager has sent", _MORE_FILES)
            if length > MAX_MESSAGE:
                raise BadMessage(f"a message of more than {MAX_MESSAGE} bytes from the memory manager")
            return decode(self._buffer, length, came)
        except DataError:
            for fd in came:
                os.close(fd)
            raise

    def _look(self, timeout: float | None) -> float | None:
        """Until there is something to receive, for as long as it may. Returns: how long to sleep, 0: not."""
        began = now = time.monotonic()
        until = began + (self._spin if timeout is None else min(self._spin, timeout))
        while not self._poll.poll(0):
            if now >= until:
                return timeout if timeout is None else max(1e-6, timeout - (now - began))
            now = time.monotonic()
        return 0.0

    def keep_alive(self, message: Callable[[], bytes]) -> None:
        """Needs nothing: the socket ends with the process."""

    def close(self) -> None:
        self.sock.close()


def _timeval(seconds: float | None) -> bytes:
    """What socket options have for a time; None: without end."""
    micros = 0 if seconds is None else max(1, int(seconds * 1_000_000))
    return _TIMEVAL.pack(micros // 1_000_000, micros % 1_000_000)


def open_link(address: str, shared_key: str = "", timeout: float = 30.0, spin: float = 0.0) -> Link:
    """Connect to a path (SEQPACKET) or to a ZMQ endpoint (`ipc://`, `tcp://`), which does not spin."""
    if "://" in address:
        from omni_flow.data.zmq_link import ZmqLink

        return ZmqLink(address, shared_key)
    return UnixLink(address, timeout, spin)


def failure_of(message: Message) -> DataError:
    """The error an error reply carries."""
    return message.body(Failure).error()


def close_fds(message: Message) -> None:
    """Close descriptors that came with a message that should have none."""
    for fd in message.take_fds():
        os.close(fd)


def descriptor_of(reply: Message, name: str) -> tuple[ArenaInfo, int]:
    """What an arena is, and its descriptor, which is the caller's to close; -1 for `cuda-ipc`, which has a handle.

    Raises:
        DataError: what the manager says.
        BadMessage: a reply that is none to `ARENA`. No descriptor that came with it stays open.
    """
    came = reply.take_fds()
    try:
        if reply.flags & ERROR:
            raise failure_of(reply)
        info = reply.body(ArenaInfo)
        if len(came) != (not info.handle):
            raise BadMessage(f"arena {name} came with {len(came)} descriptors")
    except DataError:
        for fd in came:
            os.close(fd)
        raise
    return info, came[0] if came else -1


def ask_descriptor(path: str, ref: ArenaRef, timeout: float) -> tuple[ArenaInfo, int]:
    """Ask for an arena over a short connection to the manager's socket, in the name of the session in `ref`.

    Returns and raises: as `descriptor_of`. Raises Disconnected: there is no server at `path`.
    """
    side = UnixLink(path, timeout)
    try:
        side.send(encode(Op.ARENA, 0, 1, 0, ref))
        reply = side.receive(timeout)
    finally:
        side.close()
    if reply is None:
        raise CallTimeout(f"no descriptor of arena {ref.name} within {timeout} s")
    return descriptor_of(reply, ref.name)
