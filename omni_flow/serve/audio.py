"""`/v1/audio/speech` and `/v1/audio/transcriptions`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from omni_flow.control.types import Audio
from omni_flow.refs import ABSENT
from omni_flow.serve.endpoints import Speech, Transcriptions
from omni_flow.serve.errors import bad, unsupported
from omni_flow.serve.forms import as_body, read_form
from omni_flow.serve.http import DONE, EventStream, Json, call_of, event, faults, json_body, while_connected
from omni_flow.serve.openai import take
from omni_flow.serve.running import Running
from omni_flow.serve.schema import body_schema, form_schema
from omni_flow.serve.sounds import MEDIA_TYPES, PCM_RATE, SoundStream, check_format
from omni_flow.serve.state import State
from omni_flow.serve.values import b64, load

Between = msgspec.Meta


class SpeechRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A text to speak."""

    input: Annotated[str, Between(min_length=1, max_length=65_536)]
    model: str | None = None
    voice: str | dict[str, Any] | None = None
    response_format: str = "mp3"
    speed: Annotated[float, Between(ge=0.25, le=4)] | None = None
    instructions: str | None = None
    stream_format: Literal["audio", "sse"] = "audio"
    session: str | None = None


class TranscriptionRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A sound to write down; `file` is taken before."""

    model: str | None = None
    language: str | None = None
    prompt: str | None = None
    response_format: Literal["json", "text", "verbose_json", "srt", "vtt"] = "json"
    temperature: float | None = None
    timestamp_granularities: list[str] | None = None
    include: list[str] | None = None
    chunking_strategy: Any = None
    stream: bool = False
    session: str | None = None


SPEECH_NEUTRAL: dict[str, tuple[Any, ...]] = {"speed": (1, 1.0), "instructions": ("",)}
TRANSCRIPTION_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "language": ("",),
    "prompt": ("",),
    "temperature": (0, 0.0),
    "include": ([],),
}


def router(state: State) -> APIRouter:
    """The routes under `/v1/audio`."""
    routes = APIRouter(tags=["openai"])

    @routes.post("/v1/audio/speech", openapi_extra=body_schema(SpeechRequest))
    async def speech(request: Request) -> Response:
        """Speak a text; the sound is sent while it is made."""
        body = await json_body(request)
        served, endpoint = state.catalogue.endpoint(Speech, body.get("model"))
        asked, mapped = await take(state, served, endpoint, body, SpeechRequest, SPEECH_NEUTRAL)
        form = check_format(asked.response_format, "response_format")
        if endpoint.voices and asked.voice is not None and asked.voice not in endpoint.voices:
            raise bad(f"no voice {asked.voice!r}; there is {', '.join(endpoint.voices)}", "voice")
        with faults():
            running = state.book.submit(
                served,
                call_of(request),
                "speech",
                {**mapped.inputs, endpoint.text: asked.input},
                params=mapped.params,
                session=asked.session or request.headers.get("x-omni-session"),
                outputs=frozenset({endpoint.out_audio}),
            )
        kind = served.kinds[endpoint.out_audio]
        rate = kind.rate if isinstance(kind, Audio) and kind.rate is not None else PCM_RATE
        pieces = _sound(running, endpoint.out_audio, SoundStream(form, rate))
        if asked.stream_format == "sse":
            return EventStream(_speech_events(pieces), running.cancel)
        return EventStream(pieces, running.cancel, MEDIA_TYPES[form], event_errors=False)

    @routes.post(
        "/v1/audio/transcriptions",
        openapi_extra=form_schema(
            {"file": {"type": "string", "format": "binary"}, "model": {"type": "string"}}, ["file"]
        ),
    )
    async def transcribe(request: Request) -> Response:
        """Write down what a sound says."""
        lists = ("timestamp_granularities", "include")
        body = as_body(await read_form(request, state.settings.max_body_bytes), lists)
        served, endpoint = state.catalogue.endpoint(Transcriptions, body.get("model"))
        if "file" not in body:
            raise bad("there is no file", "file", "missing_required_parameter")
        sound = await load(state.media, served.inputs[endpoint.audio], body.pop("file"), "file")
        body["stream"] = str(body.get("stream", "false")).lower() == "true"
        if "temperature" in body:
            body["temperature"] = _number(body["temperature"], "temperature")
        asked, mapped = await take(state, served, endpoint, body, TranscriptionRequest, TRANSCRIPTION_NEUTRAL)
        if asked.response_format in ("srt", "vtt") and not endpoint.out_segments:
            raise unsupported("response_format", "this model says no times; ask for json, text or verbose_json")
        outputs = frozenset({endpoint.out_text, endpoint.out_segments} - {""})
        with faults():
            running = state.book.submit(
                served,
                call_of(request),
                "transcriptions",
                {**mapped.inputs, endpoint.audio: sound},
                params=mapped.params,
                session=asked.session or request.headers.get("x-omni-session"),
                outputs=outputs,
            )
        if asked.stream:
            return EventStream(_text_events(running, endpoint), running.cancel)
        rate = getattr(served.inputs[endpoint.audio], "rate", None)
        seconds = len(sound) / rate if rate else 0.0
        with running:
            return await while_connected(request, [running], _transcript(running, endpoint, asked, seconds))

    return routes


def _number(text: Any, field: str) -> float:
    try:
        return float(text)
    except (TypeError, ValueError) as error:
        raise bad(f"expected a number, got {text!r}", field, "invalid_type") from error


async def _sound(running: Running, output: str, stream: SoundStream) -> AsyncIterator[bytes]:
    with running:
        while batch := await running.batch():
            data = b"".join(stream.feed(value) for name, value in batch if name == output and value is not ABSENT)
            if data:
                yield data
        error = running.error()
        if error is not None:
            raise error
        yield stream.finish()


async def _speech_events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for data in pieces:
        if data:
            yield event({"type": "speech.audio.delta", "audio": b64(data)})
    usage = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}
    yield event({"type": "speech.audio.done", "usage": usage})


async def _gather(running: Running, endpoint: Transcriptions) -> AsyncIterator[tuple[list[str], list[Any]]]:
    """Pieces of text and segments as they come; at the end raises if the request did not end well."""
    while batch := await running.batch():
        texts = [str(value) for name, value in batch if name == endpoint.out_text and value is not ABSENT]
        segments: list[Any] = []
        for name, value in batch:
            if name == endpoint.out_segments and value is not ABSENT:
                segments += value if isinstance(value, list) else [value]
        yield texts, segments
    error = running.error()
    if error is not None:
        raise error


async def _transcript(
    running: Running, endpoint: Transcriptions, asked: TranscriptionRequest, seconds: float
) -> Response:
    texts: list[str] = []
    segments: list[Any] = []
    async for some, more in _gather(running, endpoint):
        texts += some
        segments += more
    text = "".join(texts).strip()
    if asked.response_format == "text":
        return PlainTextResponse(text + "\n")
    if asked.response_format in ("srt", "vtt"):
        return PlainTextResponse(subtitles(segments, asked.response_format))
    answer: dict[str, Any] = {"text": text}
    if asked.response_format == "verbose_json":
        answer |= {"task": "transcribe", "language": asked.language or "", "duration": round(seconds, 3)}
        answer["segments"] = [{"id": i, **segment} for i, segment in enumerate(segments)]
    return Json({**answer, "usage": {"type": "duration", "seconds": round(seconds, 3)}})


async def _text_events(running: Running, endpoint: Transcriptions) -> AsyncIterator[bytes]:
    with running:
        said: list[str] = []
        async for texts, _ in _gather(running, endpoint):
            for text in texts:
                said.append(text)
                yield event({"type": "transcript.text.delta", "delta": text})
        yield event({"type": "transcript.text.done", "text": "".join(said)})
        yield DONE


def subtitles(segments: list[Any], form: str) -> str:
    """Segments ({"start", "end", "text"}) as SRT or WebVTT."""
    point = "," if form == "srt" else "."

    def clock(seconds: float) -> str:
        whole = round(seconds * 1000)
        return f"{whole // 3_600_000:02}:{whole // 60_000 % 60:02}:{whole // 1000 % 60:02}{point}{whole % 1000:03}"

    blocks = ["WEBVTT\n"] if form == "vtt" else []
    for number, segment in enumerate(segments, 1):
        times = f"{clock(segment['start'])} --> {clock(segment['end'])}"
        head = f"{number}\n" if form == "srt" else ""
        blocks.append(f"{head}{times}\n{segment['text'].strip()}\n")
    return "\n".join(blocks)
