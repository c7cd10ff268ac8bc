"""WebSockets: streamed placeholders of any graph, and speech to speech as OpenAI's realtime API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import openai
import pytest
from websockets.sync.client import ClientConnection, connect

from omni_flow.serve.vad import Vad, VadSettings

from .conftest import WAIT_S, Host, b64, tone


@contextmanager
def socket(host: Host, path: str, **options: Any) -> Iterator[ClientConnection]:
    with connect(host.url.replace("http", "ws") + path, **options) as opened:
        yield opened


def told(opened: ClientConnection) -> Any:
    return json.loads(opened.recv(timeout=WAIT_S))


def until(opened: ClientConnection, kind: str) -> list[Any]:
    """All messages up to one of that type."""
    found = []
    while True:
        found.append(told(opened))
        if found[-1]["type"] == kind:
            return found
        assert found[-1]["type"] != "error", found[-1]


def send(opened: ClientConnection, **message: Any) -> None:
    opened.send(json.dumps(message))


def pcm(samples: np.ndarray[Any, Any]) -> bytes:
    return (samples * 32767).astype("<i2").tobytes()


def test_frames_go_in_and_outputs_come_out(host: Host) -> None:
    with socket(host, "/v1/graphs/microphone/stream") as ws:
        send(ws, type="start", binary="sound")
        assert told(ws)["type"] == "started"
        ws.send(pcm(tone(0.1)))
        frame = {"data": b64(tone(0.1).tobytes()), "format": "f32", "rate": 16_000}
        send(ws, type="frame", placeholder="sound", value=frame)
        send(ws, type="end", placeholder="sound")
        came = until(ws, "end")
        assert came[-1]["outcome"] == "done"
        heard = [m["value"] for m in came if m["type"] == "output" and m["output"] == "heard"]
        assert heard == ["3200 samples in 2 pieces"]


def test_a_socket_cancels_by_message_and_by_leaving(host: Host) -> None:
    with socket(host, "/v1/graphs/kitchen/stream") as ws:
        send(ws, type="start", inputs={"text": "wait"})
        until(ws, "output")
        send(ws, type="cancel")
        assert until(ws, "end")[-1]["outcome"] == "cancelled"
    with socket(host, "/v1/graphs/kitchen/stream") as ws:
        send(ws, type="start", inputs={"text": "wait"})
        until(ws, "output")
    host.idle()


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (['{"type": "start", "inputs": {"nope": 1}}'], "inputs.nope"),
        (['{"type": "go"}'], "type"),
        (['{"type": "start", "binary": "nope"}'], "binary"),
        (['{"type": "start"}', '{"type": "frame", "placeholder": "nope"}'], "placeholder"),
        (['{"type": "start"}', '{"type": "frame", "placeholder": "sound", "value": 5}'], "value"),
        (["no json"], None),
    ],
)
def test_a_wrong_message_is_answered_by_an_error(host: Host, messages: list[str], param: str | None) -> None:
    with socket(host, "/v1/graphs/microphone/stream") as ws:
        for message in messages:
            ws.send(message)
        answer = told(ws)
        if answer["type"] == "started":
            answer = told(ws)
        assert answer["type"] == "error"
        assert answer["error"]["param"] == param
    host.idle()


def test_speech_is_answered_by_speech_turn_by_turn(ai: openai.OpenAI, host: Host) -> None:
    with ai.realtime.connect(model="microphone") as conversation:
        assert conversation.recv().type == "session.created"
        conversation.session.update(session={"type": "realtime", "audio": {"input": {"turn_detection": None}}})
        assert conversation.recv().type == "session.updated"
        for seconds in (0.5, 0.25):
            conversation.input_audio_buffer.append(audio=b64(pcm(tone(seconds, 24_000))))
            conversation.input_audio_buffer.commit()
            conversation.response.create()
            kinds: dict[str, list[Any]] = {}
            for event in conversation:
                kinds.setdefault(event.type, []).append(event)
                if event.type == "response.done":
                    break
            heard = kinds["conversation.item.input_audio_transcription.completed"][0].transcript
            assert heard == f"{int(seconds * 16_000)} samples in 1 pieces"
            assert kinds["response.output_audio_transcript.done"][0].transcript == heard
            assert len(kinds["response.output_audio.delta"]) >= 3
            assert kinds["response.done"][0].response.status == "completed"
    host.idle()


def test_turns_are_found_and_speech_ends_an_answer(host: Host) -> None:
    silence, speech = np.zeros(24_000, np.float32), tone(0.4, 24_000)
    with socket(host, "/v1/realtime?model=slow") as ws:
        until(ws, "session.created")
        send(ws, type="input_audio_buffer.append", audio=b64(pcm(silence)))
        send(ws, type="input_audio_buffer.append", audio=b64(pcm(speech)))
        send(ws, type="input_audio_buffer.append", audio=b64(pcm(silence)))
        kinds = [m["type"] for m in until(ws, "response.output_text.delta")]
        assert kinds.index("input_audio_buffer.speech_started") < kinds.index("input_audio_buffer.speech_stopped")
        assert "input_audio_buffer.committed" in kinds
        send(ws, type="input_audio_buffer.append", audio=b64(pcm(speech)))
        done = until(ws, "response.done")[-1]["response"]
        assert done["status"] == "cancelled"
        assert done["status_details"]["reason"] == "turn_detected"
    host.idle()


def test_a_wrong_event_of_a_conversation_is_said_and_the_conversation_goes_on(host: Host) -> None:
    with socket(host, "/v1/realtime?model=microphone") as ws:
        until(ws, "session.created")
        for event, param in (
            ({"type": "nope"}, "type"),
            ({"type": "input_audio_buffer.append", "audio": "!"}, "audio"),
            ({"type": "response.cancel"}, None),
            ({"type": "session.update", "session": {"tools": [{"a": 1}]}}, "session.tools"),
            ({"type": "session.update", "session": {"output_modalities": ["smell"]}}, "session.output_modalities"),
        ):
            send(ws, **event, event_id="mine")
            answer = told(ws)
            assert (answer["type"], answer["error"]["param"]) == ("error", param)
            assert answer["error"]["event_id"] == "mine"
        send(ws, type="session.update", session={"turn_detection": {"type": "server_vad", "threshold": 0.3}})
        assert until(ws, "session.updated")[-1]["session"]["audio"]["input"]["turn_detection"]["threshold"] == 0.3
    with socket(host, "/v1/realtime?model=nope") as ws:
        assert told(ws)["error"]["code"] == "model_not_found"


def test_speech_begins_and_ends_where_it_is_loud() -> None:
    vad = Vad(24_000, VadSettings(silence_s=0.2, padding_s=0.1))
    quiet, loud = np.zeros(12_000, np.float32), tone(0.5, 24_000)
    found = [e for part in np.split(np.concatenate([quiet, loud, quiet]), 30) for e in vad.feed(part)]
    assert [kind for kind, _ in found] == ["started", "stopped"]
    assert abs(found[0][1] - (12_000 - 2400)) <= 960
    assert abs(found[1][1] - (24_000 + 4800)) <= 960
    assert vad.feed(np.where(np.arange(24_000) % 6000 == 0, 1, 0).astype(np.float32)) == []
