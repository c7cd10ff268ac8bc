"""`launch` and `alaunch`: a deployment on this machine as users hold it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator, Mapping
from types import TracebackType
from typing import Any, Self, Unpack

import uvloop

from omni_flow.control.compiled import CompiledGraph
from omni_flow.control.graph import Graph
from omni_flow.control.runtime.client import AsyncRequest, AsyncSession, Caller, Request, Session
from omni_flow.control.runtime.gateway import Gateway
from omni_flow.deploy.launchers import Launcher, LocalLauncher, LoopLauncher, Options
from omni_flow.deploy.places import RoleStatus

__all__ = ["AsyncDeployment", "Deployment", "LocalLauncher", "LoopLauncher", "Options", "alaunch", "launch"]

END_S = 10.0
"""How long work under way on a deployment's loop is waited for when it ends."""


class AsyncDeployment:
    """A running graph, on the caller's event loop. `async with` it, or await it and `close()` it."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher

    @property
    def gateway(self) -> Gateway:
        """Where requests are admitted; servers submit to it directly."""
        return self.launcher.gateway

    async def start(self) -> Self:
        """Wait until every role is up. Raises LaunchError, naming role, exception and mend; nothing is left then."""
        await self.launcher.start()
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        return self.start().__await__()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(0.0 if kind is not None else 5.0)

    def session(self, id: str | None = None, params: Mapping[str, Any] | None = None) -> AsyncSession:
        """Requests that share an id and params."""
        return AsyncSession(self.gateway, id, params)

    async def submit(self, **options: Any) -> AsyncRequest:
        """A request without a session; see `AsyncSession.submit`."""
        return await AsyncSession(self.gateway, nameless=True).submit(**options)

    def status(self) -> dict[str, RoleStatus]:
        """Every role: its state, and that of each replica with pid, epoch, restarts, load seconds and cause."""
        return self.launcher.status()

    async def census(self) -> dict[str, dict[str, int]]:
        """What every live replica holds of requests, by id. All zero when nothing is live."""
        return await self.launcher.census()

    async def counters(self) -> dict[str, dict[str, int]]:
        """What the role of every live replica has counted since it came up, by the replica's id (its `counters()`)."""
        return await self.launcher.counters()

    async def scale(self, role: str, count: int, drain_s: float = 30.0) -> None:
        """Have `count` replicas of a role; those that leave finish their requests, for `drain_s` at most.

        Raises: UnknownRole, LaunchError, ValueError.
        """
        await self.launcher.scale(role, count, drain_s)

    async def close(self, drain_s: float = 5.0) -> None:
        """Wait `drain_s` at most for live requests, cancel the others, end every process."""
        await self.launcher.close(drain_s)


class Deployment:
    """A running graph, from any thread; its event loop runs in a thread of its own. `with` it, or `close()` it."""

    def __init__(self, make: Callable[[], Launcher]) -> None:
        """Made by `launch`."""
        self._closed = False
        launcher = make()
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="omni-flow", daemon=True)
        self._thread.start()
        self._call = Caller(self._loop)
        self._app = AsyncDeployment(launcher)
        try:
            self._call(self._app.start())
        except BaseException:
            self._end_loop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(0.0 if kind is not None else 5.0)

    def session(self, id: str | None = None, params: Mapping[str, Any] | None = None) -> Session:
        """Requests that share an id and params."""
        return Session(self._app.session(id, params), self._call)

    def submit(self, **options: Any) -> Request:
        """A request without a session; see `Session.submit`."""
        return Request(self._call(self._app.submit(**options)), self._call)

    def status(self) -> dict[str, RoleStatus]:
        """Every role: its state, and that of each replica with pid, epoch, restarts, load seconds and cause."""

        async def ask() -> dict[str, RoleStatus]:
            return self._app.status()

        return self._call(ask())

    def census(self) -> dict[str, dict[str, int]]:
        """What every live replica holds of requests, by id. All zero when nothing is live."""
        return self._call(self._app.census())

    def counters(self) -> dict[str, dict[str, int]]:
        """As `AsyncDeployment.counters`."""
        return self._call(self._app.counters())

    def scale(self, role: str, count: int, drain_s: float = 30.0) -> None:
        """As `AsyncDeployment.scale`."""
        self._call(self._app.scale(role, count, drain_s))

    def close(self, drain_s: float = 5.0) -> None:
        """Wait `drain_s` at most for live requests, cancel the others, end every process. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self._call(self._app.close(drain_s))
        finally:
            self._end_loop()

    def _end_loop(self) -> None:
        async def rest() -> None:
            """A start that was interrupted still has to end its processes."""
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            if tasks:
                await asyncio.wait(tasks, timeout=END_S)

        self._call(rest())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def launch(graph: Graph | CompiledGraph, *, processes: bool = True, **options: Unpack[Options]) -> Deployment:
    """Run a graph on this machine; returns when every role is up.

    Args:
        graph: what to run; compiled here if it is not.
        processes: a process for each replica. False: all in this process, for tests and notebooks.
        options: see `Options`.

    Raises:
        LaunchError: a role could not be loaded; names role, exception and mend. Nothing is left running.
        GraphError: the graph is wrong.
        UnknownRole: `replicas` names a role that the graph does not have.
    """
    return Deployment(lambda: _launcher(graph, processes, options))


def alaunch(graph: Graph | CompiledGraph, *, processes: bool = True, **options: Unpack[Options]) -> AsyncDeployment:
    """As `launch`, on the running loop: `async with alaunch(graph) as app`."""
    return AsyncDeployment(_launcher(graph, processes, options))


def _launcher(graph: Graph | CompiledGraph, processes: bool, options: Options) -> Launcher:
    if processes and options.get("transport") != "inproc":
        return LocalLauncher(graph, **options)
    return LoopLauncher(graph, **options)
