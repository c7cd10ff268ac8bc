"""`/v1/chat/completions` and `/v1/models`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from omni_flow.serve.chat_answer import Choice, Frame, usage_object
from omni_flow.serve.chat_request import Asked, ChatRequest, read_chat
from omni_flow.serve.endpoints import ChatCompletions
from omni_flow.serve.errors import ApiError
from omni_flow.serve.http import DONE, EventStream, Json, call_of, event, faults, json_body, while_connected
from omni_flow.serve.schema import body_schema
from omni_flow.serve.state import State

ENDPOINT = "chat"


def router(state: State) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["openai"])

    @routes.get("/v1/models")
    async def models() -> Response:
        """The models of this server."""
        return Json({"object": "list", "data": [_model(state, name) for name in state.catalogue.models]})

    @routes.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        """One model."""
        if model not in state.catalogue.models:
            raise ApiError(404, f"the model {model!r} does not exist", param="model", code="model_not_found")
        return Json(_model(state, model))

    @routes.post("/v1/chat/completions", openapi_extra=body_schema(ChatRequest))
    async def chat(request: Request) -> Response:
        """Answer a conversation; `stream: true` gives the answer as events while it is made."""
        body = await json_body(request)
        served, endpoint = state.catalogue.endpoint(ChatCompletions, body.get("model"))
        asked = await read_chat(state, served, endpoint, body, request.headers.get("x-omni-session"))
        call = call_of(request)
        with ExitStack() as stack:
            running = []
            with faults():
                for number in range(asked.n):
                    seed = asked.seed if asked.seed is None else (asked.seed + number) % 2**63
                    one = state.book.submit(
                        served,
                        call,
                        ENDPOINT,
                        asked.inputs,
                        params=asked.params,
                        session=asked.session,
                        seed=seed,
                        outputs=asked.outputs,
                    )
                    running.append(stack.enter_context(one))
            choices = [Choice(i, r, endpoint, asked) for i, r in enumerate(running)]
            if asked.stream:
                owner = stack.pop_all()
                return EventStream(_events(asked, choices, owner), lambda: [r.cancel() for r in running])
            return await while_connected(request, running, _whole(asked, choices))

    return routes


def _model(state: State, name: str) -> dict[str, Any]:
    served = state.catalogue.models[name]
    kinds = [type(e).__name__ for e in served.endpoints if served.model_of(e) == name]
    return {"id": name, "object": "model", "created": 0, "owned_by": "omni-flow", "graph": served.name, "serves": kinds}


async def _whole(asked: Asked, choices: list[Choice]) -> Response:
    async def one(choice: Choice) -> None:
        while await choice.take() is not None:
            pass
        choice.check()

    if len(choices) == 1:
        await one(choices[0])
    else:
        await asyncio.gather(*(one(choice) for choice in choices))
    return Json(
        {
            "id": asked.id,
            "object": "chat.completion",
            "created": asked.created,
            "model": asked.model,
            "system_fingerprint": None,
            "choices": [await choice.message() for choice in choices],
            "usage": usage_object(choices),
        }
    )


async def _events(asked: Asked, choices: list[Choice], owner: ExitStack) -> AsyncIterator[bytes]:
    with owner:
        frame = Frame(asked)
        if len(choices) == 1:
            async for chunk in _choice_events(frame, choices[0]):
                yield chunk
        else:
            async with AsyncExitStack() as stack:
                async for chunk in _merged([_choice_events(frame, c) for c in choices], stack):
                    yield chunk
        if asked.include_usage:
            yield event({**frame.head, "choices": [], "usage": usage_object(choices)})
        yield DONE


async def _choice_events(frame: Frame, choice: Choice) -> AsyncIterator[bytes]:
    """The events of one choice, those of a tick in one chunk; nothing before the graph gave something, so that what
    fails until then has its own status."""
    first = frame.first(choice.index)
    while (taken := await choice.take()) is not None:
        if taken:
            chunk = await frame.chunk(choice, taken)
            if chunk:
                yield first + chunk
                first = b""
    choice.check()
    yield first + await frame.last(choice)


async def _merged(streams: list[AsyncIterator[bytes]], stack: AsyncExitStack) -> AsyncIterator[bytes]:
    """Chunks of several streams as they come. Raises what one of them raises."""
    queue: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue(maxsize=16)

    async def pump(stream: AsyncIterator[bytes]) -> None:
        try:
            async for chunk in stream:
                await queue.put(chunk)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.ensure_future(pump(stream)) for stream in streams]
    stack.callback(lambda: [task.cancel() for task in tasks])
    left = len(streams)
    while left:
        item = await queue.get()
        if isinstance(item, BaseException):
            raise item
        if item is None:
            left -= 1
        else:
            yield item
