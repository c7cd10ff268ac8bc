"""`/v1/chat/completions` and `/v1/models` through the official client."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import openai
import pytest

from .conftest import Host, b64, data_url, png, sound, wav


def ask(ai: openai.OpenAI, content: Any, model: str = "chat", **options: Any) -> Any:
    return ai.chat.completions.create(model=model, messages=[{"role": "user", "content": content}], **options)


def test_the_models_of_a_server_are_listed(ai: openai.OpenAI) -> None:
    names = {model.id for model in ai.models.list()}
    assert {"chat", "voice", "ear", "painter"} <= names
    assert ai.models.retrieve("chat").id == "chat"
    with pytest.raises(openai.NotFoundError) as caught:
        ai.models.retrieve("gpt-none")
    assert caught.value.code == "model_not_found"


def test_text_is_answered_whole(ai: openai.OpenAI) -> None:
    answer = ask(ai, "hello big world")
    assert answer.choices[0].message.content == "hello big world"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 3


def test_text_is_answered_piece_by_piece_with_usage_at_the_end(ai: openai.OpenAI) -> None:
    chunks = list(ask(ai, "hello big world", stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello big world"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens == 3
    assert len({c.id for c in chunks}) == 1


def test_a_picture_and_a_sound_reach_their_placeholders(ai: openai.OpenAI) -> None:
    answer = ask(
        ai,
        [
            {"type": "text", "text": "look"},
            {"type": "image_url", "image_url": {"url": data_url(png())}},
            {"type": "input_audio", "input_audio": {"data": b64(wav(0.5, 48_000)), "format": "wav"}},
        ],
    )
    assert answer.choices[0].message.content == "look [picture 32x16 200,30,30] [sound 8000]"


def test_sound_comes_back_as_a_file_with_its_transcript(ai: openai.OpenAI) -> None:
    answer = ask(ai, "ab cd", modalities=["text", "audio"], audio={"voice": "any", "format": "wav"})
    audio = answer.choices[0].message.audio
    samples, rate = sound(base64.b64decode(audio.data))
    assert (len(samples), rate) == (5 * 240, 24_000)
    assert audio.transcript == "ab cd"
    assert np.abs(samples).max() > 0.2


def test_sound_is_streamed_as_plain_samples(ai: openai.OpenAI) -> None:
    chunks = list(
        ask(ai, "ab cd", modalities=["text", "audio"], audio={"voice": "any", "format": "pcm16"}, stream=True)
    )
    audio: list[Any] = [a for c in chunks if c.choices and (a := getattr(c.choices[0].delta, "audio", None))]
    data = b"".join(base64.b64decode(a["data"]) for a in audio if "data" in a)
    assert len(data) == 2 * 5 * 240
    assert "".join(a.get("transcript", "") for a in audio) == "ab cd"


@pytest.mark.parametrize("stream", [False, True])
def test_text_ends_before_a_stop_string_that_lies_across_pieces(ai: openai.OpenAI, stream: bool) -> None:
    answer = ask(ai, "one two three four", stop=["o th"], stream=stream)
    if stream:
        text = "".join(c.choices[0].delta.content or "" for c in answer)
    else:
        text = answer.choices[0].message.content
    assert text == "one tw"


def test_text_ends_after_max_tokens_pieces(ai: openai.OpenAI, host: Host) -> None:
    answer = ask(ai, "one two three four", max_tokens=2)
    assert answer.choices[0].message.content == "one two"
    assert answer.choices[0].finish_reason == "length"
    with host.client() as http:
        assert http.get("/v1/requests").json()["data"][0]["outcome"] == "done"
    host.idle()


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices_are_several_requests(ai: openai.OpenAI, stream: bool) -> None:
    answer = ask(ai, "a b", n=3, stream=stream)
    if stream:
        texts = ["", "", ""]
        for chunk in answer:
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert texts == ["a b"] * 3
    else:
        assert [choice.message.content for choice in answer.choices] == ["a b"] * 3


def test_the_whole_conversation_reaches_a_model_that_takes_it(ai: openai.OpenAI) -> None:
    answer = ai.chat.completions.create(
        model="tools",
        messages=[{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}],
        temperature=0.5,
        response_format={"type": "json_object"},
        logprobs=True,
    )
    assert answer.choices[0].message.content == "2 messages, schema True, heat 0.5"
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    assert answer.choices[0].logprobs.content[0].logprob == -0.5


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_called_by_a_model_that_can(ai: openai.OpenAI, stream: bool) -> None:
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    answer: Any = ask(ai, "how is it?", model="tools", tools=[tool], tool_choice="auto", stream=stream)
    if stream:
        chunks = list(answer)
        calls = [call for c in chunks for call in c.choices[0].delta.tool_calls or ()]
        reason = chunks[-1].choices[0].finish_reason
    else:
        calls, reason = answer.choices[0].message.tool_calls, answer.choices[0].finish_reason
    assert [call.function.name for call in calls] == ["weather"]
    assert reason == "tool_calls"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": 0.5}, "temperature"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"logprobs": True}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"temperature": 9}, "temperature"),
        ({"n": 0}, "n"),
        ({"modalities": ["smell"]}, "modalities[0]"),
        ({"extra_body": {"colour": "red"}}, "colour"),
        ({"audio": {"voice": "a", "format": "midi"}}, "audio.format"),
    ],
)
def test_what_a_model_does_nothing_with_is_refused_by_name(
    ai: openai.OpenAI, options: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(ai, "hi", **options)
    assert caught.value.param == param


def test_neutral_values_of_such_fields_are_taken(ai: openai.OpenAI) -> None:
    answer = ask(ai, "hi", temperature=1, top_p=1, presence_penalty=0, tools=[], user="me", metadata={"a": "b"})
    assert answer.choices[0].message.content == "hi"


def test_a_wrong_message_is_named_by_its_place(ai: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "a"}, {"role": "wizard", "content": "b"}]
    with pytest.raises(openai.BadRequestError) as caught:
        ai.chat.completions.create(model="chat", messages=messages)
    assert caught.value.param is not None
    assert caught.value.param.startswith("messages[")
    with pytest.raises(openai.BadRequestError) as caught:
        ask(ai, [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}])
    assert caught.value.param == "messages[0].content[0].image_url"


def test_an_unknown_model_is_not_found(ai: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        ask(ai, "hi", model="gpt-none")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.NotFoundError) as caught:
        ask(ai, "hi", model="ear")
    assert "does not serve this endpoint" in str(caught.value)


def test_a_failure_of_a_role_is_said(ai: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        ask(ai, "burn", model="kitchen")
    assert "the kitchen is on fire" in str(caught.value)
    with pytest.raises(openai.APIError) as broken:
        list(ask(ai, "burn", model="kitchen", stream=True))
    assert "the kitchen is on fire" in str(broken.value)


def test_a_long_failure_is_cut_for_the_caller(ai: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        ask(ai, "smoke", model="kitchen")
    assert caught.value.body is not None
    message = caught.value.body["message"]  # type: ignore[index]
    assert "cook.cook: ValueError: smoke" in message
    assert message.endswith("without fire")
    assert len(message) < 500


def test_what_a_role_says_of_the_request_is_a_400(ai: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(ai, "plastic", model="kitchen")
    assert caught.value.code == "invalid_input"
    assert "nobody eats plastic" in str(caught.value)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "status", "code", "retry"),
    [
        ("crowd", 429, "rate_limit_exceeded", "1"),
        ("gas", 503, "engine_died", "1"),
        ("long", 400, "context_length_exceeded", None),
    ],
)
def test_what_fails_at_an_engine_before_the_answer_has_begun_has_a_status_of_its_own(
    ai: openai.OpenAI, text: str, status: int, code: str, retry: str | None, stream: bool
) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        ask(ai, text, model="kitchen", stream=stream)
    assert (caught.value.status_code, caught.value.code) == (status, code)
    assert caught.value.response.headers.get("retry-after") == retry


def test_a_mapped_field_has_the_type_and_range_of_the_api(ai: openai.OpenAI) -> None:
    assert ask(ai, "hi", model="kitchen", temperature=2).choices[0].message.content == "begun 2.0"
    for wrong in (-1, 2.5, "hot"):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(ai, "hi", model="kitchen", temperature=wrong)
        assert caught.value.param == "temperature"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_mapped_limit_goes_by_both_of_its_names(ai: openai.OpenAI, name: str) -> None:
    answer = ask(ai, "hi", model="tools", extra_body={name: 7, "stop": "§"})
    assert answer.choices[0].message.content.endswith("limit 7, 1 stop text")


def test_a_schema_and_alternatives_reach_a_graph_in_plain_form(ai: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "array"}}}
    answer = ask(ai, "hi", model="forms", response_format=form, logprobs=True, top_logprobs=3)
    assert answer.choices[0].message.content == '{"type":"array"} 3'
    answer = ask(ai, "hi", model="forms", response_format={"type": "json_object"}, logprobs=True)
    assert answer.choices[0].message.content == '{"type":"object"} 0'
    assert ask(ai, "hi", model="forms", response_format={"type": "text"}).choices[0].message.content == "None None"
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 3, 8)


def test_a_caller_who_leaves_ends_the_request(ai: openai.OpenAI, host: Host) -> None:
    stream = ask(ai, "wait", model="kitchen", stream=True)
    for chunk in stream:
        if chunk.choices[0].delta.content == "begun":
            break
    assert host.live() == 1
    stream.close()
    host.idle()
