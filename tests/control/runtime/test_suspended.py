"""What role code has said leaves at once, however long it suspends afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from omni_flow import Graph, launch, stream
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
