"""The demo of real models through HTTP, as its own scripts ask it."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import soundfile
import soxr

from .test_command import Served

DEMO = Path(__file__).parents[2] / "examples" / "voice_vision_chat"

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def demo() -> Iterator[Served]:
    made = Served("voice_vision_chat", "--drain", 1)
    yield made
    assert made.stop() == 0


def run(*args: str, cwd: Path) -> str:
    env = {**os.environ, "OMNI_FLOW_API_KEY": "none"}
    return subprocess.run(args, capture_output=True, text=True, timeout=600, check=True, cwd=cwd, env=env).stdout


def test_curl_asks_about_a_picture_a_sound_and_everything(demo: Served, tmp_path: Path) -> None:
    said = run("bash", str(DEMO / "request.sh"), demo.url, cwd=tmp_path)
    first, _, rest = said.partition("2. What was said?")
    chunks = [json.loads(line[6:]) for line in first.splitlines() if line.startswith("data: {")]
    assert len("".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)) > 5
    assert '"text":' in rest
    assert "event: end" in rest
    assert '"outcome":"done"' in rest


def test_python_hears_the_answer(demo: Served, tmp_path: Path) -> None:
    said = run(sys.executable, str(DEMO / "request.py"), demo.url, cwd=tmp_path)
    assert "Paris" in said
    with wave.open(str(tmp_path / "answer.wav")) as sound:
        assert sound.getnframes() > sound.getframerate()


def test_speech_is_answered_by_speech_over_the_realtime_api(demo: Served) -> None:
    samples, rate = soundfile.read(DEMO / "samples" / "question.wav", dtype="float32")
    spoken = (soxr.resample(samples, rate, 24_000) * 32767).astype("<i2").tobytes()
    base = demo.url.replace("http", "ws") + "/v1"
    client = openai.OpenAI(base_url=f"{demo.url}/v1", websocket_base_url=base, api_key="none")
    with client.realtime.connect(model="voice_vision_chat") as conversation:
        conversation.session.update(session={"type": "realtime", "audio": {"input": {"turn_detection": None}}})
        conversation.input_audio_buffer.append(audio=base64.b64encode(spoken).decode())
        conversation.input_audio_buffer.commit()
        conversation.response.create()
        heard, sound = "", 0
        for event in conversation:
            if event.type == "conversation.item.input_audio_transcription.completed":
                heard = event.transcript
            elif event.type == "response.output_audio.delta":
                sound += len(base64.b64decode(event.delta))
            elif event.type == "response.done":
                assert event.response.status == "completed"
                break
    assert len(heard) > 5
    assert sound > 2 * 24_000


def test_a_chat_without_sound_does_not_wait_for_the_voice(demo: Served) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8}
    answer = httpx.post(f"{demo.url}/v1/chat/completions", json=body, timeout=120).json()
    assert answer["choices"][0]["message"]["content"]
    id = httpx.get(f"{demo.url}/v1/requests").json()["data"][0]["id"]
    spans = httpx.get(f"{demo.url}/v1/requests/{id}").json()["timeline"]
    assert {span["interface"] for span in spans} >= {"llm.chat"} or spans == []


def test_a_second_turn_of_a_session_finds_the_kv_of_the_first_and_what_is_asked_for_reaches_the_engine(
    demo: Served,
) -> None:
    def ask(text: str, **more: Any) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 6, "session": "talk", **more}
        answer: dict[str, Any] = httpx.post(f"{demo.url}/v1/chat/completions", json=body, timeout=120).json()
        return answer

    first = ask("What is the capital of France?")
    more = ask("And of Spain?", logprobs=True, top_logprobs=3, temperature=0.5, seed=1)
    assert first["usage"]["completion_tokens"] == more["usage"]["completion_tokens"] == 6
    assert [answer["choices"][0]["finish_reason"] for answer in (first, more)] == ["length", "length"]
    before = first["usage"]["total_tokens"] - 1
    assert more["usage"]["prompt_tokens_details"]["cached_tokens"] == before // 16 * 16
    assert [len(one["top_logprobs"]) for one in more["choices"][0]["logprobs"]["content"]] == [3] * 6
    assert first["choices"][0]["logprobs"] is None
    stopped = ask("What is the capital of France?", session="other", stop=["capital"])["choices"][0]
    assert (stopped["finish_reason"], stopped["message"]["content"]) == ("stop", "The ")
