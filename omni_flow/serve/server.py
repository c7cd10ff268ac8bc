"""A server: deployments brought up, the application on a socket, and an orderly end."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from omni_flow.control.compiled import CompiledGraph
from omni_flow.control.graph import Graph
from omni_flow.deploy.local import AsyncDeployment, alaunch
from omni_flow.serve.app import make_app
from omni_flow.serve.endpoints import Endpoint
from omni_flow.serve.keys import Key
from omni_flow.serve.protocol import protocol
from omni_flow.serve.served import Served
from omni_flow.serve.settings import Settings
from omni_flow.serve.state import State

log = logging.getLogger("omni_flow.serve")


@dataclass(frozen=True, slots=True)
class Serving:
    """A graph to serve; `options` go to `alaunch`."""

    graph: Graph
    endpoints: Sequence[Endpoint] = ()
    options: dict[str, Any] = field(default_factory=dict)


class Server:
    """`async with Server(...) as server`: up at `server.url`, and gone afterwards with everything it started."""

    def __init__(
        self,
        serving: Sequence[Serving],
        settings: Settings | None = None,
        keys: Iterable[Key] = (),
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        """Starts the nurseries of the deployments: best before there are threads.

        Raises OSError, LaunchError, MappingError.
        """
        self.settings = settings or Settings()
        self._keys = list(keys)
        self._host, self._port = host, port
        if port:
            self._listen().close()  # better found out before anything is started
        self._compiled: list[tuple[CompiledGraph, AsyncDeployment, Sequence[Endpoint]]] = []
        for each in serving:
            compiled = each.graph.compile()
            for endpoint in each.endpoints:
                endpoint.check(compiled)
            self._compiled.append((compiled, alaunch(compiled, **each.options), each.endpoints))
        self._stack = AsyncExitStack()
        self.state: State

    @property
    def url(self) -> str:
        """Where it answers."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    @property
    def deployments(self) -> list[AsyncDeployment]:
        """Those of its graphs, in order."""
        return [deployment for _, deployment, _ in self._compiled]

    async def __aenter__(self) -> Server:
        sock = self._listen()
        try:
            served = []
            for compiled, deployment, endpoints in self._compiled:
                await self._stack.enter_async_context(deployment)
                served.append(Served(compiled, deployment, endpoints))
            app = make_app(served, self.settings, self._keys)
            self.state = app.state
            await self._serve(app, sock)
        except BaseException:
            sock.close()
            await self._stack.aclose()
            raise
        return self

    def _listen(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((self._host, self._port))
        except BaseException:
            sock.close()
            raise
        self._port = sock.getsockname()[1]
        return sock

    async def _serve(self, app: Any, sock: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            http=protocol(self.settings.header_s, self.settings.body_s, self.settings.max_connections),
            ws="websockets-sansio",
            ws_max_size=self.settings.max_body_bytes,
            log_config=None,
            access_log=False,
            proxy_headers=False,
            lifespan="on",
            server_header=False,
            date_header=False,
            timeout_graceful_shutdown=max(1, int(self.settings.drain_s)),
            backlog=2048,
        )
        self._uvicorn = _Uvicorn(config)
        self._task = asyncio.ensure_future(self._uvicorn.serve([sock]))
        ready = asyncio.ensure_future(self._uvicorn.ready.wait())
        await asyncio.wait([self._task, ready], return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self._task.done():
            await self._task
            raise RuntimeError("the HTTP server ended while it was starting; its log has the cause")

    def begin_stop(self) -> None:
        """Take no new requests from now on; health says so."""
        self.state.book.stopping = True

    async def __aexit__(self, *exc: object) -> None:
        """Requests under way end within `drain_s`, or are cancelled; then everything is closed."""
        self.begin_stop()
        await self._drain()
        self._uvicorn.should_exit = True
        try:
            await self._task
        finally:
            await self._stack.aclose()

    async def _drain(self) -> None:
        book = self.state.book
        if book.live and self.settings.drain_s > 0:
            empty = asyncio.Event()
            book.on_end.append(lambda running: None if book.live else empty.set())
            try:
                async with asyncio.timeout(self.settings.drain_s):
                    await empty.wait()
            except TimeoutError:
                log.warning("%d requests are cancelled: they did not end in time", len(book.live))
        for running in list(book.live.values()):
            running.cancel()


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own signal handlers, saying when it is up."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        await self._serve(sockets)


def _calm_gc() -> None:
    """What was made until now stays; what requests leave behind is mostly freed by counting references."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 20)


async def serve_until_signal(server: Server, ready: Callable[[Server], None]) -> None:
    """Serve until SIGINT or SIGTERM; a second signal cancels what is still under way."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            for running in list(server.state.book.live.values()):
                running.cancel()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        async with server:
            _calm_gc()
            ready(server)
            await stop.wait()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
