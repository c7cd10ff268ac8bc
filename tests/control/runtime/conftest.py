"""An in-process deployment that must be empty when the test ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from omni_flow import Graph
from omni_flow.control.runtime.client import AsyncSession
from omni_flow.control.runtime.inprocess import InProcess

EMPTY = {"live": 0, "requests": 0, "nodes": 0, "running": 0, "open_numbers": 0}
WAIT_S = 20.0


async def settled(app: InProcess) -> dict[str, int]:
    """The census once all messages under way have been taken, or after `WAIT_S`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(WAIT_S):
            while app.census() != EMPTY:  # noqa: ASYNC110 - what is under way has no event of its own
                await asyncio.sleep(0)
    return app.census()


@asynccontextmanager
async def deployed(graph: Graph, **options: Any) -> AsyncIterator[InProcess]:
    """Runs `graph`; afterwards nothing may be left in any bucket."""
    app = InProcess(graph.compile(), **options)
    await app.start()
    try:
        yield app
        assert await settled(app) == EMPTY
    finally:
        await app.close()


@pytest.fixture
def run() -> Callable[..., dict[str, Any]]:
    """`run(graph, **inputs)`: one request, its result."""

    def once(graph: Graph, **inputs: Any) -> dict[str, Any]:
        async def body() -> dict[str, Any]:
            async with deployed(graph) as app:
                request = await AsyncSession(app.gateway).submit(**inputs)
                return await request.result()

        return asyncio.run(body())

    return once
