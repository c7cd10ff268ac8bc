"""What `/v1/chat/completions` takes, and what of it goes to which placeholder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from omni_flow.control.types import ListOf
from omni_flow.serve.endpoints import ChatCompletions
from omni_flow.serve.errors import ApiError, bad, unsupported
from omni_flow.serve.openai import Mapped, new_id, now, take
from omni_flow.serve.served import Served
from omni_flow.serve.sounds import check_format
from omni_flow.serve.state import State
from omni_flow.serve.values import load

Between = msgspec.Meta
Bias = dict[int, Annotated[float, Between(ge=-100, le=100)]]
Limit = Annotated[int, Between(ge=1, le=2**31 - 1)]
Seed = Annotated[int, Between(ge=-(2**63), le=2**63 - 1)]


class ImageUrl(msgspec.Struct):
    """`url`: a data: URL, or one of an allowed host."""

    url: str
    detail: str | None = None


class InputAudio(msgspec.Struct):
    """`data`: base64; `format`: wav, mp3, or pcm16 (24 kHz)."""

    data: str
    format: str = "wav"


class Part(msgspec.Struct):
    """A part of a message's content."""

    type: Literal["text", "image_url", "input_audio", "refusal"]
    text: str | None = None
    image_url: ImageUrl | None = None
    input_audio: InputAudio | None = None
    refusal: str | None = None


class ChatMessage(msgspec.Struct):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    audio: dict[str, Any] | None = None
    function_call: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        """Its text alone."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content if part.type == "text" and part.text is not None)
        return self.content or ""

    def plain(self) -> dict[str, Any]:
        """For a placeholder that takes the conversation."""
        found: dict[str, Any] = {"role": self.role, "content": self.text}
        for name in ("name", "tool_calls", "tool_call_id"):
            if getattr(self, name) is not None:
                found[name] = getattr(self, name)
        return found


class StreamOptions(msgspec.Struct):
    """`include_usage`: a last event with the usage."""

    include_usage: bool = False
    include_obfuscation: bool = False


class AudioOut(msgspec.Struct):
    """How the answer should sound."""

    format: str = "wav"
    voice: Any = None


class ChatRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A conversation to answer."""

    messages: Annotated[list[ChatMessage], Between(min_length=1)]
    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    modalities: list[Literal["text", "audio", "image"]] | None = None
    audio: AudioOut | None = None
    n: Annotated[int, Between(ge=1, le=16)] | None = 1
    stop: str | Annotated[list[str], Between(max_length=16)] | None = None
    seed: Seed | None = None
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    temperature: Annotated[float, Between(ge=0, le=2)] | None = None
    top_p: Annotated[float, Between(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Between(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Between(ge=-2, le=2)] | None = None
    logit_bias: Bias | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Between(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    prediction: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: Any = None
    session: str | None = None


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "temperature": (1, 1.0),
    "top_p": (1, 1.0),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "reasoning_effort": (),
    "verbosity": (),
    "prediction": (),
    "web_search_options": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
}


@dataclass(slots=True)
class Asked:
    """A request that is ready to be submitted."""

    id: str
    created: int
    model: str
    inputs: dict[str, Any]
    params: dict[str, Any]
    outputs: frozenset[str]
    stream: bool
    include_usage: bool
    n: int
    seed: int | None
    stop: list[str]
    max_tokens: int | None
    session: str | None
    audio_format: str
    logprobs: bool


async def read_chat(
    state: State, served: Served, endpoint: ChatCompletions, body: dict[str, Any], session: str | None
) -> Asked:
    """Raises ApiError naming the field at fault."""
    asked, mapped = await take(state, served, endpoint, body, ChatRequest, NEUTRAL)
    stop = [asked.stop] if isinstance(asked.stop, str) else list(asked.stop or ())
    limit = asked.max_completion_tokens or asked.max_tokens
    for name, value in (("stop", stop), ("max_tokens", limit)):
        if name in endpoint.fields and value:
            mapped.put(served, endpoint.fields[name], value)
    _logprobs(served, endpoint, asked, mapped)
    _schema(served, endpoint, asked, mapped)
    outputs, form = _outputs(endpoint, asked)
    inputs = await _inputs(state, served, endpoint, asked.messages)
    return Asked(
        id=new_id("chatcmpl"),
        created=now(),
        model=served.model_of(endpoint),
        inputs={**inputs, **mapped.inputs},
        params=mapped.params,
        outputs=outputs,
        stream=bool(asked.stream),
        include_usage=asked.stream_options is not None and asked.stream_options.include_usage,
        n=asked.n or 1,
        seed=None if asked.seed is None else asked.seed % 2**63,
        stop=stop,
        max_tokens=limit,
        session=asked.session or session,
        audio_format=form,
        logprobs=bool(asked.logprobs),
    )


def _logprobs(served: Served, endpoint: ChatCompletions, asked: ChatRequest, mapped: Mapped) -> None:
    """Tell the graph how many alternatives are wanted. Raises ApiError."""
    if asked.logprobs and not endpoint.out_logprobs:
        raise unsupported("logprobs", "this model gives no logprobs")
    if asked.top_logprobs and not (endpoint.top_logprobs or "top_logprobs" in endpoint.fields):
        raise unsupported("top_logprobs", "this model gives no top_logprobs")
    if asked.top_logprobs and not asked.logprobs:
        raise bad("top_logprobs needs logprobs to be true", "top_logprobs")
    if asked.logprobs and endpoint.top_logprobs:
        mapped.put(served, endpoint.top_logprobs, asked.top_logprobs or 0)


def _schema(served: Served, endpoint: ChatCompletions, asked: ChatRequest, mapped: Mapped) -> None:
    """Tell the graph which JSON schema the answer has to fit. Raises ApiError."""
    form = asked.response_format
    if form is None or "response_format" in endpoint.fields or form.get("type") == "text":
        return
    if not endpoint.json_schema:
        raise unsupported("response_format", "this model does nothing with 'response_format'; leave it out")
    if form.get("type") == "json_object":
        schema: Any = {"type": "object"}
    elif form.get("type") == "json_schema":
        about = form.get("json_schema")
        schema = about.get("schema") if isinstance(about, dict) else None
        if not isinstance(schema, dict):
            raise bad("expected an object, a JSON schema", "response_format.json_schema.schema")
    else:
        raise bad("expected text, json_object or json_schema", "response_format.type")
    mapped.put(served, endpoint.json_schema, msgspec.json.encode(schema).decode())


def _outputs(endpoint: ChatCompletions, asked: ChatRequest) -> tuple[frozenset[str], str]:
    """Which outputs are wanted, and the format of sound."""
    can = {"text": endpoint.out_text, "audio": endpoint.out_audio, "image": endpoint.out_image}
    if asked.modalities is None:
        modalities = [m for m in ("text", "image") if can[m]] or ["audio"]
    else:
        modalities = list(asked.modalities)
    for name in modalities:
        if not can[name]:
            there = ", ".join(m for m, output in can.items() if output)
            raise ApiError(
                400, f"this model gives no {name}; it gives {there}", param="modalities", code="unsupported_parameter"
            )
    form = check_format(asked.audio.format if asked.audio is not None else "wav", "audio.format")
    if "audio" in modalities and asked.stream:
        if asked.audio is not None and form not in ("pcm16", "pcm"):
            raise unsupported("audio.format", "sound is streamed as pcm16; ask for that, or without stream")
        form = "pcm16"
    wanted = {can[name] for name in modalities}
    if "audio" in modalities:
        wanted |= {endpoint.out_transcript, endpoint.out_text}
    wanted |= {endpoint.out_tool_calls, endpoint.out_logprobs, endpoint.out_usage, endpoint.out_finish}
    return frozenset(wanted - {""}), form


async def _inputs(
    state: State, served: Served, endpoint: ChatCompletions, messages: list[ChatMessage]
) -> dict[str, Any]:
    last = max((i for i, m in enumerate(messages) if m.role == "user"), default=None)
    if last is None and not endpoint.messages:
        raise bad("there is no user message", "messages")
    found: dict[str, Any] = {}
    if endpoint.messages:
        found[endpoint.messages] = [message.plain() for message in messages]
    if last is None:
        return found
    first = next((i for i, m in enumerate(messages) if m.role in ("system", "developer") and m.text), None)
    if first is not None and endpoint.system:
        found[endpoint.system] = "\n".join(m.text for m in messages if m.role in ("system", "developer"))
    elif first is not None and not endpoint.messages:
        raise unsupported(f"messages[{first}].role", "this model takes no system message; leave it out")
    if endpoint.text and messages[last].text:
        found[endpoint.text] = messages[last].text
    found |= await _media(state, served, endpoint.image, messages, last, "image_url")
    found |= await _media(state, served, endpoint.audio, messages, last, "input_audio")
    if not found:
        raise bad("the last user message is empty", f"messages[{last}].content")
    return found


async def _media(
    state: State, served: Served, placeholder: str, messages: list[ChatMessage], last: int, kind: str
) -> dict[str, Any]:
    """What messages show or say, for a placeholder: of the last user message, or of all if it takes a list."""
    type_ = served.inputs.get(placeholder)
    several = isinstance(type_, ListOf)
    found: list[Any] = []
    for i, message in enumerate(messages):
        if not isinstance(message.content, list) or (i != last and not several):
            continue
        for j, part in enumerate(message.content):
            if part.type != kind:
                continue
            field = f"messages[{i}].content[{j}].{kind}"
            what = "pictures" if kind == "image_url" else "sound"
            if not placeholder:
                raise unsupported(field, f"this model takes no {what}")
            if found and not several:
                raise unsupported(field, f"this model takes {what} once in a message")
            found.append(await _one(state, type_.item if isinstance(type_, ListOf) else type_, part, field))
    if not found:
        return {}
    return {placeholder: found if several else found[0]}


async def _one(state: State, type_: Any, part: Part, field: str) -> Any:
    if part.type == "image_url":
        if part.image_url is None:
            raise bad("expected an object with url", field, "missing_required_parameter")
        return await load(state.media, type_, {"url": part.image_url.url}, field)
    if part.input_audio is None:
        raise bad("expected an object with data and format", field, "missing_required_parameter")
    raw = {"data": part.input_audio.data}
    if part.input_audio.format in ("pcm16", "pcm"):
        raw |= {"format": "pcm16", "rate": 24_000}  # type: ignore[dict-item]
    return await load(state.media, type_, raw, field)
