"""A node's line to one other: requests over a ZMQ DEALER that stays connected."""

import asyncio
import contextlib
import itertools
import logging
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, TypeVar

import msgspec
import zmq
import zmq.asyncio

from omni_flow.data.errors import BadArgument, BadMessage, DataError
from omni_flow.data.transfer import node_wire as w
from omni_flow.data.transfer.errors import PeerUnreachable
from omni_flow.data.zmq_keys import require_safe, server_keys

log = logging.getLogger("omni_flow.data.transfer")
_ID: Final = struct.Struct("<Q")
MAX_MESSAGE: Final = 256 << 20
Answer = TypeVar("Answer", bound=msgspec.Struct)
Handle = Callable[[w.Said], Awaitable[w.Said | None]]
Why = Callable[[], DataError]


class Link:
    """To whoever listens at `address`: another life of the node, or another node, when the one before has gone.

    `met` is whom one has met there (node, epoch), None: nobody, or it has gone, `since` when (seconds of the loop).
    `name` is that node's while this is the line to be used for it, else empty. Raises: BadArgument, Refused.
    """

    def __init__(self, context: zmq.asyncio.Context, address: str, key: str) -> None:
        require_safe(address, key)
        self.address = address
        self.name = ""
        self.met: tuple[str, int] | None = None
        self.since = asyncio.get_running_loop().time()
        self._gone: Why | None = None
        self._within: dict[asyncio.Timeout, Why | None] = {}
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
        if key:
            public, _ = server_keys(key)
            self._socket.curve_serverkey = public
            self._socket.curve_publickey, self._socket.curve_secretkey = zmq.curve_keypair()
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._socket.close()
            raise BadArgument(f"{address!r} is no ZMQ endpoint: {error}", "as tcp://host:port") from error
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[w.Said]] = {}
        self._reader = asyncio.create_task(self._read())

    def meet(self, node: str, epoch: int) -> None:
        """A node has answered here; from now on this is the line to it."""
        self.name, self.met, self._gone = node, (node, epoch), None

    def leave(self, why: Why) -> None:
        """The node that was met here has gone: what was asked of it, and is done with it, ends by this error."""
        self.name, self.met, self._gone = "", None, why
        self.since = now = asyncio.get_running_loop().time()
        for limit in self._within:
            if not limit.expired():
                self._within[limit] = why
                limit.reschedule(now)

    @contextlib.asynccontextmanager
    async def while_there(self) -> AsyncIterator[None]:
        """For what needs the node that was met. Raises: the error of `leave` when that node has gone, as soon as it
        has."""
        if self._gone is not None:
            raise self._gone()
        async with self._limit(None):
            yield

    @contextlib.asynccontextmanager
    async def _limit(self, timeout: float | None) -> AsyncIterator[None]:
        """Raises: the error of `leave`, PeerUnreachable after `timeout` seconds."""
        limit = asyncio.timeout(timeout)
        self._within[limit] = None
        try:
            async with limit:
                yield
        except TimeoutError as error:
            if (why := self._within[limit]) is not None:
                raise why() from error
            raise PeerUnreachable(
                f"node {self.name or '?'} at {self.address} did not answer within {timeout or 0:.1f} s"
            ) from error
        finally:
            del self._within[limit]

    async def ask(self, request: w.Said, kind: type[Answer], timeout: float) -> Answer:
        """Raises: PeerUnreachable after `timeout` seconds, the error of `leave` when the node that was met goes before
        it answers, what the peer says, BadMessage for another answer."""
        if self._socket.closed:
            raise PeerUnreachable(f"the address {self.address} was forgotten")
        if self._gone is not None and not isinstance(request, w.Meet):
            raise self._gone()
        id = next(self._ids)
        waiting = self._waiting[id] = asyncio.get_running_loop().create_future()
        try:
            async with self._limit(max(timeout, 0.0)):
                await self._socket.send_multipart([_ID.pack(id), w.encode(request)])
                answer = await waiting
        except BaseException:
            if waiting.done() and not waiting.cancelled():
                await self._give_back(waiting.result())
            raise
        finally:
            del self._waiting[id]
        if isinstance(answer, w.Sorry):
            raise answer.error()
        if not isinstance(answer, kind):
            raise BadMessage(f"node {self.name} answered {type(request).__name__} by {type(answer).__name__}")
        return answer

    async def tell(self, message: w.Said) -> None:
        """Send without an answer; dropped when the line is full, as to a node that is gone, or was closed."""
        if self._socket.closed:
            return
        with contextlib.suppress(zmq.Again):
            await self._socket.send_multipart([_ID.pack(0), w.encode(message)], zmq.NOBLOCK)

    async def _give_back(self, answer: w.Said) -> None:
        """What an answer holds for whoever asked, who waits no more."""
        if isinstance(answer, w.Pinned) and answer.lease:
            await self.tell(w.Unpin(answer.lease))

    async def _read(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            answer = _decode(frames)
            if answer is None:
                continue
            waiting = self._waiting.get(answer[0])
            if waiting is not None and not waiting.done():
                waiting.set_result(answer[1])
            else:
                await self._give_back(answer[1])

    def close(self) -> None:
        self._reader.cancel()
        self._socket.close()


class Listener:
    """The node's ROUTER: hands each request to `handle` in a task of its own and sends back what it returns."""

    def __init__(self, context: zmq.asyncio.Context, address: str, key: str, handle: Handle) -> None:
        require_safe(address, key)
        self._handle = handle
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
        if key:
            self._socket.curve_server = True
            _, self._socket.curve_secretkey = server_keys(key)
        self._socket.bind(address)
        self.address: str = self._socket.get_string(zmq.LAST_ENDPOINT)

    async def run(self) -> None:
        """Serve until cancelled; a defect in `handle` ends it."""
        async with asyncio.TaskGroup() as group:
            while True:
                frames = await self._socket.recv_multipart()
                request = _decode(frames[1:])
                if request is not None:
                    group.create_task(self._answer(frames[0], *request))

    async def _answer(self, identity: bytes, id: int, request: w.Said) -> None:
        answer: w.Said | None
        try:
            answer = await self._handle(request)
        except DataError as error:
            log.info("request of a node failed", extra={"request": type(request).__name__, "error": str(error)})
            answer = w.Sorry(error.code, error.message, error.mend)
        if id and answer is not None:
            await self._socket.send_multipart([identity, _ID.pack(id), w.encode(answer)])

    def close(self) -> None:
        self._socket.close()


def _decode(frames: list[bytes]) -> tuple[int, w.Said] | None:
    """Id and message; None for what is not of this protocol, whoever sent it."""
    if len(frames) != 2 or len(frames[0]) != _ID.size:
        return None
    try:
        return _ID.unpack(frames[0])[0], w.decoder.decode(frames[1])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
