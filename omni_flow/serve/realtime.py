"""`/v1/realtime`: speech to speech over a WebSocket, as OpenAI's. Each turn is a request of the graph.

Sound is 16-bit mono at 24 kHz both ways. With `turn_detection` (the default) turns begin and end by themselves, and
speech while an answer is under way ends that answer; without it the client commits turns and asks for answers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
from fastapi import APIRouter
from numpy.typing import NDArray
from starlette.websockets import WebSocket, WebSocketDisconnect

from omni_flow.control.types import Audio
from omni_flow.serve.endpoints import Realtime
from omni_flow.serve.errors import ApiError, bad, of_fault, unsupported
from omni_flow.serve.media.service import unbase64
from omni_flow.serve.openai import new_id
from omni_flow.serve.realtime_answer import Answer
from omni_flow.serve.realtime_config import Config
from omni_flow.serve.running import Running
from omni_flow.serve.served import Served
from omni_flow.serve.sockets import Pusher, Socket
from omni_flow.serve.sounds import PCM_RATE
from omni_flow.serve.state import State
from omni_flow.serve.vad import Vad
from omni_flow.serve.values import load

Handler = Callable[[dict[str, Any]], Coroutine[Any, Any, None]]
KEEP_S = 60.0
"""How much sound before a commit is kept at most."""


def router(state: State) -> APIRouter:
    """The route."""
    routes = APIRouter()

    @routes.websocket("/v1/realtime")
    async def realtime(websocket: WebSocket) -> None:
        socket = Socket(websocket)
        await socket.accept(("realtime",))
        try:
            served, endpoint = state.catalogue.endpoint(Realtime, websocket.query_params.get("model"))
        except ApiError as error:
            await socket.error(error, event_id=new_id("event"))
            await socket.close(1008, error.message)
            return
        conversation = Conversation(state, socket, served, endpoint, websocket.headers.get("x-omni-session"))
        try:
            await conversation.run()
        except WebSocketDisconnect:
            return
        finally:
            await conversation.close()

    return routes


class Turn:
    """What a user says in one turn: sound as it comes, text and a picture."""

    def __init__(self) -> None:
        self.item_id = new_id("item")
        self.sound: list[NDArray[np.float32]] = []
        self.samples = 0
        self.inputs: dict[str, Any] = {}
        self.running: Running | None = None
        self.pusher: Pusher | None = None

    @property
    def empty(self) -> bool:
        """Whether nothing was said."""
        return not self.samples and not self.inputs


class Conversation:
    """One connection. Its turns are requests of `session`, or of one that begins and ends with it."""

    def __init__(
        self, state: State, socket: Socket, served: Served, endpoint: Realtime, session: str | None = None
    ) -> None:
        self._state, self._socket, self._served, self._endpoint = state, socket, served, endpoint
        self._config = Config(served.model_of(endpoint), bool(endpoint.out_audio), bool(endpoint.out_text))
        self._session = new_id("sess")
        self._given_session = session
        self._rate = getattr(served.inputs.get(endpoint.audio), "rate", None) or PCM_RATE
        self._turn = Turn()
        self._committed: Turn | None = None
        self._answer: asyncio.Task[None] | None = None
        self._answering: Answer | None = None
        self._vad: Vad | None = None
        self._heard = 0  # samples at 24 kHz since the connection began
        self._turn_from = 0
        self._use_config()
        self._handlers: dict[str, Handler] = {
            "session.update": self._update,
            "input_audio_buffer.append": self._append,
            "input_audio_buffer.commit": self._commit_asked,
            "input_audio_buffer.clear": self._clear,
            "conversation.item.create": self._item,
            "response.create": self._create,
            "response.cancel": self._cancel,
        }

    def _use_config(self) -> None:
        self._vad = None if self._config.vad is None else Vad(PCM_RATE, self._config.vad)
        if self._vad is not None:
            self._turn_from = self._heard

    async def run(self) -> None:
        """Take events until the client leaves: raises WebSocketDisconnect."""
        await self._say("session.created", session=self._config.as_object(self._session))
        while True:
            event: Any = {}
            try:
                event = await self._socket.receive()
                if isinstance(event, bytes):
                    raise bad("events are JSON; sound goes base64 in input_audio_buffer.append", code="invalid_json")
                handler = self._handlers.get(str(event.get("type")))
                if handler is None:
                    raise bad(f"there is no event {event.get('type')!r}", "type", "unknown_event")
                await handler(event)
            except WebSocketDisconnect:
                raise
            except Exception as fault:
                error = of_fault(fault)
                if error is None:
                    raise
                own = event.get("event_id") if isinstance(event, dict) else None
                await self._socket.send(
                    {"type": "error", "event_id": new_id("event"), "error": {**error.as_object(), "event_id": own}}
                )

    async def _say(self, kind: str, **fields: Any) -> None:
        await self._socket.send({"type": kind, "event_id": new_id("event"), **fields})

    # ---- what the client says -------------------------------------------------------------------------------

    async def _update(self, event: dict[str, Any]) -> None:
        given = event.get("session")
        if not isinstance(given, dict):
            raise bad("expected an object", "session")
        self._config = self._config.updated(given)
        self._use_config()
        await self._say("session.updated", session=self._config.as_object(self._session))

    async def _append(self, event: dict[str, Any]) -> None:
        if not self._endpoint.audio:
            raise unsupported("audio", "this model takes no sound")
        data = unbase64(str(event.get("audio", "")), "audio")
        if not data:
            return
        samples = await self._state.media.samples(data, "pcm16", PCM_RATE, PCM_RATE, "audio")
        self._heard += len(samples)
        if self._vad is None:
            await self._take(samples)
            return
        events = self._vad.feed(samples)
        await self._take(samples)
        for what, at in events:
            if what == "started":
                self._drop_before(at)
                await self._speech_started(at)
            else:
                ms = at * 1000 // PCM_RATE
                await self._say("input_audio_buffer.speech_stopped", audio_end_ms=ms, item_id=self._turn.item_id)
                await self._commit()
                if self._config.create_response:
                    await self._respond()
        if not self._vad.speaking:
            padding = int(self._vad.settings.padding_s * PCM_RATE)
            self._drop_before(self._heard - padding)

    async def _take(self, samples: NDArray[np.float32]) -> None:
        turn = self._turn
        if turn.samples + len(samples) > self._state.settings.media.max_seconds * PCM_RATE:
            raise ApiError(413, "the turn is too long; commit or clear it", param="audio", code="too_large")
        turn.sound.append(samples)
        turn.samples += len(samples)
        if self._vad is None or self._vad.speaking:
            await self._stream(turn)

    def _drop_before(self, at: int) -> None:
        """Forget sound of the turn before sample `at`: nobody spoke."""
        turn = self._turn
        while turn.sound and turn.running is None and self._turn_from + len(turn.sound[0]) <= at:
            gone = len(turn.sound.pop(0))
            self._turn_from += gone
            turn.samples -= gone

    async def _stream(self, turn: Turn) -> None:
        """Where the graph takes sound as a stream, the request begins with the speech."""
        if self._endpoint.audio not in self._served.pushed:
            return
        if turn.running is None:
            self._submit(turn)
            turn.pusher = Pusher(turn.running)  # type: ignore[arg-type]
        assert turn.pusher is not None
        for samples in turn.sound:
            turn.pusher.push(self._endpoint.audio, await self._at_rate(samples))
        turn.sound.clear()

    async def _at_rate(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        return await self._state.media.samples(samples.tobytes(), "f32", PCM_RATE, self._rate, "audio")

    async def _speech_started(self, at: int) -> None:
        await self._say(
            "input_audio_buffer.speech_started", audio_start_ms=at * 1000 // PCM_RATE, item_id=self._turn.item_id
        )
        if self._config.interrupt_response and self._answering is not None:
            await self._interrupt("turn_detected")

    async def _commit_asked(self, event: dict[str, Any]) -> None:
        if not self._turn.samples:
            raise bad("there is no sound to commit", code="input_audio_buffer_commit_empty")
        await self._commit()

    async def _commit(self) -> None:
        turn, self._turn = self._turn, Turn()
        self._turn_from = self._heard
        if turn.sound and self._endpoint.audio not in self._served.pushed:
            turn.inputs[self._endpoint.audio] = await self._at_rate(np.concatenate(turn.sound))
            turn.sound.clear()
        elif turn.pusher is not None:
            await self._stream(turn)
            turn.pusher.end(self._endpoint.audio)
        if self._committed is not None:
            if turn.running is None:
                turn.inputs = {**self._committed.inputs, **turn.inputs}
            self._drop(self._committed)
        self._committed = turn
        await self._say("input_audio_buffer.committed", item_id=turn.item_id, previous_item_id=None)
        await self._added(turn.item_id, [{"type": "input_audio", "transcript": None}])

    async def _added(self, item_id: str, content: list[dict[str, Any]]) -> None:
        item = {"id": item_id, "object": "realtime.item", "type": "message", "status": "completed", "role": "user"}
        for kind in ("conversation.item.added", "conversation.item.done"):
            await self._say(kind, previous_item_id=None, item={**item, "content": content})

    async def _clear(self, event: dict[str, Any]) -> None:
        self._drop(self._turn)
        self._turn, self._turn_from = Turn(), self._heard
        await self._say("input_audio_buffer.cleared")

    async def _item(self, event: dict[str, Any]) -> None:
        item = event.get("item")
        if not isinstance(item, dict) or item.get("type") != "message" or item.get("role") != "user":
            raise unsupported("item", "an item is a message of the user")
        turn = self._committed or Turn()
        for number, part in enumerate(item.get("content") or []):
            await self._part(turn, part, f"item.content[{number}]")
        if turn.empty:
            raise bad("the item is empty", "item.content")
        turn.item_id = str(item.get("id") or turn.item_id)
        self._committed = turn
        await self._added(turn.item_id, item["content"])

    async def _part(self, turn: Turn, part: Any, field: str) -> None:
        kind = part.get("type") if isinstance(part, dict) else None
        ways = {
            "input_text": (self._endpoint.text, "text"),
            "input_audio": (self._endpoint.audio, "audio"),
            "input_image": (self._endpoint.image, "image_url"),
        }
        if kind not in ways:
            raise bad(f"there is no content {kind!r}", f"{field}.type")
        placeholder, name = ways[kind]
        if not placeholder or placeholder in self._served.pushed:
            raise unsupported(field, f"this model takes no {kind} here")
        raw = part.get(name)
        if kind == "input_audio":
            raw = {"data": raw, "format": "pcm16", "rate": PCM_RATE}
        elif kind == "input_image":
            raw = {"url": raw}
        turn.inputs[placeholder] = await load(self._state.media, self._served.inputs[placeholder], raw, field)

    # ---- answers --------------------------------------------------------------------------------------------

    async def _create(self, event: dict[str, Any]) -> None:
        if self._answering is not None:
            raise bad("an answer is under way; cancel it first", code="conversation_already_has_active_response")
        given = event.get("response")
        if isinstance(given, dict) and (given.get("output_modalities") or given.get("modalities")):
            self._config = self._config.updated(
                {"output_modalities": given.get("output_modalities") or given["modalities"]}
            )
        await self._respond()

    async def _respond(self) -> None:
        turn = self._committed
        if turn is None:
            raise bad("nothing was said yet: commit sound, or create an item", code="no_input")
        if self._answering is not None:
            await self._interrupt("client_cancelled")
        self._committed = None
        if turn.running is None:
            self._submit(turn)
        assert turn.running is not None
        kind = self._served.kinds.get(self._endpoint.out_audio)
        rate = kind.rate if isinstance(kind, Audio) and kind.rate is not None else PCM_RATE
        answer = Answer(turn.running, self._endpoint, self._config, rate, turn.item_id, self._say)
        self._answering = answer
        self._answer = asyncio.ensure_future(self._run_answer(answer, turn))

    async def _run_answer(self, answer: Answer, turn: Turn) -> None:
        try:
            with answer.running:
                await answer.run()
        finally:
            if turn.pusher is not None:
                turn.pusher.close()
            if self._answering is answer:
                self._answering = None

    def _submit(self, turn: Turn) -> None:
        turn.running = self._state.book.submit(
            self._served,
            self._socket.call,
            "realtime",
            turn.inputs,
            session=self._given_session or self._session,
            outputs=self._wanted(),
        )

    def _wanted(self) -> frozenset[str]:
        endpoint = self._endpoint
        wanted = {endpoint.out_text, endpoint.out_heard}
        if self._config.speaks:
            wanted.add(endpoint.out_audio)
        return frozenset(wanted - {""})

    async def _cancel(self, event: dict[str, Any]) -> None:
        if self._answering is None:
            raise bad("no answer is under way", code="response_cancel_not_active")
        await self._interrupt("client_cancelled")

    async def _interrupt(self, reason: str) -> None:
        answer, task = self._answering, self._answer
        if answer is not None and task is not None:
            answer.interrupt(reason)
            await asyncio.wait([task])

    def _drop(self, turn: Turn) -> None:
        if turn.pusher is not None:
            turn.pusher.close()
        if turn.running is not None:
            with turn.running:
                pass

    async def close(self) -> None:
        """The client has left: cancel what is under way."""
        for turn in (self._turn, self._committed):
            if turn is not None:
                self._drop(turn)
        if self._answer is not None:
            self._answer.cancel()
            await asyncio.wait([self._answer])
        if self._given_session is None:
            with contextlib.suppress(ApiError):  # there was no turn
                self._state.sessions.close(self._socket.call.tenant, self._session)
