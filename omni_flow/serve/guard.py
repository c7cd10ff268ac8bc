"""What every call passes before it reaches a route: request id, API key, limits, body size, CORS, the log line.

Plain ASGI: it touches each message once and never holds a body.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from omni_flow.serve.errors import ApiError, too_many
from omni_flow.serve.keys import Key, Keys, Limiter
from omni_flow.serve.metrics import Metrics
from omni_flow.serve.settings import Settings

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Handler = Callable[[Request], Awaitable[Response]]

log = logging.getLogger("omni_flow.serve")

CALL = "omni_flow.call"
LEFT = 499
"""Status, for logs and metrics, of a call whose caller left before there was an answer."""
_REQUEST_ID = re.compile(rb"[A-Za-z0-9_.-]{1,64}")
_TRACE = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_OPEN = ("/health/live", "/health/ready", "/page/", "/v1/files/")
_LIMITED = "/v1/"
KEY_PROTOCOLS = ("openai-insecure-api-key.", "omni-flow-key.")
"""How a browser's WebSocket, which can't set headers, carries its key: as a subprotocol."""


class Call:
    """One HTTP call or WebSocket: who calls, and its ids."""

    __slots__ = ("id", "key", "started", "status", "trace")

    def __init__(self, id: str, key: Key, started: float, trace: str | None) -> None:
        self.id, self.key, self.started, self.trace = id, key, started, trace
        self.status = 0

    @property
    def tenant(self) -> str:
        """The caller's name."""
        return self.key.name


class Guard:
    """ASGI middleware around the routes."""

    def __init__(self, app: App, settings: Settings, keys: Keys, metrics: Metrics) -> None:
        self.app, self.settings, self.keys, self.metrics = app, settings, keys, metrics
        self._limiters: dict[str, Limiter] = {}
        self._direct: dict[str, tuple[Any, Handler]] = {}

    def direct(self, path: str, route: Any, handler: Handler) -> None:
        """POSTs to `path` go to `handler` at once: the framework's way there takes longer than the rest of a call."""
        self._direct[path] = (route, handler)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    # ---- who calls ------------------------------------------------------------------------------------------

    def _admit(self, scope: Scope) -> tuple[Call, dict[bytes, bytes], ApiError | None]:
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        id = given.decode() if _REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        trace = headers.get(b"traceparent", b"")
        call = Call(
            id, self.keys.anonymous, time.monotonic(), trace.decode() if _TRACE.fullmatch(trace) is not None else None
        )
        scope[CALL] = call
        path: str = scope["path"]
        if not self.keys.needed or path == "/" or path.startswith(_OPEN):
            return call, headers, None
        secret = _secret(headers)
        if not secret:
            return (
                call,
                headers,
                ApiError(401, "an API key is needed: Authorization: Bearer KEY", code="no_key"),
            )
        key = self.keys.find(secret)
        if key is None:
            return call, headers, ApiError(401, "that API key is not known here", code="invalid_api_key")
        call.key = key
        return call, headers, None

    def _limiter(self, key: Key) -> Limiter:
        found = self._limiters.get(key.name)
        if found is None:
            settings = self.settings
            found = self._limiters[key.name] = Limiter(
                key.rate if key.rate is not None else settings.rate_per_s,
                settings.burst,
                key.concurrency if key.concurrency is not None else settings.concurrency,
            )
        return found

    def _foreign(self, headers: dict[bytes, bytes]) -> ApiError | None:
        """Why a browser may not: another site's page asks for something to be done, or for a WebSocket.

        Browsers send some such calls without asking first, so that the answer being hidden is not enough.
        """
        origin = headers.get(b"origin")
        if origin is None or origin.partition(b"://")[2] == headers.get(b"host"):
            return None
        if origin.decode("latin-1") in self.settings.cors_origins:
            return None
        return ApiError(403, "pages of that site may not use this server: --cors-origin", code="origin_not_allowed")

    # ---- HTTP -----------------------------------------------------------------------------------------------

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        call, headers, refusal = self._admit(scope)
        if refusal is None and scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            refusal = self._foreign(headers)
        extra = [(b"x-request-id", call.id.encode())]
        origin = headers.get(b"origin")
        if origin is not None and origin.decode("latin-1") in self.settings.cors_origins:
            extra += [(b"access-control-allow-origin", origin), (b"vary", b"Origin")]
            if scope["method"] == "OPTIONS":
                await _preflight(extra, send)
                return
        limiter: Limiter | None = None
        if refusal is None and scope["method"] == "POST" and scope["path"].startswith(_LIMITED):
            limiter = self._limiter(call.key)
            wait = limiter.enter(call.started)
            if wait is not None:
                limiter = None
                refusal = too_many(*wait)
        if refusal is None and _length(headers) > self.settings.max_body_bytes:
            refusal = _too_large(self.settings.max_body_bytes)

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
                message["headers"] = [*message.get("headers", ()), *extra]
            await send(message)

        try:
            if refusal is not None:
                await send_error(refusal, tell)
            else:
                limited = _Limited(receive, self.settings.max_body_bytes)
                found = self._direct.get(scope["path"]) if scope["method"] == "POST" else None
                if found is None:
                    await self.app(scope, limited, tell)
                else:
                    scope["route"], handler = found
                    response = await handler(Request(scope, limited, tell))
                    await response(scope, limited, tell)
        except ClientDisconnect:
            call.status = LEFT
        except ApiError as error:
            if call.status:
                raise
            await send_error(error, tell)
            refusal = error
        except Exception:
            log.exception("a handler failed", extra={"request": call.id, "path": scope["path"]})
            if not call.status:
                await send_error(ApiError(500, "the server failed; its log has the cause", code="internal_error"), tell)
        finally:
            if limiter is not None:
                limiter.leave()
            self._note(scope, call, refusal)

    def _note(self, scope: Scope, call: Call, refusal: ApiError | None) -> None:
        took = time.monotonic() - call.started
        route = getattr(scope.get("route"), "path", "-")
        self.metrics.http.add(route, str(call.status))
        self.metrics.http_s.of(route).observe(took)
        if refusal is not None:
            self.metrics.refused.add(refusal.code or str(refusal.status))
        if log.isEnabledFor(logging.INFO):
            client = scope.get("client") or ("-",)
            log.info(
                "%s %s %d",
                scope.get("method", "WS"),
                scope["path"],
                call.status,
                extra={
                    "request": call.id,
                    "tenant": call.tenant,
                    "client": client[0],
                    "ms": round(took * 1000, 2),
                    "status": call.status,
                },
            )

    # ---- WebSocket ------------------------------------------------------------------------------------------

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        call, headers, refusal = self._admit(scope)
        refusal = refusal or self._foreign(headers)
        limiter = None
        if refusal is None:
            limiter = self._limiter(call.key)
            wait = limiter.enter(call.started)
            if wait is not None:
                limiter = None
                refusal = too_many(*wait)
        try:
            if refusal is not None:
                call.status = refusal.status
                await receive()
                if "websocket.http.response" in scope.get("extensions", {}):
                    await send_error(refusal, send, "websocket.http.response")
                else:
                    await send({"type": "websocket.close", "code": 1008, "reason": refusal.message[:120]})
                return
            call.status = 101
            await self.app(scope, receive, send)
        finally:
            if limiter is not None:
                limiter.leave()
            self._note(scope, call, refusal)


class _Limited:
    """Counts the bytes of a body as they come. Raises ApiError 413."""

    __slots__ = ("_left", "_most", "_receive")

    def __init__(self, receive: Receive, most: int) -> None:
        self._receive, self._left, self._most = receive, most, most

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._left -= len(message.get("body", b""))
            if self._left < 0:
                raise _too_large(self._most)
        return message


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body has more than {most} bytes", code="too_large", headers={"connection": "close"})


def _length(headers: dict[bytes, bytes]) -> int:
    text = headers.get(b"content-length", b"0")
    return int(text) if text.isdigit() else 0


def _secret(headers: dict[bytes, bytes]) -> str:
    bearer = headers.get(b"authorization", b"").decode("latin-1")
    if bearer[:7].lower() == "bearer ":
        return bearer[7:].strip()
    if b"x-api-key" in headers:
        return headers[b"x-api-key"].decode("latin-1").strip()
    for protocol in headers.get(b"sec-websocket-protocol", b"").decode("latin-1").split(","):
        for start in KEY_PROTOCOLS:
            if protocol.strip().startswith(start):
                return protocol.strip()[len(start) :]
    return ""


async def send_error(error: ApiError, send: Send, prefix: str = "http.response") -> None:
    """A whole error response."""
    body = error.body()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.encode(), value.encode()) for name, value in error.headers.items()]
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": f"{prefix}.start", "status": error.status, "headers": headers})
    await send({"type": f"{prefix}.body", "body": body})


async def _preflight(extra: list[tuple[bytes, bytes]], send: Send) -> None:
    headers = [
        *extra,
        (b"access-control-allow-methods", b"GET, POST, PATCH, DELETE"),
        (b"access-control-allow-headers", b"authorization, content-type, x-api-key, x-omni-session, x-request-id"),
        (b"access-control-max-age", b"600"),
        (b"content-length", b"0"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})
