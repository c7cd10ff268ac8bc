"""The answer of a chat: what a choice gathers from a request, and its form as a message or as events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from omni_flow.control.request import Outcome
from omni_flow.control.types import Audio
from omni_flow.refs import ABSENT
from omni_flow.serve.chat_request import Asked
from omni_flow.serve.endpoints import ChatCompletions
from omni_flow.serve.http import encode
from omni_flow.serve.openai import Stops, new_id, now
from omni_flow.serve.running import Running
from omni_flow.serve.sounds import PCM_RATE, SoundStream
from omni_flow.serve.sounds import encode as encode_sound
from omni_flow.serve.values import apng, b64, dump

TEXT, AUDIO, IMAGE, CALLS, LOGPROBS, TRANSCRIPT = "text", "audio", "image", "calls", "logprobs", "transcript"


class Choice:
    """One answer: takes what its request gives and knows when it has enough."""

    def __init__(self, index: int, running: Running, endpoint: ChatCompletions, asked: Asked) -> None:
        self.index, self.running, self.asked = index, running, asked
        named = {
            endpoint.out_text: TEXT,
            endpoint.out_audio: AUDIO,
            endpoint.out_image: IMAGE,
            endpoint.out_tool_calls: CALLS,
            endpoint.out_logprobs: LOGPROBS,
            endpoint.out_transcript: TRANSCRIPT,
            endpoint.out_usage: "usage",
            endpoint.out_finish: "finish",
        }
        self._kinds = {output: kind for output, kind in named.items() if output in asked.outputs}
        self._limit = None if "max_tokens" in endpoint.fields else asked.max_tokens
        self._stops_itself = "stop" in endpoint.fields
        self.speaks = endpoint.out_audio in asked.outputs
        kind = running.served.kinds.get(endpoint.out_audio)
        self.rate = kind.rate if isinstance(kind, Audio) and kind.rate is not None else PCM_RATE
        self.parts: dict[str, list[Any]] = {TEXT: [], AUDIO: [], IMAGE: [], CALLS: [], LOGPROBS: [], TRANSCRIPT: []}
        self._stops = Stops(asked.stop)
        self._pieces = 0
        self._finish: str | None = None
        self._usage: dict[str, int] = {}
        self._enough = False
        self._over = False

    async def take(self) -> list[tuple[str, Any]] | None:
        """What came, as (kind, value); None when the choice is over."""
        if self._over:
            return None
        found: list[tuple[str, Any]] = []
        batch = [] if self._enough else await self.running.batch()
        for output, value in batch:
            kind = self._kinds.get(output)
            if kind is None or value is ABSENT:
                continue
            if kind == TEXT:
                value = self._text(value)
                if not value:
                    continue
            elif kind in ("usage", "finish"):
                self._about(kind, value)
                continue
            elif kind in (CALLS, LOGPROBS):
                for entry in value if isinstance(value, list) else [value]:
                    found.append((kind, entry))
                    self.parts[kind].append(entry)
                continue
            found.append((kind, value))
            self.parts[kind].append(value)
        if not batch:
            self._over = True
            rest = self._stops.rest()
            if rest:
                found.append((TEXT, rest))
                self.parts[TEXT].append(rest)
            return found or None
        return found

    def _text(self, value: Any) -> str:
        if self._finish in ("length", "cut"):
            return ""
        self._pieces += 1
        shown = self._stops(value if type(value) is str else str(value))
        if self._stops.cut:
            self._end("cut")
        elif self._limit is not None and self._pieces >= self._limit:
            shown += self._stops.rest()
            self._end("length")
        return shown

    def _end(self, why: str) -> None:
        """The text is at its end; so is the request, if nothing but text was asked for.

        A graph that stops by itself is left to say how many tokens it made.
        """
        self._finish = why
        if not self.speaks and not (why == "cut" and self._stops_itself):
            self._enough = True
            self.running.enough()

    def _about(self, kind: str, value: Any) -> None:
        if kind == "finish":
            self._finish = self._finish or str(value)
        elif isinstance(value, dict):
            self._usage = value

    def check(self) -> None:
        """Raises ApiError if the request ended otherwise than it should."""
        if self._enough or self.running.outcome is Outcome.DONE:
            return
        error = self.running.error()
        if error is not None:
            raise error

    @property
    def finish(self) -> str:
        """OpenAI's finish reason."""
        if self.parts[CALLS]:
            return "tool_calls"
        return "stop" if self._finish in (None, "cut") else self._finish

    def usage(self) -> tuple[int, int, int]:
        """Tokens of prompt and answer, and those of the prompt found in a cache: as the graph says.

        If it says nothing: 0 for the prompt, and the pieces of text.
        """
        told = self._usage
        return told.get("prompt_tokens", 0), told.get("completion_tokens", self._pieces), told.get("cached_tokens", 0)

    @property
    def said(self) -> str:
        """What the sound says."""
        return "".join(self.parts[TRANSCRIPT] or self.parts[TEXT])

    async def message(self) -> dict[str, Any]:
        """An element of `choices`."""
        text = "".join(self.parts[TEXT])
        message: dict[str, Any] = {"role": "assistant", "content": text or None, "refusal": None}
        if not self.parts[CALLS] and not self.speaks:
            message["content"] = text
        if self.parts[CALLS]:
            message["tool_calls"] = self.parts[CALLS]
        if self.speaks:
            samples = np.concatenate(self.parts[AUDIO]) if self.parts[AUDIO] else np.zeros(0, np.float32)
            data = encode_sound(self.asked.audio_format, self.rate, samples)
            message["audio"] = audio_object(data=b64(data), transcript=self.said)
            message["content"] = None
        if self.parts[IMAGE]:
            message["images"] = [await image_part(i, picture) for i, picture in enumerate(self.parts[IMAGE])]
        logprobs = {"content": self.parts[LOGPROBS], "refusal": None} if self.asked.logprobs else None
        return {"index": self.index, "message": message, "logprobs": logprobs, "finish_reason": self.finish}


def usage_object(choices: Sequence[Choice], prompts: int = 1) -> dict[str, Any]:
    """OpenAI's `usage` of choices that answer `prompts` prompts, those of one prompt side by side."""
    counts = [choice.usage() for choice in choices]
    first = counts[:: len(counts) // prompts]
    prompt, completion = sum(c[0] for c in first), sum(c[1] for c in counts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(c[2] for c in first)},
    }


def audio_object(**fields: Any) -> dict[str, Any]:
    """OpenAI's `audio`. Nothing is kept here, so it has expired as soon as it is sent."""
    return {"id": new_id("audio"), "expires_at": now(), **fields}


async def image_part(index: int, picture: Any) -> dict[str, Any]:
    """A picture of an answer, as a content part."""
    return {
        "type": "image_url",
        "index": index,
        "image_url": {"url": f"data:image/png;base64,{b64(await apng(picture))}"},
    }


class Frame:
    """Makes the events of a streamed answer."""

    def __init__(self, asked: Asked) -> None:
        self.head = {
            "id": asked.id,
            "object": "chat.completion.chunk",
            "created": asked.created,
            "model": asked.model,
            "system_fingerprint": None,
        }
        self._asked = asked
        usage = b',"usage":null' if asked.include_usage else b""
        self._start = b"data: " + encode(self.head)[:-1] + usage + b',"choices":[{"index":'
        self._text = b',"finish_reason":null,"logprobs":null,"delta":{"content":'
        self._delta = b',"finish_reason":null,"logprobs":null,"delta":'
        self._logprobs = b',"finish_reason":null,"delta":{},"logprobs":'
        self._sound: dict[int, tuple[str, SoundStream]] = {}
        self._images: dict[int, int] = {}

    def first(self, index: int) -> bytes:
        """The event that begins a choice."""
        return self._event(index, {"role": "assistant", "content": "", "refusal": None})

    def _event(self, index: int, delta: Any) -> bytes:
        return b"%b%d%b%b}]}\n\n" % (self._start, index, self._delta, encode(delta))

    async def chunk(self, choice: Choice, taken: list[tuple[str, Any]]) -> bytes:
        """Events for all that came in a tick."""
        parts: list[bytes] = []
        index = choice.index
        for kind, value in taken:
            if kind == TEXT:
                if choice.speaks:
                    parts.append(self._event(index, {"audio": self._audio(choice, transcript=value)}))
                else:
                    parts.append(b"%b%d%b%b}}]}\n\n" % (self._start, index, self._text, encode(value)))
            elif kind == TRANSCRIPT:
                parts.append(self._event(index, {"audio": self._audio(choice, transcript=value)}))
            elif kind == AUDIO:
                _, sound = self._stream(choice)
                data = sound.feed(value)
                if data:
                    parts.append(self._event(index, {"audio": self._audio(choice, data=b64(data))}))
            elif kind == IMAGE:
                number = self._images[index] = self._images.get(index, -1) + 1
                parts.append(self._event(index, {"images": [await image_part(number, value)]}))
            elif kind == CALLS:
                number = choice.parts[CALLS].index(value)
                parts.append(self._event(index, {"tool_calls": [{"index": number, **value}]}))
            elif kind == LOGPROBS and self._asked.logprobs:
                logprobs = encode({"content": [await dump(None, value)], "refusal": None})
                parts.append(b"%b%d%b%b}]}\n\n" % (self._start, index, self._logprobs, logprobs))
        return b"".join(parts)

    def _stream(self, choice: Choice) -> tuple[str, SoundStream]:
        found = self._sound.get(choice.index)
        if found is None:
            found = self._sound[choice.index] = (new_id("audio"), SoundStream("pcm16", choice.rate))
        return found

    def _audio(self, choice: Choice, **fields: Any) -> dict[str, Any]:
        return {"id": self._stream(choice)[0], **fields}

    async def last(self, choice: Choice) -> bytes:
        """The event that ends a choice."""
        parts = []
        if choice.speaks:
            _, sound = self._stream(choice)
            data = sound.finish()
            audio = self._audio(choice, expires_at=now(), **({"data": b64(data)} if data else {}))
            parts.append(self._event(choice.index, {"audio": audio}))
        last = {"index": choice.index, "delta": {}, "logprobs": None, "finish_reason": choice.finish}
        usage = {"usage": None} if self._asked.include_usage else {}
        parts.append(b"data: " + msgspec.json.encode({**self.head, **usage, "choices": [last]}) + b"\n\n")
        return b"".join(parts)
