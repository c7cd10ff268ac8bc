"""One answer of a realtime conversation: the events of a response while its request runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from omni_flow.control.request import Outcome
from omni_flow.refs import ABSENT
from omni_flow.serve.endpoints import Realtime
from omni_flow.serve.openai import new_id
from omni_flow.serve.realtime_config import Config
from omni_flow.serve.running import Running
from omni_flow.serve.sounds import SoundStream
from omni_flow.serve.values import b64

Say = Callable[..., Awaitable[None]]


class Answer:
    """Says what a request gives. `rate` is that of its sound."""

    def __init__(
        self, running: Running, endpoint: Realtime, config: Config, rate: int, heard_item: str, say: Say
    ) -> None:
        self.running = running
        self._endpoint, self._config, self._say, self._heard_item = endpoint, config, say, heard_item
        self._sound = SoundStream("pcm16", rate)
        self._text: list[str] = []
        self._reason: str | None = None
        self.id, self._item = new_id("resp"), new_id("item")
        self._place = {"response_id": self.id, "item_id": self._item, "output_index": 0, "content_index": 0}

    def interrupt(self, reason: str) -> None:
        """End it: the user speaks, or the client says so."""
        self._reason = reason
        self.running.cancel()

    async def run(self) -> None:
        """Say everything up to `response.done`."""
        speaks = self._config.speaks
        kind = "audio" if speaks else "text"
        await self._say("response.created", response=self._response("in_progress", []))
        place = {"response_id": self.id, "output_index": 0}
        await self._say("response.output_item.added", **place, item=self._message("in_progress", []))
        first: dict[str, Any] = {"type": kind, "transcript" if speaks else "text": ""}
        await self._say("response.content_part.added", **self._place, part=first)
        while batch := await self.running.batch():
            for name, value in batch:
                if value is not ABSENT:
                    await self._one(name, value, speaks)
        text = "".join(self._text)
        if speaks:
            data = self._sound.finish()
            if data and self._reason is None:
                await self._say("response.output_audio.delta", **self._place, delta=b64(data))
            await self._say("response.output_audio.done", **self._place)
            await self._say("response.output_audio_transcript.done", **self._place, transcript=text)
        else:
            await self._say("response.output_text.done", **self._place, text=text)
        part = {"type": kind, "transcript" if speaks else "text": text}
        await self._say("response.content_part.done", **self._place, part=part)
        status = self._status()
        whole = self._message(
            "completed" if status == "completed" else "incomplete", [{**part, "type": f"output_{kind}"}]
        )
        await self._say("response.output_item.done", **place, item=whole)
        await self._say("response.done", response=self._response(status, [whole]))

    async def _one(self, name: str, value: Any, speaks: bool) -> None:
        endpoint = self._endpoint
        if name == endpoint.out_audio and speaks:
            data = self._sound.feed(value)
            if data:
                await self._say("response.output_audio.delta", **self._place, delta=b64(data))
        elif name == endpoint.out_text:
            self._text.append(str(value))
            kind = "response.output_audio_transcript.delta" if speaks else "response.output_text.delta"
            await self._say(kind, **self._place, delta=str(value))
        elif name == endpoint.out_heard:
            await self._say(
                "conversation.item.input_audio_transcription.completed",
                item_id=self._heard_item,
                content_index=0,
                transcript=str(value),
            )

    def _status(self) -> str:
        if self.running.outcome is Outcome.DONE:
            return "completed"
        return "cancelled" if self.running.outcome is Outcome.CANCELLED else "failed"

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        about = {"id": self._item, "object": "realtime.item", "type": "message", "role": "assistant"}
        return {**about, "status": status, "content": content}

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        details: dict[str, Any] | None = None
        if status == "cancelled":
            details = {"type": "cancelled", "reason": self._reason or "client_cancelled"}
        elif status == "failed":
            error = self.running.error()
            told = error.as_object() if error is not None else {}
            details = {"type": "failed", "error": {"type": told.get("type"), "code": told.get("code")}}
        usage = {"total_tokens": len(self._text), "input_tokens": 0, "output_tokens": len(self._text)}
        return {
            "id": self.id,
            "object": "realtime.response",
            "status": status,
            "status_details": details,
            "output": output,
            "usage": usage if status != "in_progress" else None,
            "output_modalities": ["audio" if self._config.speaks else "text"],
        }
