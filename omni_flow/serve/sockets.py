"""What the WebSocket routes share: JSON in and out, errors as messages, frames pushed without blocking the reader."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from omni_flow.serve.errors import ApiError, bad
from omni_flow.serve.guard import CALL, KEY_PROTOCOLS, Call
from omni_flow.serve.http import encode
from omni_flow.serve.running import Running

PENDING_BYTES = 16 * 2**20
"""How far a client may be ahead of the graph with its frames."""


class Socket:
    """One accepted WebSocket."""

    def __init__(self, websocket: WebSocket) -> None:
        self._websocket = websocket
        self.call: Call = websocket.scope[CALL]

    async def accept(self, protocols: tuple[str, ...] = ()) -> None:
        """Accept, with the first of the client's subprotocols that is known."""
        offered = [p.strip() for p in self._websocket.headers.get("sec-websocket-protocol", "").split(",")]
        chosen = next((p for p in offered if p in protocols), None)
        if chosen is None:
            chosen = next((p for p in offered if p.startswith(KEY_PROTOCOLS)), None)
        await self._websocket.accept(chosen)

    async def receive(self) -> dict[str, Any] | bytes:
        """The next message: a JSON object, or bytes. Raises WebSocketDisconnect, ApiError."""
        message = await self._websocket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", 1006))
        data = message.get("bytes")
        if data is not None:
            return bytes(data)
        try:
            found = msgspec.json.decode(message.get("text") or "")
        except (msgspec.DecodeError, UnicodeError) as error:
            raise bad(f"the message is no JSON: {error}", code="invalid_json") from error
        if not isinstance(found, dict):
            raise bad("a message is a JSON object", code="invalid_json")
        return found

    async def send(self, message: dict[str, Any]) -> None:
        """Send a JSON object."""
        await self._websocket.send({"type": "websocket.send", "text": encode(message).decode()})

    async def error(self, error: ApiError, **more: Any) -> None:
        """Say what is wrong."""
        await self.send({"type": "error", **more, "error": error.as_object()})

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """Close it."""
        await self._websocket.close(code, reason[:120])


class Pusher:
    """Pushes frames of streamed placeholders into a request as credit allows, so that whoever reads never waits."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self._frames: deque[tuple[str, Any, int]] = deque()
        self._bytes = 0
        self._more = asyncio.Event()
        self.task = asyncio.ensure_future(self._run())

    def push(self, placeholder: str, value: Any) -> None:
        """The next frame. Raises ApiError 429 if the client is too far ahead."""
        size = getattr(value, "nbytes", None) or len(value) if hasattr(value, "__len__") else 64
        if self._bytes + size > PENDING_BYTES:
            raise ApiError(
                429, "frames come faster than the graph takes them", param=placeholder, code="rate_limit_exceeded"
            )
        self._bytes += size
        self._frames.append((placeholder, value, size))
        self._more.set()

    def end(self, placeholder: str) -> None:
        """No more frames of it."""
        self._frames.append((placeholder, None, -1))
        self._more.set()

    async def _run(self) -> None:
        while True:
            while self._frames:
                placeholder, value, size = self._frames.popleft()
                if size < 0:
                    self._running.end(placeholder)
                else:
                    await self._running.push(placeholder, value)
                    self._bytes -= size
            self._more.clear()
            await self._more.wait()

    def close(self) -> None:
        """Stop pushing."""
        self.task.cancel()
