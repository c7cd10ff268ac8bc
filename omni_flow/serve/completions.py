"""`/v1/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from omni_flow.serve.chat_answer import TEXT, Choice, usage_object
from omni_flow.serve.chat_request import Asked, Bias, Limit, Seed, StreamOptions
from omni_flow.serve.endpoints import ChatCompletions, Completions
from omni_flow.serve.http import DONE, EventStream, Json, call_of, event, faults, json_body, while_connected
from omni_flow.serve.openai import new_id, now, take
from omni_flow.serve.schema import body_schema
from omni_flow.serve.state import State

Between = msgspec.Meta


class CompletionRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A text, or several, to continue."""

    prompt: Annotated[str, Between(min_length=1)] | Annotated[list[str], Between(min_length=1, max_length=64)]
    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Between(ge=1, le=16)] | None = 1
    stop: str | Annotated[list[str], Between(max_length=16)] | None = None
    seed: Seed | None = None
    max_tokens: Limit | None = None
    echo: bool | None = False
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = None
    temperature: Annotated[float, Between(ge=0, le=2)] | None = None
    top_p: Annotated[float, Between(ge=0, le=1)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Bias | None = None
    session: str | None = None


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "best_of": (1,),
    "logprobs": (),
    "temperature": (1, 1.0),
    "top_p": (1, 1.0),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "logit_bias": ({},),
}


def router(state: State) -> APIRouter:
    """The route."""
    routes = APIRouter(tags=["openai"])

    @routes.post("/v1/completions", openapi_extra=body_schema(CompletionRequest))
    async def complete(request: Request) -> Response:
        """Continue a text."""
        body = await json_body(request)
        served, endpoint = state.catalogue.endpoint(Completions, body.get("model"))
        asked, mapped = await take(state, served, endpoint, body, CompletionRequest, NEUTRAL)
        shape = ChatCompletions(
            model=endpoint.model,
            text=endpoint.prompt,
            fields=endpoint.fields,
            out_text=endpoint.out_text,
            out_usage=endpoint.out_usage,
            out_finish=endpoint.out_finish,
        )
        common = Asked(
            id=new_id("cmpl"),
            created=now(),
            model=served.model_of(endpoint),
            inputs=mapped.inputs,
            params=mapped.params,
            outputs=frozenset({endpoint.out_text, endpoint.out_usage, endpoint.out_finish} - {""}),
            stream=bool(asked.stream),
            include_usage=asked.stream_options is not None and asked.stream_options.include_usage,
            n=asked.n or 1,
            seed=None if asked.seed is None else asked.seed % 2**63,
            stop=[asked.stop] if isinstance(asked.stop, str) else list(asked.stop or ()),
            max_tokens=asked.max_tokens,
            session=asked.session or request.headers.get("x-omni-session"),
            audio_format="wav",
            logprobs=False,
        )
        prompts = [asked.prompt] if isinstance(asked.prompt, str) else asked.prompt
        with ExitStack() as stack:
            choices: list[tuple[Choice, str]] = []
            with faults():
                for prompt in [p for p in prompts for _ in range(common.n)]:
                    seed = None if common.seed is None else (common.seed + len(choices)) % 2**63
                    running = state.book.submit(
                        served,
                        call_of(request),
                        "completions",
                        {**common.inputs, endpoint.prompt: prompt},
                        params=common.params,
                        session=common.session,
                        seed=seed,
                        outputs=common.outputs,
                    )
                    stack.enter_context(running)
                    choices.append((Choice(len(choices), running, shape, common), prompt if asked.echo else ""))
            live = [choice.running for choice, _ in choices]
            if common.stream:
                return EventStream(_events(common, choices, stack.pop_all()), lambda: [r.cancel() for r in live])
            return await while_connected(request, live, _whole(common, choices))

    return routes


def _head(asked: Asked) -> dict[str, Any]:
    return {"id": asked.id, "object": "text_completion", "created": asked.created, "model": asked.model}


def _choice(choice: Choice, text: str, finish: str | None) -> dict[str, Any]:
    return {"index": choice.index, "text": text, "logprobs": None, "finish_reason": finish}


def _usage(asked: Asked, choices: list[tuple[Choice, str]]) -> dict[str, Any]:
    return usage_object([choice for choice, _ in choices], len(choices) // asked.n)


async def _whole(asked: Asked, choices: list[tuple[Choice, str]]) -> Response:
    async def one(choice: Choice) -> None:
        while await choice.take() is not None:
            pass
        choice.check()

    await asyncio.gather(*(one(choice) for choice, _ in choices))
    made = [_choice(choice, echo + "".join(choice.parts[TEXT]), choice.finish) for choice, echo in choices]
    return Json({**_head(asked), "choices": made, "usage": _usage(asked, choices)})


async def _events(asked: Asked, choices: list[tuple[Choice, str]], owner: ExitStack) -> AsyncIterator[bytes]:
    """Several prompts are answered one after another: their requests run side by side all the same."""
    with owner:
        head = _head(asked)
        for choice, echo in choices:
            if echo:
                yield event({**head, "choices": [_choice(choice, echo, None)]})
            while (taken := await choice.take()) is not None:
                parts = [event({**head, "choices": [_choice(choice, text, None)]}) for _, text in taken]
                if parts:
                    yield b"".join(parts)
            choice.check()
            yield event({**head, "choices": [_choice(choice, "", choice.finish)]})
        if asked.include_usage:
            yield event({**head, "choices": [], "usage": _usage(asked, choices)})
        yield DONE
