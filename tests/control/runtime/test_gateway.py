"""Admission, streamed placeholders, back-pressure."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from omni_flow import Graph, InvalidInput, Json, Limits, Overloaded, Text, collect, stream
from omni_flow.control.runtime.client import AsyncSession
from omni_flow.control.runtime.errors import UnknownParameter

from .conftest import deployed
from .roles import Double, Echo, Gate, Slow


def echo_graph() -> Graph:
    graph = Graph("echo")
    x = graph.placeholder("x", Text, required=True)
    graph.param("n", int, 1)
    echo = graph.role("echo", Echo, replicas=2).interface("run", inputs=[[x]], outputs=["y"])
    graph.output(y=echo.y)
    return graph


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "input 'x': it is required and was not sent"),
        ({"x": 5}, "input 'x': expected Text, got int 5"),
        ({"x": "a", "z": 1}, "input 'z': the graph has no such placeholder; it has x"),
    ],
)
def test_wrong_inputs_are_refused_before_anything_starts(inputs: dict[str, object], message: str) -> None:
    async def body() -> None:
        async with deployed(echo_graph()) as app:
            with pytest.raises(InvalidInput) as caught:
                await AsyncSession(app.gateway).submit(**inputs)
            assert str(caught.value) == message

    asyncio.run(body())


class Point(msgspec.Struct):
    at: int


class Reader:
    async def messages(self, x: Sequence[dict[str, str]] | None) -> str:
        return "list"

    async def point(self, x: Point) -> str:
        return "point"

    async def total(self, xs: list[int]) -> int:
        return sum(xs)

    async def anything(self, x: Any) -> str:
        return "any"


@pytest.mark.parametrize(
    ("methods", "good", "bad", "why"),
    [
        (["messages"], [{"role": "user"}], "hello", r"expected list\[Json\] \| None, got str"),
        (["point"], {"at": 1}, {"at": "here"}, "expected Point: Expected `int`, got `str`"),
        (["point", "messages"], [], 5, "expected Point.*; expected list"),
        (["messages", "anything"], "hello", None, ""),
    ],
)
def test_what_no_reader_of_a_placeholder_takes_is_refused(methods: list[str], good: Any, bad: Any, why: str) -> None:
    graph = Graph("reads")
    x = graph.placeholder("x", Any)
    role = graph.role("reader", Reader)
    made = {name: role.interface(name, inputs=[[x]], outputs=["y"]).y for name in methods}
    graph.output(**made)

    async def body() -> None:
        async with deployed(graph) as app:
            session = AsyncSession(app.gateway)
            assert await (await session.submit(x=good)).cancel()
            if why:
                with pytest.raises(InvalidInput, match=f"input 'x': {why}"):
                    await session.submit(x=bad)

    asyncio.run(body())


def test_a_frame_that_no_reader_takes_is_refused_and_the_request_goes_on() -> None:
    graph = Graph("reads")
    xs = graph.placeholder("xs", Json, stream=True)
    graph.output(y=graph.role("reader", Reader).interface("total", inputs=[[collect(xs)]], outputs=["y"]).y)

    async def body() -> None:
        async with deployed(graph) as app:
            request = await AsyncSession(app.gateway).submit()
            await request.send("xs", 1)
            with pytest.raises(InvalidInput, match="input 'xs': expected int, got str"):
                await request.send("xs", "two")
            await request.send("xs", 3)
            await request.end("xs")
            assert await request.result() == {"y": 4}

    asyncio.run(body())


def test_params_are_checked() -> None:
    async def body() -> None:
        async with deployed(echo_graph()) as app:
            session = AsyncSession(app.gateway)
            with pytest.raises(UnknownParameter, match="declares no param 'm'; it declares n"):
                await session.submit(x="a", params={"m": 1})
            with pytest.raises(InvalidInput, match="input 'n': expected int, got str"):
                await session.submit(x="a", params={"n": "2"})

    asyncio.run(body())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"seed": 2**64}, "input 'seed': expected an int of 64 bits, got int"),
        ({"seed": "x"}, "input 'seed': expected an int of 64 bits, got str"),
        ({"deadline": "x"}, "input 'deadline': expected seconds, got str"),
        ({"deadline": float("nan")}, "input 'deadline': expected seconds, got float nan"),
    ],
)
def test_a_seed_or_deadline_that_is_none_is_refused_and_leaves_nothing(wrong: dict[str, Any], message: str) -> None:
    async def body() -> None:
        async with deployed(echo_graph()) as app:
            with pytest.raises(InvalidInput, match=message):
                await AsyncSession(app.gateway).submit(x="a", **wrong)

    asyncio.run(body())


def test_requests_over_the_limit_are_refused_and_others_unharmed() -> None:
    graph = Graph("slow")
    x = graph.placeholder("x", int)
    graph.output(y=graph.role("r", Slow).interface("wait", inputs=[[x]], outputs=["y"]).y)

    async def body() -> None:
        async with deployed(graph, limits=Limits(max_requests=2, max_per_session=1)) as app:
            first = await AsyncSession(app.gateway, id="a").submit(x=1)
            with pytest.raises(Overloaded, match="session 'a' has 1 live requests, the limit is 1"):
                await AsyncSession(app.gateway, id="a").submit(x=1)
            second = await AsyncSession(app.gateway, id="b").submit(x=1)
            with pytest.raises(Overloaded, match="2 requests are live, the limit is 2"):
                await AsyncSession(app.gateway, id="c").submit(x=1)
            await first.cancel()
            third = await AsyncSession(app.gateway, id="a").submit(x=1)
            await second.cancel()
            await third.cancel()

    asyncio.run(body())


def test_a_streamed_placeholder_is_fed_while_outputs_come() -> None:
    graph = Graph("mic")
    mic = graph.placeholder("mic", int, stream=True)
    double = graph.role("double", Double, replicas=3).interface("run", inputs=[[{"x": mic}]], outputs=["y"])
    graph.output(each=double.y, all=collect(double.y))

    async def body() -> None:
        async with deployed(graph) as app:
            request = await AsyncSession(app.gateway).submit()
            answers = aiter(request)
            for k in range(300):
                await request.send("mic", k)
                assert await anext(answers) == ("each", 2 * k)
            await request.end("mic")
            result = await request.result()
            assert result == {"each": [2 * k for k in range(300)], "all": [2 * k for k in range(300)]}
            with pytest.raises(InvalidInput, match="'speech': the graph has no streamed placeholder"):
                await request.send("speech", 1)

    asyncio.run(body())


def test_a_client_that_does_not_read_holds_the_creator_at_its_credit() -> None:
    graph = Graph("gate")
    n = graph.placeholder("n", int)
    made = graph.role("gate", Gate).interface("make", inputs=[[n]], outputs=[stream("frame")])
    graph.output(frame=made.frame)

    async def body() -> None:
        async with deployed(graph, credit=8) as app:
            role = app.replicas[0].instance
            request = await AsyncSession(app.gateway).submit(n=100)
            for _ in range(200):
                await asyncio.sleep(0)
            assert role.made == 9
            assert [value async for _, value in request] == list(range(100))

    asyncio.run(body())


def test_a_slow_reader_holds_the_creator_at_its_credit() -> None:
    graph = Graph("gate")
    n = graph.placeholder("n", int)
    gate = graph.role("gate", Gate)
    made = gate.interface("make", inputs=[[n]], outputs=[stream("frame")])
    taken = gate.interface("take", inputs=[[{"frame": made.frame}]], outputs=["y"])
    graph.output(y=collect(taken.y))

    async def body() -> None:
        async with deployed(graph, credit=4) as app:
            role = app.replicas[0].instance
            request = await AsyncSession(app.gateway).submit(n=50)
            for _ in range(200):
                await asyncio.sleep(0)
            assert role.made == 5
            role.open.set()
            assert await request.result() == {"y": list(range(50))}

    asyncio.run(body())
