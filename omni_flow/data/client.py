"""`MemoryManagerClient`: the blocking client of one role process.

One connection, one thread at a time. Everything reserved, pinned or leased through it goes back when it ends.
"""

from __future__ import annotations

import array
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, Protocol

import msgspec

from omni_flow.data.arena import Arena
from omni_flow.data.device_arena import DeviceArena
from omni_flow.data.errors import (
    BadArgument,
    BadMessage,
    CallTimeout,
    DataError,
    Disconnected,
    Refused,
    StaleEpoch,
    SystemRefusal,
)
from omni_flow.data.handshake import naming_vector
from omni_flow.data.hostid import host_id
from omni_flow.data.kv_client import KvCalls
from omni_flow.data.messages import ArenaInfo, ArenaRef, Hello, Tree, Welcome
from omni_flow.data.protocol import ERROR, EVENT, MAX_MESSAGE, REPLY, Column, Failure, Message, Op, decode, encode

_ANCILLARY: Final = socket.CMSG_SPACE(253 * 4)
_CLOEXEC: Final = int(socket.MSG_CMSG_CLOEXEC)
_FDS_LOST: Final = int(socket.MSG_CTRUNC)
_MORE_FILES: Final = "raise the limit on open files of this process (ulimit -n)"
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

    Raises:
        Disconnected: there is no server at `path`.
        SystemRefusal: this process can open nothing more.
    """

    def __init__(self, path: str) -> None:
        try:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        except OSError as error:
            raise SystemRefusal(f"no socket to reach the memory manager: {error}", _MORE_FILES) from error
        try:
            self.sock.connect(path)
        except OSError as error:
            self.sock.close()
            raise Disconnected(f"no memory manager at {path}: {error}", "start `omni-flow memory serve`") from error
        self._buffer = bytearray(MAX_MESSAGE + 4096)
        self._timeout: float | None = None

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        try:
            if fds:
                self.sock.send(encode(Op.FDS_NEXT, 0, 0, 0))
                socket.send_fds(self.sock, [data], list(fds))
            else:
                self.sock.send(data)
        except BlockingIOError:
            raise
        except OSError as error:
            raise Disconnected(f"the memory manager is gone: {error}", "connect again") from error

    def receive(self, timeout: float | None, fds: bool = True) -> Message | None:
        flags = 0
        if timeout is not None and timeout <= 0:
            flags |= _DONTWAIT
        elif timeout != self._timeout:
            self._timeout = timeout
            micros = 0 if timeout is None else max(1, int(timeout * 1_000_000))
            limit = _TIMEVAL.pack(micros // 1_000_000, micros % 1_000_000)
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
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
        if not length:
            raise Disconnected("the memory manager closed the connection", "connect again")
        if length > MAX_MESSAGE:
            raise BadMessage(f"a message of more than {MAX_MESSAGE} bytes from the memory manager")
        came: list[int] = []
        for _, _, data in ancillary:
            received = array.array("i")
            received.frombytes(data)
            came.extend(received)
        if lost & _FDS_LOST:
            for fd in came:
                os.close(fd)
            raise SystemRefusal("no room for a descriptor that the memory manager has sent", _MORE_FILES)
        return decode(self._buffer, length, came)

    def keep_alive(self, message: Callable[[], bytes]) -> None:
        """Needs nothing: the socket ends with the process."""

    def close(self) -> None:
        self.sock.close()


def open_link(address: str, shared_key: str = "") -> Link:
    """Connect to a path (SEQPACKET) or to a ZMQ endpoint (`ipc://`, `tcp://`)."""
    if "://" in address:
        from omni_flow.data.zmq_link import ZmqLink

        return ZmqLink(address, shared_key)
    return UnixLink(address)


def failure_of(message: Message) -> DataError:
    """The error an error reply carries."""
    return message.body(Failure).error()


class MemoryManagerClient(KvCalls):
    """A session with the memory manager of this node.

    Args:
        address: path of its Unix socket, or a ZMQ endpoint.
        name: shown to people.
        role: `client`, `engine`, `mover` or `viewer`.
        read_only: map everything read-only and refuse to reserve.
        quotas: pool → L1 pages that must always be available to this session.
        timeout: seconds a call may take beyond the wait it asks for.

    After `StaleEpoch` the client is registered with the new server; whatever it held at the old one is gone, and arenas
    must be asked for again.
    """

    def __init__(
        self,
        address: str,
        *,
        name: str = "",
        role: str = "client",
        read_only: bool = False,
        quotas: dict[str, int] | None = None,
        kinds: tuple[str, ...] = (),
        shared_key: str = "",
        timeout: float = 30.0,
    ) -> None:
        self.address = address
        self.timeout = timeout
        self.on_event: Callable[[Message], None] | None = None
        self.on_stale: list[Callable[[], None]] = []
        self.on_trim: list[Callable[[], None]] = []
        self._hello = Hello(role, name, read_only, quotas or {}, kinds, os.getpid(), host_id(), naming_vector())
        self._shared_key = shared_key
        self._request = 0
        self._closed = False
        self._arenas: dict[tuple[str, bool], Arena] = {}
        self._device_arenas: dict[tuple[str, bool], DeviceArena] = {}
        self.link: Link
        self.welcome: Welcome
        self.epoch = 0
        self._register()

    @property
    def read_only(self) -> bool:
        return self._hello.read_only or self._hello.role == "viewer"

    def _register(self) -> None:
        self.epoch = 0
        self.link = open_link(self.address, self._shared_key)
        try:
            reply = self._exchange(Op.HELLO, self._hello, (), (), self.timeout)
            self.welcome = reply.body(Welcome)
            self.epoch = self.welcome.epoch
            if not self.welcome.local:
                self.link.keep_alive(self._alive)
        except BaseException:
            self.link.close()
            raise

    def _alive(self) -> bytes:
        ref = ArenaRef("", False, self.welcome.session, self.welcome.secret)
        return encode(Op.KEEPALIVE, 0, 0, 0, ref)

    # -- calls --------------------------------------------------------------------------------------------------

    def call(
        self,
        op: int,
        body: msgspec.Struct | None = None,
        columns: Sequence[Column] = (),
        fds: Sequence[int] = (),
        timeout: float | None = None,
    ) -> Message:
        """One request and its reply. The reply's columns are valid until the next call: copy what is kept.

        Raises:
            StaleEpoch: the server is a new one; this client has registered with it and holds nothing there.
            Disconnected: there is no server.
            CallTimeout: no reply in time.
            DataError: what the server says.
        """
        try:
            return self._exchange(op, body, columns, fds, self.timeout if timeout is None else timeout)
        except (Disconnected, StaleEpoch) as error:
            self.renew()
            raise StaleEpoch(
                f"the memory manager at {self.address} was started again", "this client is registered anew"
            ) from error

    def renew(self) -> None:
        """Register with the server that is there now; nothing is held there and arenas must be mapped again.

        Raises:
            Disconnected: there is no server, or this client was closed.
        """
        if self._closed:
            raise Disconnected("this client was closed", "make another")
        self.link.close()
        self._arenas.clear()
        self._device_arenas.clear()
        self._register()
        for hook in self.on_stale:
            hook()

    def wait_end(self, timeout: float | None = None) -> bool:
        """Wait until the server has gone, taking events in meanwhile; False when the time is over first."""
        until = None if timeout is None else time.monotonic() + timeout
        try:
            while True:
                message = self.link.receive(None if until is None else max(0.0, until - time.monotonic()))
                if message is None:
                    return False
                self._other(message)
        except Disconnected:
            return True

    def take_events(self) -> None:
        """Take in the events that have come, without waiting.

        Raises:
            Disconnected: the server is gone.
        """
        while (message := self.link.receive(0.0)) is not None:
            self._other(message)

    def tell(self, op: int, body: msgspec.Struct | None = None, columns: Sequence[Column] = ()) -> None:
        """One message without a reply."""
        self.link.send(encode(op, 0, 0, self.epoch, body, columns))

    def _exchange(
        self, op: int, body: msgspec.Struct | None, columns: Sequence[Column], fds: Sequence[int], timeout: float
    ) -> Message:
        self._request = request = (self._request + 1) & 0xFFFFFFFF or 1
        self.link.send(encode(op, 0, request, self.epoch, body, columns), fds)
        until = 0.0
        left = timeout
        may_bring_fds = op == Op.ARENA or 0x60 <= op <= 0x6F
        while True:
            reply = self.link.receive(left, may_bring_fds)
            if reply is None:
                raise CallTimeout(f"no reply to op {op} within {timeout} s", "is the memory manager alive?")
            if reply.flags & REPLY and reply.request == request:
                if reply.flags & ERROR:
                    raise failure_of(reply)
                return reply
            if reply.flags & ERROR and not reply.request:
                raise failure_of(reply)
            self._other(reply)
            until = until or time.monotonic() + timeout
            left = max(0.001, until - time.monotonic())

    def _other(self, message: Message) -> None:
        """An event, or a reply nobody waits for any more."""
        if message.flags & EVENT:
            if message.op == Op.T_TRIM:
                for hook in self.on_trim:
                    hook()
            elif self.on_event is not None:
                self.on_event(message)
        for fd in message.fds:
            os.close(fd)

    # -- arenas -------------------------------------------------------------------------------------------------

    def arena(self, name: str, *, write: bool = False) -> Arena:
        """Map an arena (`<pool>/l1`, `<pool>/l2`, `temp`, …), once per name and mode."""
        found = self._arenas.get((name, write))
        if found is not None:
            return found
        if not isinstance(self.link, UnixLink):
            return self.side_arena(name, write=write)
        reply = self.call(Op.ARENA, self._ref(name, write))
        return self._mapped(name, write, reply.body(ArenaInfo), reply.fds[0] if reply.fds else -1)

    def side_arena(self, name: str, *, write: bool = False) -> Arena:
        """The same over a short connection of its own: for ZMQ, and while calls of an async client run.

        Raises:
            Refused: the manager is on another machine.
        """
        found = self._arenas.get((name, write))
        if found is not None:
            return found
        side = self._side(name)
        try:
            return self._mapped(name, write, *self._descriptor(side, name, write))
        finally:
            side.close()

    def _side(self, name: str) -> UnixLink:
        """A connection that descriptors can come over."""
        try:
            return UnixLink(self.welcome.path)
        except Disconnected as error:
            if isinstance(self.link, UnixLink):
                raise
            raise Refused(
                f"arena {name} of node {self.welcome.node} can't be mapped here: {self.address} carries no "
                f"descriptors, and the manager's socket {self.welcome.path} is not on this machine",
                "map arenas on that node; from elsewhere, pull pages and send arrays in messages",
            ) from error

    def _ref(self, name: str, write: bool) -> ArenaRef:
        return ArenaRef(name, write, self.welcome.session, self.welcome.secret)

    def device_arena(self, name: str, *, write: bool = False) -> DeviceArena:
        """Map an arena that lies on a GPU, in this process's primary context there, once per name and mode. Whether a
        mapping without `write` can't be written says its `readonly_enforced`."""
        found = self._device_arenas.get((name, write))
        if found is not None:
            return found
        side = self._side(name)
        try:
            info, fd = self._descriptor(side, name, write)
        finally:
            side.close()
        arena = DeviceArena.attach(info, fd, write=write)
        arena.close()
        self._device_arenas[name, write] = arena
        return arena

    def _descriptor(self, side: UnixLink, name: str, write: bool) -> tuple[ArenaInfo, int]:
        side.send(encode(Op.ARENA, 0, 1, 0, self._ref(name, write)))
        reply = side.receive(self.timeout)
        if reply is None:
            raise CallTimeout(f"no descriptor of arena {name} within {self.timeout} s")
        if reply.flags & ERROR:
            raise failure_of(reply)
        return reply.body(ArenaInfo), reply.fds[0] if reply.fds else -1

    def _mapped(self, name: str, write: bool, info: ArenaInfo, fd: int) -> Arena:
        if info.kind != Arena.kind:
            if fd >= 0:
                os.close(fd)
            raise BadArgument(f"arena {name} lies on device {info.device}", "use device_arena()")
        arena = Arena.attach(name, fd, info.size, write=write, page_size=info.page_size)
        arena.close()
        self._arenas[name, write] = arena
        return arena

    # -- seeing it ----------------------------------------------------------------------------------------------

    def ping(self) -> None:
        """One empty round trip."""
        self.call(Op.PING)

    def stats(self) -> dict[str, int | float]:
        """Plain numbers of the server."""
        data: dict[str, int | float] = self.call(Op.STATS).body(Tree).data
        return data

    def inspect(self) -> list[dict[str, Any]]:
        """Who is connected and what they hold."""
        data: list[dict[str, Any]] = self.call(Op.INSPECT).body(Tree).data
        return data

    def check(self) -> list[str]:
        """Violated invariants of the server, empty when sound."""
        data: list[str] = self.call(Op.CHECK).body(Tree).data
        return data

    def close(self) -> None:
        """End the session; the server takes everything back. Mappings go with the last array over them."""
        if not isinstance(self.link, UnixLink) and not self._closed:
            self.tell(Op.GOODBYE)
        self._closed = True
        self.link.close()
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()
        self.on_stale.clear()
        self.on_trim.clear()
        self.on_event = None

    def __enter__(self) -> MemoryManagerClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
