"""A request is cancelled, or meets its deadline, in every state that its work can be in; nothing is left of it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from omni_flow import Batch, Context, Graph, RequestFailed, collect, last, ordered, stream, window
from omni_flow.control.runtime.client import AsyncSession

from .conftest import deployed


class Work:
    """Methods that never end, each in its own way."""

    async def hold(self, x: Any) -> Any:
        await asyncio.Event().wait()

    async def three(self, x: Any) -> AsyncIterator[int]:
        for k in range(3):
            yield k

    async def endless(self, x: Any) -> AsyncIterator[int]:
        for k in itertools.count():
            yield k

    def endless_in_thread(self, x: Any) -> Iterator[int]:
        yield from itertools.count()

    async def then_holds(self, x: Any) -> AsyncIterator[int]:
        yield 0
        await asyncio.Event().wait()

    def polls(self, ctx: Context, x: Any) -> Any:
        while not ctx.cancelled:
            time.sleep(0.001)

    async def batch(self, x: list[Any]) -> list[Any]:
        await asyncio.Event().wait()
        return x

    def batch_in_thread(self, ctx: list[Context], x: list[Any]) -> list[Any]:
        while not all(one.cancelled for one in ctx):
            time.sleep(0.001)
        return x

    async def both(self, x: Any, y: Any) -> Any:
        return x

    async def again(self, x: Any = None, back: Any = None) -> Any:
        return 1


def waits_for_a_stream(graph: Graph, work: Any, x: Any) -> Any:
    sent = graph.placeholder("sent", int, stream=True)
    return work.interface("both", inputs=[[{"x": x, "y": collect(sent)}]], outputs=["out"])


def runs(graph: Graph, work: Any, x: Any) -> Any:
    return work.interface("hold", inputs=[[{"x": x}]], outputs=["out"])


def is_ready_in_its_order(graph: Graph, work: Any, x: Any) -> Any:
    three = work.interface("three", inputs=[[{"x": x}]], outputs=[stream("frame")])
    return work.interface("hold", inputs=[[{"x": ordered(three.frame)}]], outputs=["out"])


def waits_for_credit(graph: Graph, work: Any, x: Any) -> Any:
    return work.interface("endless", inputs=[[{"x": x}]], outputs=[stream("out")])


def waits_for_credit_in_a_thread(graph: Graph, work: Any, x: Any) -> Any:
    return work.interface("endless_in_thread", inputs=[[{"x": x}]], outputs=[stream("out")])


def gathers_a_window(graph: Graph, work: Any, x: Any) -> Any:
    frames = work.interface("then_holds", inputs=[[{"x": x}]], outputs=[stream("frame")])
    return work.interface("both", inputs=[[{"x": window(frames.frame, 4), "y": x}]], outputs=["out"])


def waits_for_its_batch(graph: Graph, work: Any, x: Any) -> Any:
    return work.interface("batch", inputs=[[{"x": x}]], outputs=["out"], batch=Batch(max=9, wait_ms=60_000))


def runs_in_a_batch(graph: Graph, work: Any, x: Any) -> Any:
    return work.interface("batch", inputs=[[{"x": x}]], outputs=["out"], batch=Batch(max=1))


def runs_in_a_batch_in_a_thread(graph: Graph, work: Any, x: Any) -> Any:
    return work.interface("batch_in_thread", inputs=[[{"x": x}]], outputs=["out"], batch=Batch(max=1))


def runs_in_a_thread(graph: Graph, work: Any, x: Any) -> Any:
    return work.interface("polls", inputs=[[{"x": x}]], outputs=["out"])


def goes_round_a_loop(graph: Graph, work: Any, x: Any) -> Any:
    back = graph.feedback("back")
    head = work.interface("again", inputs=[[{"x": x}], [{"back": back}]], outputs=["value"], max_iters=1_000_000_000)
    back.bind(head.value)
    return work.interface("both", inputs=[[{"x": last(head.value), "y": x}]], outputs=["out"])


def waits_for_a_broadcast(graph: Graph, work: Any, x: Any) -> Any:
    three = work.interface("three", inputs=[[{"x": x}]], outputs=[stream("frame")])
    held = work.interface("hold", inputs=[[{"x": x}]], outputs=["value"])
    return work.interface("both", inputs=[[{"x": three.frame, "y": held.value}]], outputs=["out"])


STATES = [
    waits_for_a_stream,
    runs,
    is_ready_in_its_order,
    waits_for_credit,
    waits_for_credit_in_a_thread,
    gathers_a_window,
    waits_for_its_batch,
    runs_in_a_batch,
    runs_in_a_batch_in_a_thread,
    runs_in_a_thread,
    goes_round_a_loop,
    waits_for_a_broadcast,
]


@pytest.mark.parametrize("how", ["cancelled", "deadline"])
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_work_that(state: Callable[[Graph, Any, Any], Any], how: str) -> None:
    """Beside a request that is stopped, one of its state goes on; when both are over nothing is left."""
    graph = Graph("work")
    work = graph.role("work", Work, replicas=2)
    graph.output(out=state(graph, work, graph.placeholder("x", int)).out)

    async def body() -> None:
        async with deployed(graph, credit=2) as app:
            session = AsyncSession(app.gateway)
            other = await session.submit(x=1)
            request = await session.submit(x=1, deadline=0.05 if how == "deadline" else None)
            if how == "cancelled":
                for _ in range(300):
                    await asyncio.sleep(0)
                assert await request.cancel()
            with pytest.raises(RequestFailed) as stopped:
                await request.result()
            assert str(stopped.value.outcome) == how
            assert not await request.cancel()
            assert other.outcome is None
            assert app.census()["live"] == 1
            await other.cancel()

    asyncio.run(body())
