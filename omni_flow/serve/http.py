"""Small parts that all routes share: bodies in, JSON and event streams out, and what happens when the caller leaves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from omni_flow.serve.errors import ApiError, bad, of_fault
from omni_flow.serve.guard import CALL, Call
from omni_flow.serve.running import Running

T = TypeVar("T")
encode = msgspec.json.Encoder(enc_hook=repr).encode
_decode = msgspec.json.Decoder().decode
SSE_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
DONE = b"data: [DONE]\n\n"
LINE = "omni_flow.line"
"""In the scope: the `Line` of the connection, if the server's own protocol made it."""


class Line:
    """Whether a caller is still there, and what to do when he is not."""

    __slots__ = ("_callbacks", "_lost")

    def __init__(self) -> None:
        self._callbacks: set[Callable[[], object]] = set()
        self._lost = False

    def add(self, then: Callable[[], object]) -> None:
        """Call `then` when the connection is lost, at once if it is."""
        if self._lost:
            then()
        else:
            self._callbacks.add(then)

    def discard(self, then: Callable[[], object]) -> None:
        """Do not call it any more."""
        self._callbacks.discard(then)

    def lose(self) -> None:
        """The connection is lost."""
        self._lost = True
        for then in list(self._callbacks):
            then()


def call_of(request: Request) -> Call:
    """Who calls."""
    found: Call = request.scope[CALL]
    return found


def refuse_packed(request: Request) -> None:
    """Raise ApiError 415 for a compressed body."""
    packed = request.headers.get("content-encoding", "identity")
    if packed != "identity":
        raise ApiError(415, f"bodies are taken as they are, not as {packed}", code="unsupported_media_type")


async def json_body(request: Request) -> dict[str, Any]:
    """The body as a JSON object. Raises ApiError."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, f"expected application/json, not {kind}", code="unsupported_media_type")
    refuse_packed(request)
    try:
        found = _decode(await request.body())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad(f"the body is no JSON: {error}", code="invalid_json") from error
    if type(found) is not dict:
        raise bad("the body must be a JSON object", code="invalid_json")
    return found


class Json(Response):
    """A JSON body written by msgspec."""

    media_type = "application/json"

    def __init__(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        # What the base class does at twenty times the cost.
        self.status_code, self.background = status, None
        self.body = content if type(content) is bytes else encode(content)
        self.raw_headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(self.body))]
        if headers:
            self.raw_headers += [(name.encode(), value.encode()) for name, value in headers.items()]


@contextlib.contextmanager
def faults() -> Iterator[None]:
    """Errors of the runtime that are a caller's become ApiErrors."""
    try:
        yield
    except Exception as fault:
        known = of_fault(fault)
        if known is None or known is fault:
            raise
        raise known from fault


async def while_connected(request: Request, running: list[Running], work: Awaitable[T]) -> T:
    """The result of `work`, or what it raises; when the caller leaves, `running` is cancelled and so `work` ends."""
    with leaving(request.scope, request.receive, lambda: [each.cancel() for each in running]):
        return await work


@contextlib.contextmanager
def leaving(scope: Scope, receive: Receive, then: Callable[[], object]) -> Iterator[None]:
    """Call `then` when the caller leaves meanwhile. The server's own protocol tells; another's `receive` is watched."""
    line: Line | None = scope.get(LINE)
    if line is not None:
        line.add(then)
        try:
            yield
        finally:
            line.discard(then)
        return
    watcher = asyncio.ensure_future(_left(receive, then))
    try:
        yield
    finally:
        watcher.cancel()


async def _left(receive: Receive, then: Callable[[], object]) -> None:
    """Wait until the caller has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
    then()


class EventStream(Response):
    """Server-sent events from an iterator of whole chunks. When the caller leaves, `leave` is called.

    What `chunks` raises before its first chunk becomes an error response; after it, an `error` event.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        leave: Callable[[], object],
        media_type: str = "text/event-stream",
        event_errors: bool = True,
    ) -> None:
        super().__init__(None, 200, SSE_HEADERS, media_type)
        del self.raw_headers[[name for name, _ in self.raw_headers].index(b"content-length")]
        self._chunks, self._leave, self._event_errors = chunks, leave, event_errors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with leaving(scope, receive, self._leave):
            await self._send(send)

    async def _send(self, send: Send) -> None:
        started = False
        try:
            async for chunk in self._chunks:
                if not started:
                    started = True
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except Exception as fault:
            known = of_fault(fault)
            if known is None or not started:
                raise known or fault from fault
            if self._event_errors:
                await send({"type": "http.response.body", "body": event_error(known), "more_body": True})
        finally:
            self._leave()
            closing = getattr(self._chunks, "aclose", None)
            if closing is not None:
                await closing()
        if not started:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def event(data: Any) -> bytes:
    """One event without a name."""
    return b"data: " + encode(data) + b"\n\n"


def named_event(name: str, data: Any) -> bytes:
    """One event with a name."""
    return b"event: " + name.encode() + b"\ndata: " + encode(data) + b"\n\n"


def event_error(error: ApiError) -> bytes:
    """The event that says that a stream broke."""
    return b"event: error\ndata: " + error.body() + b"\n\n"
