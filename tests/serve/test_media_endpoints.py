"""Completions, speech, transcriptions and pictures through the official client."""

from __future__ import annotations

import base64
import io
from typing import Any

import av
import httpx
import numpy as np
import openai
import pytest
from numpy.typing import NDArray
from PIL import Image

from omni_flow.serve.sounds import SoundStream

from .conftest import Host, png, tone, wav


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def test_a_text_is_continued(ai: openai.OpenAI) -> None:
    answer = ai.completions.create(model="chat", prompt=["one two", "three"], n=2)
    assert [choice.text for choice in answer.choices] == ["one two", "one two", "three", "three"]
    chunks = list(ai.completions.create(model="chat", prompt="one two three", stream=True, stop=" th", echo=True))
    assert "".join(c.choices[0].text for c in chunks) == "one two threeone two"
    assert chunks[-1].choices[0].finish_reason == "stop"


def decoded(data: bytes) -> tuple[NDArray[np.float32], int]:
    """Samples and rate of a file in any format, read from its start to its end as a player does."""
    with av.open(io.BytesIO(data)) as file:
        frames = list(file.decode(audio=0))
    samples = np.concatenate([frame.to_ndarray().reshape(-1) for frame in frames])
    return (samples / 32768 if samples.dtype == np.int16 else samples).astype(np.float32), frames[0].sample_rate


@pytest.mark.parametrize("form", ["wav", "flac", "mp3", "opus", "aac", "pcm"])
def test_a_text_is_spoken_in_every_format(ai: openai.OpenAI, form: Any) -> None:
    with ai.audio.speech.with_streaming_response.create(
        model="voice", voice="low", input="hello" * 20, response_format=form
    ) as answer:
        data = answer.read()
        kind = answer.headers["content-type"]
    if form == "pcm":
        assert kind == "audio/pcm"
        assert len(data) == 2 * 100 * 240
        return
    samples, rate = decoded(data)
    assert len(samples) / rate == pytest.approx(1.0, abs=0.12)
    assert 0.15 < np.abs(samples).max() < 0.6


@pytest.mark.parametrize("form", ["wav", "flac", "mp3", "opus", "aac", "pcm"])
def test_every_format_is_sent_while_the_sound_is_made(form: str) -> None:
    made = SoundStream(form, 16_000)
    first = b"".join(made.feed(tone(0.25)) for _ in range(8))
    rest = made.finish()
    assert len(first) > len(rest)
    if form not in ("pcm", "wav"):
        samples, rate = decoded(first + rest)
        assert len(samples) / rate == pytest.approx(2.0, abs=0.2)


def test_speech_comes_as_events_too(host: Host) -> None:
    with host.client() as http:
        body = {"model": "voice", "input": "ab", "response_format": "pcm", "stream_format": "sse"}
        text = http.post("/v1/audio/speech", json=body).text
    assert "speech.audio.delta" in text
    assert "speech.audio.done" in text


def test_speech_refuses_what_it_cannot(ai: openai.OpenAI) -> None:
    for options, param in (
        ({"voice": "high"}, "voice"),
        ({"voice": "low", "response_format": "midi"}, "response_format"),
        ({"voice": "low", "instructions": "sing"}, "instructions"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            ai.audio.speech.create(model="voice", input="a", **options)  # type: ignore[arg-type]
        assert caught.value.param == param


def test_a_sound_is_written_down(ai: openai.OpenAI) -> None:
    file = ("a.wav", wav(1.0, 44_100), "audio/wav")
    assert ai.audio.transcriptions.create(model="ear", file=file).text == "16000 samples"
    assert ai.audio.transcriptions.create(model="ear", file=file, response_format="text").strip() == "16000 samples"
    verbose = ai.audio.transcriptions.create(model="ear", file=file, response_format="verbose_json")
    assert verbose.duration == 1.0
    events = list(ai.audio.transcriptions.create(model="ear", file=file, stream=True))
    assert [e.type for e in events] == ["transcript.text.delta", "transcript.text.done"]
    with pytest.raises(openai.BadRequestError) as caught:
        ai.audio.transcriptions.create(model="ear", file=file, response_format="srt")
    assert caught.value.param == "response_format"


def test_a_file_that_is_no_sound_is_refused(ai: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ai.audio.transcriptions.create(model="ear", file=("a.wav", b"RIFF" + bytes(50), "audio/wav"))
    assert caught.value.param == "file"


def test_a_picture_is_drawn(ai: openai.OpenAI) -> None:
    answer = ai.images.generate(model="painter", prompt="red", n=2, size="64x48")  # type: ignore[call-overload]
    assert len(answer.data) == 2
    picture = opened(base64.b64decode(answer.data[0].b64_json))
    assert (picture.format, picture.size) == ("PNG", (64, 48))
    assert picture.getpixel((30, 40)) == (200, 30, 30)


def test_a_picture_lies_at_a_url(ai: openai.OpenAI) -> None:
    answer: Any = ai.images.generate(
        model="painter",
        prompt="blue",
        size="64x48",  # type: ignore[call-overload]
        response_format="url",
        output_format="jpeg",
    )
    found = httpx.get(answer.data[0].url)
    assert found.headers["content-type"] == "image/jpeg"
    assert opened(found.content).size == (64, 48)
    assert httpx.get(answer.data[0].url + "x").status_code == 404


def test_pictures_on_the_way_are_streamed(ai: openai.OpenAI) -> None:
    events: Any = ai.images.generate(
        model="painter",
        prompt="green",
        size="64x48",
        stream=True,
        partial_images=2,  # type: ignore[call-overload]
    )
    came = list(events)
    assert [e.type for e in came] == ["image_generation.partial_image"] * 2 + ["image_generation.completed"]
    assert [e.partial_image_index for e in came[:2]] == [0, 1]
    assert opened(base64.b64decode(came[-1].b64_json)).size == (64, 48)


def test_a_picture_is_edited(ai: openai.OpenAI) -> None:
    answer: Any = ai.images.edit(
        model="painter",
        image=("a.png", png((10, 200, 10)), "image/png"),
        prompt="x",
        size="64x48",  # type: ignore[call-overload]
    )
    assert opened(base64.b64decode(answer.data[0].b64_json)).getpixel((30, 40)) == (10, 200, 10)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"size": "big"}, "size"),
        ({"size": "9000x9000"}, "size"),
        ({"size": "64x48", "quality": "high"}, "quality"),
        ({"size": "64x48", "n": 99}, "n"),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_refused(ai: openai.OpenAI, options: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ai.images.generate(model="painter", prompt="red", **options)
    assert caught.value.param == param
