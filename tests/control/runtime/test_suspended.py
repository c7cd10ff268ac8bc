"""What role code has said leaves at once, what it was given is let go, however long anything suspends afterwards."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator

import numpy as np
import pytest

from omni_flow import Graph, collect, launch, stream
from omni_flow.control.runtime.client import AsyncSession

from .conftest import deployed


class Patient:
    async def wait(self, text: str) -> AsyncIterator[str]:
        yield text
        await asyncio.Event().wait()


def patient() -> Graph:
    graph = Graph("patient")
    wait = graph.role("patient", Patient).interface(
        "wait", inputs=[[graph.placeholder("text", str)]], outputs=[stream("sign")]
    )
    graph.output(sign=wait.sign)
    return graph


@pytest.mark.timeout(30)
def test_a_frame_arrives_while_its_generator_waits_for_ever() -> None:
    async def body() -> None:
        async with deployed(patient()) as app:
            for _ in range(20):
                request = await AsyncSession(app.gateway).submit(text="waiting")
                assert await anext(aiter(request)) == ("sign", "waiting")
                await request.cancel()

    asyncio.run(body())


@pytest.mark.timeout(30)
def test_it_arrives_from_another_process() -> None:
    with launch(patient()) as app:
        for _ in range(20):
            request = app.submit(text="waiting")
            assert next(iter(request)) == ("sign", "waiting")
            request.cancel()


class Pieces:
    async def make(self, count: int) -> AsyncIterator[np.ndarray]:
        for _ in range(count):
            yield np.zeros(4)


class Watchful:
    """Says of each array but the first whether the one before has been let go, once it has been suspended itself."""

    def __init__(self) -> None:
        self.seen: weakref.ref[np.ndarray] | None = None

    async def take(self, piece: np.ndarray) -> bool:
        before, self.seen = self.seen, weakref.ref(piece)
        if before is None:
            return True
        await asyncio.sleep(0)
        return before() is None


def test_what_a_method_was_given_is_let_go_while_the_next_one_of_its_runner_is_suspended() -> None:
    graph = Graph("pieces")
    count = graph.placeholder("count", int)
    pieces = graph.role("pieces", Pieces).interface("make", inputs=[[count]], outputs=[stream("piece")])
    take = graph.role("watchful", Watchful).interface("take", inputs=[[{"piece": pieces.piece}]], outputs=["gone"])
    graph.output(gone=collect(take.gone))

    async def body() -> None:
        async with deployed(graph) as app:
            request = await AsyncSession(app.gateway).submit(count=2)
            assert await request.result() == {"gone": [True, True]}

    asyncio.run(body())
