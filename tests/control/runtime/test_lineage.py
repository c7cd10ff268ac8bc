"""What a role says of how far it has come with a session, and what its later requests find."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from omni_flow import Batch, Graph
from omni_flow.control.context import Context
from omni_flow.control.runtime import gateway
from omni_flow.control.runtime.client import AsyncSession

from .conftest import deployed


class Counts:
    """Comes one further with each request of a session; gives how far it had been said to be."""

    async def run(self, ctx: Context, x: int) -> int:
        found = ctx.lineage
        ctx.advance(found + x)
        return found

    def in_thread(self, ctx: Context, x: int) -> int:
        found = ctx.lineage
        ctx.advance(found + x)
        return found

    async def many(self, ctx: Sequence[Context], x: Sequence[int]) -> list[int]:
        return [await self.run(one, each) for one, each in zip(ctx, x, strict=True)]


def counting(method: str = "run") -> Graph:
    """Two roles with one replica, or two, that don't know of each other."""
    graph = Graph("counting")
    x = graph.placeholder("x", int, required=True)
    y = graph.placeholder("y", int)
    batch = {"batch": Batch(max=4)} if method == "many" else {}
    one = graph.role("one", Counts, replicas=2, balance="round_robin").interface(
        method, inputs=[[x]], outputs=["n"], **batch
    )
    two = graph.role("two", Counts).interface(method, inputs=[[{"x": y}]], outputs=["n"], **batch)
    graph.output(one=one.n, two=two.n)
    return graph


async def told(session: AsyncSession, **given: int) -> tuple[object, object]:
    found = await (await session.submit(**given)).result()
    return found["one"], found["two"]


@pytest.mark.parametrize("method", ["run", "in_thread", "many"])
def test_what_a_role_says_is_found_by_later_requests_of_the_session_on_any_replica(method: str) -> None:
    async def body() -> None:
        async with deployed(counting(method)) as app:
            a, b = AsyncSession(app.gateway, "a"), AsyncSession(app.gateway, "b")
            nameless = AsyncSession(app.gateway, nameless=True)
            assert [await told(a, x=1, y=10) for _ in range(3)] == [(0, 0), (1, 10), (2, 20)]
            assert await told(b, x=1, y=1) == (0, 0)
            assert [await told(nameless, x=1, y=1) for _ in range(2)] == [(0, 0)] * 2
            await a.close()
            assert await told(a, x=1, y=1) == (0, 0)
            assert await told(b, x=1, y=1) == (1, 1)

    asyncio.run(body())


def test_nothing_is_known_of_a_session_that_was_closed_while_a_request_of_it_ran() -> None:
    async def body() -> None:
        async with deployed(counting()) as app:
            session = AsyncSession(app.gateway, "a")
            request = await session.submit(x=1, y=1)
            await session.close()
            await request.result()
            assert await told(session, x=1, y=1) == (0, 0)

    asyncio.run(body())


def test_of_too_many_sessions_the_least_recently_used_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "MOST_LINEAGES", 2)

    async def body() -> None:
        async with deployed(counting()) as app:
            a, b, c = (AsyncSession(app.gateway, name) for name in "abc")
            for session in (a, b, a, c):
                await told(session, x=1, y=1)
            assert [await told(session, x=1, y=1) for session in (c, a)] == [(1, 1), (2, 2)]
            assert await told(b, x=1, y=1) == (0, 0)

    asyncio.run(body())
