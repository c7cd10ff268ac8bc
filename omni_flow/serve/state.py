"""What all routes of a server share."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

from omni_flow.control.runtime.errors import RuntimeFault
from omni_flow.serve.media.service import Media
from omni_flow.serve.memory import MemoryLook
from omni_flow.serve.metrics import Metrics
from omni_flow.serve.running import Book, Running
from omni_flow.serve.served import Catalogue, Served
from omni_flow.serve.sessions import Sessions, SessionState
from omni_flow.serve.settings import Settings

log = logging.getLogger("omni_flow.serve")


class Feed:
    """Frames of streamed placeholders that came whole with the request."""

    __slots__ = ("frames",)

    def __init__(self, frames: dict[str, list[Any]]) -> None:
        self.frames = frames

    async def run(self, running: Running) -> None:
        """Push all of them, then end each placeholder."""
        for name, frames in self.frames.items():
            for frame in frames:
                await running.push(name, frame)
            running.end(name)


class State:
    """Made once per application."""

    def __init__(self, served: Sequence[Served], settings: Settings) -> None:
        self.settings = settings
        self.catalogue = Catalogue(served)
        self.metrics = Metrics()
        self.sessions = Sessions(settings.max_sessions, settings.session_idle_s)
        self.sessions.on_over = self._session_over
        self.memory = {name: MemoryLook(served.deployment) for name, served in self.catalogue.graphs.items()}
        self.book = Book(settings, self.metrics, self.sessions)
        self.media = Media(settings.media)

    @property
    def stopping(self) -> bool:
        """Whether no new requests are taken."""
        return self.book.stopping

    def _session_over(self, session: SessionState) -> None:
        for served in self.catalogue.graphs.values():
            served.deployment.gateway.end_session(session.key, session.salt)

    @contextlib.asynccontextmanager
    async def feeding(self, feed: Feed, running: Running) -> AsyncIterator[None]:
        """Frames of a request are pushed while its outputs are taken; what is wrong with them ends the request."""
        if not feed.frames:
            yield
            return
        task = asyncio.ensure_future(feed.run(running))
        try:
            yield
            if task.done():
                task.result()
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, RuntimeFault):
                await task

    async def close(self) -> None:
        """End what this holds; the deployments are the caller's."""
        for running in list(self.book.live.values()):
            running.cancel()
        for look in self.memory.values():
            await look.close()
        await self.media.close()
