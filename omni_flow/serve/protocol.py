"""uvicorn's HTTP protocol with patience that ends: a client must send its head and its body in time."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from omni_flow.serve.errors import ApiError
from omni_flow.serve.http import LINE, Line


def protocol(header_s: float, body_s: float, most: int) -> type[HttpToolsProtocol]:
    """A protocol class for `uvicorn.Config(http=...)` that closes connections of clients that take longer,
    and those above `most`."""

    class Patient(HttpToolsProtocol):
        _patience: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            self._line = Line()
            super().connection_made(transport)
            self._wait(header_s)
            if len(self.connections) > most:
                self._refuse(ApiError(503, f"{most} connections are open, the limit", code="too_many_connections"))

        def connection_lost(self, exc: Exception | None) -> None:
            self._rest()
            self._line.lose()
            super().connection_lost(exc)

        def on_message_begin(self) -> None:
            self._wait(header_s)
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._wait(body_s)
            super().on_headers_complete()
            self.scope[LINE] = self._line  # type: ignore[literal-required]

        def on_message_complete(self) -> None:
            self._rest()
            super().on_message_complete()

        def handle_websocket_upgrade(self) -> None:
            self._rest()
            super().handle_websocket_upgrade()

        def send_400_response(self, msg: str) -> None:
            """What is no HTTP is told so in the form of all other errors."""
            self._refuse(ApiError(400, msg, code="invalid_http"))

        def _refuse(self, error: ApiError) -> None:
            body = error.body()
            reason = HTTPStatus(error.status).phrase.encode()
            head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\nconnection: close\r\nretry-after: 1\r\n"
            self.transport.write(head % (error.status, reason) + b"content-length: %d\r\n\r\n" % len(body) + body)
            self.transport.close()

        def _wait(self, seconds: float) -> None:
            self._rest()
            self._patience = self.loop.call_later(seconds, self._give_up)

        def _rest(self) -> None:
            if self._patience is not None:
                self._patience.cancel()
                self._patience = None

        def _give_up(self) -> None:
            transport: Any = self.transport
            if not transport.is_closing():
                transport.abort()

    return Patient
