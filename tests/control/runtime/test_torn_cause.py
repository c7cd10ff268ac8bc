"""Whoever meets the end of a stream that broke is told what broke it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from omni_flow import Graph, RequestFailed, collect, last, launch, stream, window
from omni_flow.control.runtime.client import AsyncSession

from .conftest import deployed


class Breaks:
    def count(self, n: int) -> Iterator[int]:
        yield from range(n)
        raise ValueError("out of numbers")

    def same(self, x: int) -> int:
        return x

    def total(self, xs: list[int]) -> int:
        return sum(xs)


def graph_of(join: Any) -> Graph:
    """The output reads the broken stream itself, or through a join."""
    graph = Graph("broken")
    role = graph.role("breaks", Breaks)
    number = role.interface("count", inputs=[[graph.placeholder("n", int)]], outputs=[stream("number")]).number
    if join is window:
        number = role.interface("total", inputs=[[{"xs": window(number, 2)}]], outputs=["y"]).y
    elif join is collect:
        number = role.interface("total", inputs=[[{"xs": collect(number)}]], outputs=["y"]).y
    elif join is last:
        number = role.interface("same", inputs=[[{"x": last(number)}]], outputs=["y"]).y
    graph.output(y=number)
    return graph


@pytest.mark.parametrize("join", [None, collect, last, window])
def test_the_cause_of_a_torn_stream_reaches_the_client(join: Any) -> None:
    async def body() -> None:
        async with deployed(graph_of(join)) as app:
            request = await AsyncSession(app.gateway).submit(n=3)
            with pytest.raises(RequestFailed, match=r"breaks\.count: .*out of numbers"):
                await request.result()

    asyncio.run(body())


def test_the_cause_travels_between_processes() -> None:
    with launch(graph_of(window)) as app:
        request = app.submit(n=3)
        with pytest.raises(RequestFailed, match=r"breaks\.count: .*out of numbers"):
            request.result(timeout=30)
        assert [str(f).partition(":")[0] for f in request.failures.values()] == ["breaks.count"]
