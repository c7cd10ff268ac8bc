"""`AsyncMemoryManagerClient`: the same session for an event loop. Calls may overlap; replies come by request id."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from omni_flow.data.arena import Arena
from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.errors import CallTimeout, DataError, Disconnected, StaleEpoch
from omni_flow.data.kv_client import (
    Keys,
    Match,
    Request,
    Room,
    Stored,
    abort_request,
    bring_request,
    commit_request,
    drop_request,
    groups_request,
    lookup_request,
    match_of,
    per_key,
    probe_request,
    reserve_request,
    room_of,
    session_tiers_request,
    stored_of,
    unpin_request,
)
from omni_flow.data.link import Link, UnixLink, failure_of
from omni_flow.data.messages import (
    L1,
    L2,
    Group,
    SessionPages,
    SessionTiers,
    Tree,
)
from omni_flow.data.protocol import ERROR, EVENT, REPLY, Column, Message, Op, encode

U32 = NDArray[np.uint32]


class AsyncMemoryManagerClient:
    """See `MemoryManagerClient`; make it with `await AsyncMemoryManagerClient.connect(address, …)`.

    The handshake and the mapping of arenas (once per process) are short blocking calls.
    """

    def __init__(self, session: MemoryManagerClient) -> None:
        self._session = session
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[Message]] = {}
        self._outbox: deque[tuple[bytes, Sequence[int]]] = deque()
        self._request = 1 << 20
        self._renewing: asyncio.Future[None] | None = None
        self._closed = False
        self.on_event: Callable[[Message], None] | None = None
        self._attach()

    @classmethod
    async def connect(cls, address: str, **options: Any) -> AsyncMemoryManagerClient:
        """Connect; options as of `MemoryManagerClient`."""
        return cls(MemoryManagerClient(address, **options))

    @property
    def session(self) -> MemoryManagerClient:
        """The blocking client underneath: its handshake, arenas and hooks. Make no calls through it."""
        return self._session

    @property
    def epoch(self) -> int:
        return self._session.epoch

    def _attach(self) -> None:
        link = self._session.link
        if isinstance(link, UnixLink):
            link.sock.setblocking(False)
        self._loop.add_reader(link.fileno(), self._readable)

    def _detach(self) -> None:
        link: Link = self._session.link
        if link.fileno() >= 0:  # else it is closed: the server was gone when this client wanted to renew it
            self._loop.remove_reader(link.fileno())
            self._loop.remove_writer(link.fileno())

    def _readable(self) -> None:
        """Take in everything that has come."""
        try:
            while (message := self._session.link.receive(0.0, fds=False)) is not None:
                if message.flags & REPLY:
                    waiting = self._waiting.pop(message.request, None)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(message.own())
                    elif message.flags & ERROR and not message.request:
                        raise failure_of(message)
                elif message.op == Op.T_TRIM:
                    for hook in self._session.on_trim:
                        hook()
                elif message.flags & EVENT and self.on_event is not None:
                    self.on_event(message)
        except DataError as error:
            self._lost(error)

    def _lost(self, error: DataError) -> None:
        """The connection is gone: every call in flight ends with it."""
        self._detach()
        self._outbox.clear()
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(Disconnected(error.message, error.mend))

    def _send(self, data: bytes, fds: Sequence[int]) -> None:
        if self._outbox:
            self._outbox.append((data, fds))
            return
        try:
            self._session.link.send(data, fds)
        except BlockingIOError:
            self._outbox.append((data, fds))
            self._loop.add_writer(self._session.link.fileno(), self._writable)
        if not isinstance(self._session.link, UnixLink):
            self._loop.call_soon(self._readable)

    def _writable(self) -> None:
        try:
            while self._outbox:
                self._session.link.send(*self._outbox[0])
                self._outbox.popleft()
        except BlockingIOError:
            return
        except DataError as error:
            self._lost(error)
            return
        self._loop.remove_writer(self._session.link.fileno())

    async def call(
        self,
        op: int,
        body: msgspec.Struct | None = None,
        columns: Sequence[Column] = (),
        fds: Sequence[int] = (),
        timeout: float | None = None,
    ) -> Message:
        """One request and its reply, which owns its memory. Errors as of `MemoryManagerClient.call`.

        A cancelled call is forgotten here; what the server has reserved or pinned for it stays with the session.
        """
        timeout = self._session.timeout if timeout is None else timeout
        if self._renewing is not None:
            await self._renewing
        self._request = request = (self._request + 1) & 0xFFFFFFFF or 1
        future: asyncio.Future[Message] = self._loop.create_future()
        self._waiting[request] = future
        try:
            try:
                self._send(encode(op, 0, request, self._session.epoch, body, columns), fds)
            except Disconnected as error:  # before its end was read; the loop must not go on to watch it
                self._lost(error)
            async with asyncio.timeout(timeout):
                reply = await future
        except TimeoutError as error:
            raise CallTimeout(f"no reply to op {op} within {timeout} s", "is the memory manager alive?") from error
        except Disconnected as error:
            await self._renew()
            raise StaleEpoch(
                f"the memory manager at {self._session.address} was started again", "this client is registered anew"
            ) from error
        finally:
            self._waiting.pop(request, None)
        if reply.flags & ERROR:
            failure = failure_of(reply)
            if isinstance(failure, StaleEpoch):
                self._lost(failure)
                await self._renew()
            raise failure
        return reply

    async def _renew(self) -> None:
        """Register with the server that is there now; once, however many calls failed together.

        Raises:
            Disconnected: this client was closed, or there is no server.
        """
        if self._closed:
            raise Disconnected("this client was closed", "make another")
        if self._renewing is not None:
            await self._renewing
            return
        self._renewing = self._loop.create_future()
        try:
            await self._loop.run_in_executor(None, self._session.renew)
        finally:
            if self._closed:
                self._session.close()
            elif self._session.link.fileno() >= 0:  # registered, whatever became of what its owner does then
                self._attach()
            renewing, self._renewing = self._renewing, None
            renewing.set_result(None)

    def tell(self, op: int, body: msgspec.Struct | None = None) -> None:
        """One message without a reply."""
        self._send(encode(op, 0, 0, self._session.epoch, body), ())

    def arena(self, name: str, *, write: bool = False) -> Arena:
        """Map an arena; a blocking call of well under a millisecond, once per arena."""
        return self._session.side_arena(name, write=write)

    async def _ask(self, request: Request) -> Message:
        return await self.call(request.op, request.body, request.columns, timeout=self._session.timeout + request.wait)

    async def reserve(self, pool: str, count: int, *, least: int = 0, timeout: float = 0.0, tier: int = L1) -> Room:
        return room_of(await self._ask(reserve_request(pool, count, least, timeout, tier)))

    async def commit(
        self,
        pool: str,
        token: int,
        keys: Keys,
        *,
        positions: Sequence[int] | U32 | None = None,
        pin: bool = False,
        keep_duplicates: bool = False,
    ) -> Stored:
        return stored_of(await self._ask(commit_request(pool, token, keys, positions, pin, keep_duplicates)))

    async def abort(
        self, pool: str, token: int, *, positions: Sequence[int] | U32 | None = None, fence_ms: int = 0
    ) -> None:
        await self._ask(abort_request(pool, token, positions, fence_ms))

    async def lookup(self, pool: str, keys: Keys, *, pin: bool = True, tiers: int = L1 | L2) -> Match:
        return match_of(await self._ask(lookup_request(pool, keys, pin, tiers)))

    async def lookup_groups(
        self, groups: Sequence[tuple[Group, Keys]], *, pin: bool = True, tiers: int = L1 | L2
    ) -> Match:
        return match_of(await self._ask(groups_request(groups, pin, tiers)))

    async def unpin(self, pool: str, lease: int, *, positions: Sequence[int] | U32 | None = None) -> None:
        await self._ask(unpin_request(pool, lease, positions))

    async def probe(self, pool: str, keys: Keys) -> NDArray[np.uint8]:
        return per_key(await self._ask(probe_request(pool, keys)))

    async def drop(self, pool: str, keys: Keys) -> NDArray[np.uint8]:
        return per_key(await self._ask(drop_request(pool, keys)))

    async def fetch(self, pool: str, keys: Keys, *, tier: int = L1, timeout: float = 10.0) -> NDArray[np.uint8]:
        return per_key(await self._ask(bring_request("fetch", pool, keys, "", tier, timeout)))

    async def pull(self, pool: str, keys: Keys, peer: str, *, timeout: float = 30.0) -> NDArray[np.uint8]:
        return per_key(await self._ask(bring_request("pull", pool, keys, peer, L1, timeout)))

    async def push(self, pool: str, keys: Keys, peer: str, *, timeout: float = 30.0) -> NDArray[np.uint8]:
        return per_key(await self._ask(bring_request("push", pool, keys, peer, L1, timeout)))

    async def session_tiers(self, session: str) -> tuple[SessionPages, ...]:
        return (await self._ask(session_tiers_request(session))).body(SessionTiers).pages

    async def ping(self) -> None:
        await self.call(Op.PING)

    async def stats(self) -> dict[str, int | float]:
        data: dict[str, int | float] = (await self.call(Op.STATS)).body(Tree).data
        return data

    async def check(self) -> list[str]:
        data: list[str] = (await self.call(Op.CHECK)).body(Tree).data
        return data

    async def close(self) -> None:
        """End the session; calls in flight end with `Disconnected`."""
        self._closed = True
        self._lost(Disconnected("this client was closed"))
        self._session.close()

    async def __aenter__(self) -> AsyncMemoryManagerClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
