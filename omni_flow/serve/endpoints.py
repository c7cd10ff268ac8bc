"""How a graph states which endpoints of OpenAI's API it serves: a few small records, beside the graph.

A module with a graph, or `serving.py` in its folder, has
`endpoints = (ChatCompletions(text="question", out_text="token"),)`. Every value is the name of a placeholder, a param
(`fields` only) or an output of the graph. `fields` maps further fields of the request to placeholders or params as they
are; `ignores` names fields that are accepted without effect. A field that is in neither is refused unless it has its
default value: a server that took `temperature` and did nothing with it would not tell the truth.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import ClassVar

from omni_flow.control.compiled import CompiledGraph


class MappingError(ValueError):
    """An endpoint names something that the graph does not have, or lacks what it needs."""

    def __init__(self, endpoint: Endpoint, why: str) -> None:
        super().__init__(f"endpoint {type(endpoint).__name__} of model {endpoint.model or 'of the graph'!r}: {why}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Base. `model`: the name callers use; the graph's own by default."""

    model: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)
    ignores: Sequence[str] = ()
    _settings: ClassVar[tuple[str, ...]] = ()
    """Attributes that name a param or a placeholder."""

    def needs(self) -> str | None:
        """What is missing for the endpoint to make sense, or None."""
        return None

    def inputs(self) -> Iterator[tuple[str, str]]:
        """(attribute, placeholder) pairs that are set."""
        for each in fields(self):
            value = getattr(self, each.name)
            own = each.name in ("model", "fields", "ignores", *self._settings) or each.name.startswith("out_")
            if not own and isinstance(value, str) and value:
                yield each.name, value

    def outputs(self) -> Iterator[tuple[str, str]]:
        """(attribute, output) pairs that are set."""
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name.startswith("out_") and isinstance(value, str) and value:
                yield each.name, value

    def check(self, graph: CompiledGraph) -> None:
        """Raises MappingError."""
        missing = self.needs()
        if missing is not None:
            raise MappingError(self, missing)
        for name, placeholder in self.inputs():
            if placeholder not in graph.placeholders:
                raise MappingError(self, f"{name}={placeholder!r}: the graph has no such placeholder")
        settings = {name: getattr(self, name) for name in self._settings if getattr(self, name)}
        for name, target in {**settings, **{f"fields[{name!r}]": to for name, to in self.fields.items()}}.items():
            if target not in graph.placeholders and target not in graph.params:
                raise MappingError(self, f"{name}={target!r}: the graph has no such placeholder or param")
        for name, output in self.outputs():
            if output not in graph.outputs:
                raise MappingError(self, f"{name}={output!r}: the graph has no such output")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCompletions(Endpoint):
    """`/v1/chat/completions`.

    In: `text`: the text of the last user message; `messages`: the whole conversation as a list of
    `{"role", "content"}` with its text only; `system`: the text of system messages; `image`, `audio`: what the last
    user message shows and says (a list of all pictures if the placeholder takes a list). `json_schema`: gets the
    schema of `response_format` as JSON text; `top_logprobs`: how many alternatives a token's log-probability comes
    with, given when `logprobs` is true; both are params or placeholders.
    Out: `out_text` (text, or a stream of pieces), `out_audio`, `out_image`, `out_transcript` (what the sound says; by
    default the text), `out_tool_calls` (a list of OpenAI's tool calls), `out_logprobs` (OpenAI's entries), `out_usage`
    ({"prompt_tokens", "completion_tokens", "cached_tokens"}), `out_finish` (a finish reason).
    """

    text: str = ""
    messages: str = ""
    system: str = ""
    image: str = ""
    audio: str = ""
    json_schema: str = ""
    top_logprobs: str = ""
    out_text: str = ""
    out_audio: str = ""
    out_image: str = ""
    out_transcript: str = ""
    out_tool_calls: str = ""
    out_logprobs: str = ""
    out_usage: str = ""
    out_finish: str = ""
    _settings = ("json_schema", "top_logprobs")

    def needs(self) -> str | None:
        if not (self.text or self.messages or self.audio):
            return "it maps no question: give text=, messages= or audio="
        return None if self.out_text or self.out_audio or self.out_image else "it maps no answer: give out_text="


@dataclass(frozen=True, slots=True, kw_only=True)
class Completions(Endpoint):
    """`/v1/completions`: `prompt` in, `out_text` out; `out_usage` and `out_finish` as in chat."""

    prompt: str = ""
    out_text: str = ""
    out_usage: str = ""
    out_finish: str = ""

    def needs(self) -> str | None:
        return None if self.prompt and self.out_text else "it needs prompt= and out_text="


@dataclass(frozen=True, slots=True, kw_only=True)
class Speech(Endpoint):
    """`/v1/audio/speech`: `text` in, `out_audio` out. `voices`: what `voice` may be; empty: anything."""

    text: str = ""
    out_audio: str = ""
    voices: Sequence[str] = ()

    def needs(self) -> str | None:
        return None if self.text and self.out_audio else "it needs text= and out_audio="


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcriptions(Endpoint):
    """`/v1/audio/transcriptions`: `audio` in, `out_text` out; `out_segments`: a list of {"start", "end", "text"}."""

    audio: str = ""
    out_text: str = ""
    out_segments: str = ""

    def needs(self) -> str | None:
        return None if self.audio and self.out_text else "it needs audio= and out_text="


@dataclass(frozen=True, slots=True, kw_only=True)
class Images(Endpoint):
    """`/v1/images/generations`, and with `image` also `/v1/images/edits`.

    `width`, `height` are placeholders or params that get the numbers of `size`; `sizes` are those allowed, the first
    is the default; empty: any up to `max_side`. `out_partial` is a stream of pictures on the way.
    """

    prompt: str = ""
    image: str = ""
    mask: str = ""
    width: str = ""
    height: str = ""
    sizes: Sequence[str] = ()
    max_side: int = 4096
    out_image: str = ""
    out_partial: str = ""
    _settings = ("width", "height")

    def needs(self) -> str | None:
        return None if self.prompt and self.out_image else "it needs prompt= and out_image="


@dataclass(frozen=True, slots=True, kw_only=True)
class Realtime(Endpoint):
    """`/v1/realtime`: a WebSocket; each turn is a request.

    `audio` is what was said in a turn (streamed while it is being said if the placeholder is a stream), `text` what
    was typed, `image` a picture of the turn. Out: `out_audio`, `out_text`, `out_heard` (the transcript of the input).
    """

    audio: str = ""
    text: str = ""
    image: str = ""
    out_audio: str = ""
    out_text: str = ""
    out_heard: str = ""

    def needs(self) -> str | None:
        if not (self.audio or self.text):
            return "it maps no input: give audio= or text="
        return None if self.out_audio or self.out_text else "it maps no output: give out_audio= or out_text="
