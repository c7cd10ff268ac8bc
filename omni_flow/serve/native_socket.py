"""`/v1/graphs/{graph}/stream`: a WebSocket for one request with streamed placeholders.

The client sends `{"type": "start", "inputs": …}` (fields as in a POST; `binary` names the placeholder that binary
messages are frames of), then `{"type": "frame", "placeholder", "value"}` or binary messages, `{"type": "end",
"placeholder"}`, `{"type": "cancel"}`. It gets `started`, `output` messages and at last `end`; or `error`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.websockets import WebSocket, WebSocketDisconnect

from omni_flow.control.types import Audio, Type
from omni_flow.serve.errors import ApiError, bad, of_fault
from omni_flow.serve.media.service import Upload
from omni_flow.serve.native import ENDPOINT, read_submission, take_inputs, wanted_outputs
from omni_flow.serve.running import Running, span_object
from omni_flow.serve.served import Served
from omni_flow.serve.sockets import Pusher, Socket
from omni_flow.serve.state import State
from omni_flow.serve.values import dump, load


def router(state: State) -> APIRouter:
    """The route."""
    routes = APIRouter()

    @routes.websocket("/v1/graphs/{graph}/stream")
    async def stream(websocket: WebSocket, graph: str) -> None:
        socket = Socket(websocket)
        await socket.accept()
        try:
            await _one(state, socket, graph)
            await socket.close()
        except WebSocketDisconnect:
            return
        except Exception as fault:
            error = of_fault(fault)
            if error is None:
                await socket.close(1011, "the server failed; its log has the cause")
                raise
            await socket.error(error)
            await socket.close(1008, error.message)

    return routes


async def _one(state: State, socket: Socket, graph: str) -> None:
    served = state.catalogue.graph(graph)
    try:
        async with asyncio.timeout(state.settings.body_s):
            start = await socket.receive()
    except TimeoutError:
        raise ApiError(408, "no start message came", code="timeout") from None
    if not isinstance(start, dict) or start.pop("type", None) != "start":
        raise bad('the first message is {"type": "start", "inputs": {...}}', "type")
    binary = start.pop("binary", None)
    if binary is not None and binary not in served.pushed:
        raise bad(f"there is no streamed placeholder {binary!r}; there is {', '.join(served.pushed)}", "binary")
    asked = read_submission(start)
    inputs, feed = await take_inputs(state, served, asked.inputs)
    running = state.book.submit(
        served,
        socket.call,
        ENDPOINT,
        inputs,
        params=asked.params,
        session=asked.session,
        deadline_s=asked.deadline_s,
        seed=asked.seed,
        timeline=asked.timeline,
        outputs=wanted_outputs(served, asked.outputs),
    )
    with running:
        await socket.send({"type": "started", "id": running.id})
        pusher = Pusher(running)
        for name, frames in feed.frames.items():
            for frame in frames:
                pusher.push(name, frame)
        reader = asyncio.ensure_future(_read(state, socket, served, running, pusher, binary))
        writer = asyncio.ensure_future(_write(socket, running, asked.timeline))
        try:
            await asyncio.wait([reader, writer, pusher.task], return_when=asyncio.FIRST_COMPLETED)
            for task in (pusher.task, reader):
                if task.done() and not writer.done():
                    task.result()
            await writer
        finally:
            for task in (reader, writer, pusher.task):
                task.cancel()
            await asyncio.gather(reader, writer, pusher.task, return_exceptions=True)


async def _read(
    state: State, socket: Socket, served: Served, running: Running, pusher: Pusher, binary: str | None
) -> None:
    """Take messages until the client leaves, which raises WebSocketDisconnect, or cancels."""
    while True:
        message = await socket.receive()
        if isinstance(message, bytes):
            if binary is None:
                raise bad("binary messages need `binary` in the start message", "binary")
            pusher.push(binary, await _frame(state, served.inputs[binary], message))
            continue
        kind = message.get("type")
        if kind == "cancel":
            running.cancel()
            return
        placeholder = message.get("placeholder")
        if kind not in ("frame", "end"):
            raise bad(f"a message is a frame, an end or a cancel, not {kind!r}", "type")
        if not isinstance(placeholder, str) or placeholder not in served.pushed:
            raise bad(f"there is no streamed placeholder {placeholder!r}", "placeholder")
        if kind == "end":
            pusher.end(placeholder)
        else:
            value = await load(state.media, served.inputs[placeholder], message.get("value"), "value")
            pusher.push(placeholder, value)


async def _frame(state: State, type_: Type | None, data: bytes) -> Any:
    """A binary message as a frame: 16-bit samples for sound, else a file of the placeholder's kind."""
    if isinstance(type_, Audio):
        return await state.media.samples(data, "pcm16", type_.rate, type_.rate, "binary")
    return await load(state.media, type_, Upload(data), "binary")


async def _write(socket: Socket, running: Running, timeline: bool) -> None:
    kinds = running.served.kinds
    while batch := await running.batch():
        for name, value in batch:
            await socket.send({"type": "output", "output": name, "value": await dump(kinds[name], value)})
    end: dict[str, Any] = {"type": "end", "id": running.id, "outcome": running.outcome, "failures": running.failures()}
    error: ApiError | None = running.error()
    if error is not None:
        end["error"] = error.as_object()
    if timeline:
        end["timeline"] = [span_object(span) for span in running.live.spans]
    await socket.send(end)
