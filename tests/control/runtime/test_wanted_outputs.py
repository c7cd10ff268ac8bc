"""A request may want some outputs only; then the others are neither delivered nor awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from omni_flow import Context, Graph, InvalidInput, Text, stream
from omni_flow.control.runtime.client import AsyncRequest

from .conftest import deployed


class Quick:
    async def run(self, ctx: Context, text: str) -> str:
        return f"{text} {ctx.tenant}"


class Never:
    async def run(self, text: str) -> AsyncIterator[str]:
        yield text
        await asyncio.Event().wait()


def graph() -> Graph:
    made = Graph("two")
    text = made.placeholder("text", Text)
    quick = made.role("quick", Quick).interface("run", inputs=[[text]], outputs=["word"])
    never = made.role("never", Never).interface("run", inputs=[[text]], outputs=[stream("word")])
    made.output(quick=quick.word, never=never.word)
    return made


def test_a_request_is_done_when_what_it_wants_is_decided() -> None:
    async def body() -> None:
        async with deployed(graph()) as app, asyncio.timeout(10):
            live = app.gateway.submit({"text": "hi"}, outputs={"quick"}, tenant="salt")
            request = AsyncRequest(live)
            assert [item async for item in request] == [("quick", "hi salt")]
            assert request.outcome == "done"

    asyncio.run(body())


def test_an_unknown_output_or_none_is_refused() -> None:
    async def body() -> None:
        async with deployed(graph()) as app:
            for wrong in ({"nope"}, set[str]()):
                with pytest.raises(InvalidInput):
                    app.gateway.submit({"text": "hi"}, outputs=wrong)

    asyncio.run(body())
