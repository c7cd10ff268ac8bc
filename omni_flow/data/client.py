"""`MemoryManagerClient`: the blocking client of one role process.

One connection, one thread at a time. Everything reserved, pinned or leased through it goes back when it ends.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import msgspec

from omni_flow.data.arena import Arena
from omni_flow.data.arguments import YEAR_S, flag, real, text, whole
from omni_flow.data.device_arena import DeviceArena
from omni_flow.data.errors import BadArgument, CallTimeout, DataError, Disconnected, Refused, StaleEpoch
from omni_flow.data.handshake import naming_vector
from omni_flow.data.hostid import host_id
from omni_flow.data.kv_client import KvCalls
from omni_flow.data.link import Link, UnixLink, ask_descriptor, close_fds, descriptor_of, failure_of, open_link
from omni_flow.data.messages import MAX_NAME, ArenaInfo, ArenaRef, Hello, SessionsAfter, Tree, Welcome
from omni_flow.data.protocol import ERROR, EVENT, REPLY, Column, Message, Op, encode


class MemoryManagerClient(KvCalls):
    """A session with the memory manager of this node.

    Args:
        address: path of its Unix socket, or a ZMQ endpoint.
        name: shown to people.
        role: `client`, `engine`, `mover` or `viewer`.
        read_only: map everything read-only and refuse to reserve.
        quotas: pool → L1 pages that must always be available to this session.
        timeout: seconds a call may take beyond the wait it asks for.
        spin: seconds in which a call looks for its reply without sleeping, at the cost of a core; over a Unix socket.

    An argument that can't be meant, here or in a call, is refused with `BadArgument`, which names it.

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
        spin: float = 0.0,
    ) -> None:
        self.address = text("address", address, 4096)
        self.timeout = real("timeout", timeout, 0.001)
        self._spin = real("spin", spin, 0.0, 1.0)
        self.on_event: Callable[[Message], None] | None = None
        self.on_stale: list[Callable[[], None]] = []
        self.on_trim: list[Callable[[], None]] = []
        shown, part = text("name", name, 200, least=0), text("role", role, 200)
        promised = {text("quotas", pool, MAX_NAME): whole("quotas", pages) for pool, pages in (quotas or {}).items()}
        only_read, can = flag("read_only", read_only), tuple(text("kinds", kind, 200) for kind in kinds)
        self._hello = Hello(part, shown, only_read, promised, can, os.getpid(), host_id(), naming_vector())
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
        self.link = open_link(self.address, self._shared_key, self.timeout, self._spin)
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
            DataError: what the first in `on_stale` has raised, when all have been called.
        """
        if self._closed:
            raise Disconnected("this client was closed", "make another")
        self.link.close()
        self._arenas.clear()
        self._device_arenas.clear()
        self._register()
        failed: list[DataError] = []
        for hook in self.on_stale:
            try:
                hook()
            except DataError as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def wait_end(self, timeout: float | None = None) -> bool:
        """Wait until the server has gone, taking events in meanwhile; False when the time is over first."""
        until = None if timeout is None else time.monotonic() + real("timeout", timeout, 0.0, YEAR_S)
        try:
            while True:
                message = self.link.receive(None if until is None else max(0.0, until - time.monotonic()), fds=False)
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
        while (message := self.link.receive(0.0, fds=False)) is not None:
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
        may_bring_fds = op == Op.ARENA
        while True:
            reply = self.link.receive(left, may_bring_fds)
            if reply is None:
                raise CallTimeout(f"no reply to op {op} within {timeout} s", "is the memory manager alive?")
            if reply.flags & REPLY and reply.request == request:
                if not reply.flags & ERROR:
                    return reply
                close_fds(reply)
                raise failure_of(reply)
            close_fds(reply)
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

    # -- arenas -------------------------------------------------------------------------------------------------

    def arena(self, name: str, *, write: bool = False) -> Arena:
        """Map an arena (`<pool>/l1`, `<pool>/l2`, `temp`, …), once per name and mode."""
        found = self._arenas.get((name, write))
        if found is not None:
            return found
        if not isinstance(self.link, UnixLink):
            return self.side_arena(name, write=write)
        reply = self.call(Op.ARENA, self._ref(name, write))
        return self._mapped(name, write, *descriptor_of(reply, name))

    def side_arena(self, name: str, *, write: bool = False) -> Arena:
        """The same over a short connection of its own: for ZMQ, and while calls of an async client run.

        Raises:
            Refused: the manager is on another machine.
        """
        found = self._arenas.get((name, write))
        if found is not None:
            return found
        return self._mapped(name, write, *self.descriptor(name, write=write))

    def descriptor(self, name: str, *, write: bool) -> tuple[ArenaInfo, int]:
        """An arena for who maps it himself, over a short connection of its own.

        Returns: what it is, and a descriptor that is the caller's to close, -1 for `cuda-ipc`.

        Raises:
            Refused: the manager is on another machine.
            DataError: what the manager says.
        """
        try:
            return ask_descriptor(self.welcome.path, self._ref(name, write), self.timeout)
        except Disconnected as error:
            if isinstance(self.link, UnixLink):
                raise
            raise Refused(
                f"arena {name} of node {self.welcome.node} can't be mapped here: {self.address} carries no "
                f"descriptors, and the manager's socket {self.welcome.path} is not on this machine",
                "map arenas on that node; from elsewhere, pull pages and send arrays in messages",
            ) from error

    def _ref(self, name: str, write: bool) -> ArenaRef:
        return ArenaRef(
            text("name", name, MAX_NAME + 10), flag("write", write), self.welcome.session, self.welcome.secret
        )

    def device_arena(self, name: str, *, write: bool = False) -> DeviceArena:
        """Map an arena that lies on a GPU, in this process's primary context there, once per name and mode. Whether a
        mapping without `write` can't be written says its `readonly_enforced`."""
        found = self._device_arenas.get((name, write))
        if found is not None:
            return found
        info, fd = self.descriptor(name, write=write)
        arena = DeviceArena.attach(info, fd, write=write)
        arena.close()
        self._device_arenas[name, write] = arena
        return arena

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
        """Who is connected and what each holds."""
        rows: list[dict[str, Any]] = []
        while page := self.call(Op.INSPECT, SessionsAfter(rows[-1]["session"] if rows else 0)).body(Tree).data:
            rows += page
        return rows

    def overview(self) -> dict[str, Any]:
        """What there is of pages, TempBuffers, weights and jobs, and whose it is."""
        data: dict[str, Any] = self.call(Op.OVERVIEW).body(Tree).data
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
