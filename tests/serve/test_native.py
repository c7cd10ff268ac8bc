"""The native API: any placeholder in, any output out."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import numpy as np
import pytest

from .conftest import Host, b64, data_url, png, tone, wav


def post(http: httpx.Client, graph: str, **body: Any) -> httpx.Response:
    return http.post(f"/v1/graphs/{graph}/requests", json=body)


def events(text: str) -> list[tuple[str, Any]]:
    """Names and data of server-sent events."""
    found = []
    for block in text.split("\n\n"):
        if block.strip():
            name, _, data = block.partition("\n")
            found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def test_a_graph_is_described(http: httpx.Client) -> None:
    graph = http.get("/v1/graphs/chat").json()
    assert [p["name"] for p in graph["placeholders"]] == ["text", "picture", "sound"]
    assert graph["outputs"] == [
        {"name": "answer", "type": "Text", "stream": True},
        {"name": "speech", "type": "Audio(24000)", "stream": True},
    ]
    assert {"chat", "ear"} <= {g["id"] for g in http.get("/v1/graphs").json()["data"]}
    assert http.get("/v1/graphs/nope").status_code == 404


def test_outputs_come_as_json(http: httpx.Client) -> None:
    answer = post(http, "chat", inputs={"text": "ab c"}).json()
    assert answer["outcome"] == "done"
    assert answer["outputs"]["answer"] == ["ab", " c"]
    frames = answer["outputs"]["speech"]
    assert {(f["type"], f["format"], f["rate"]) for f in frames} == {("audio", "pcm16", 24_000)}
    assert sum(len(base64.b64decode(f["data"])) for f in frames) == 4 * 240 * 2


def test_outputs_come_as_events(http: httpx.Client) -> None:
    came = events(post(http, "chat", inputs={"text": "ab c"}, stream=True, timeline=True).text)
    assert came[0][0] == "request"
    assert [e["value"] for name, e in came if name == "output" and e["output"] == "answer"] == ["ab", " c"]
    assert came[-1][0] == "end"
    assert came[-1][1]["outcome"] == "done"
    assert {span["interface"] for span in came[-1][1]["timeline"]} == {"llm.say", "voice.speak"}


def test_a_form_brings_files_to_placeholders(http: httpx.Client) -> None:
    answer = http.post(
        "/v1/graphs/chat/requests",
        data={"text": "look", "request": json.dumps({"session": "s-form"})},
        files={"picture": ("a.png", png(), "image/png"), "sound": ("a.wav", wav(), "audio/wav")},
    ).json()
    assert "".join(answer["outputs"]["answer"]) == "look [picture 32x16 200,30,30] [sound 8000]"
    assert answer["session"] == "s-form"


def test_plain_samples_need_no_file(http: httpx.Client) -> None:
    samples = tone(1.0, 8000)
    for form, data in (("f32", samples.tobytes()), ("pcm16", (samples * 32767).astype("<i2").tobytes())):
        sent = {"data": b64(data), "format": form, "rate": 8000}
        assert post(http, "ear", inputs={"sound": sent}).json()["outputs"]["heard"] == "16000 samples"


def test_frames_of_a_streamed_placeholder_come_as_a_list(http: httpx.Client) -> None:
    frame = {"data": b64(np.zeros(1600, np.float32).tobytes()), "format": "f32", "rate": 16_000}
    answer = post(http, "microphone", inputs={"sound": [frame, frame, frame]}).json()
    assert answer["outputs"]["heard"] == "4800 samples in 3 pieces"


def test_a_picture_comes_back_as_a_file(http: httpx.Client) -> None:
    answer = post(http, "painter", inputs={"prompt": "red", "width": 64, "height": 48}).json()
    picture = answer["outputs"]["picture"]
    assert (picture["type"], picture["width"], picture["height"]) == ("image", 64, 48)
    assert base64.b64decode(picture["data"]).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"inputs": {"txt": "a"}}, "inputs.txt"),
        ({"inputs": {"text": 5}}, "inputs.text"),
        ({"inputs": {}}, "text"),
        ({"inputs": {"text": "a"}, "params": {"heat": "hot"}}, "heat"),
        ({"inputs": {"text": "a"}, "params": {"cold": 1}}, "cold"),
        ({"inputs": {"text": "a"}, "outputs": ["nope"]}, "outputs"),
        ({"inputs": {"text": "a"}, "deadline_s": -1}, "deadline_s"),
        ({"inputs": {"text": "a"}, "seed": "x"}, "seed"),
        ({"inputs": {"text": "a"}, "colour": 1}, "colour"),
        ({"inputs": [1]}, "inputs"),
        ({"inputs": {"text": "a"}, "session": "a b"}, "session"),
    ],
)
def test_wrong_input_is_refused_by_name(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    answer = post(http, "kitchen", **body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert error["message"]


@pytest.mark.parametrize("sent", ["AAAA", "data:image/png;base64,!!", {"url": "http://example.org/a.png"}, 7, {}])
def test_a_wrong_picture_is_refused_by_name(http: httpx.Client, sent: Any) -> None:
    answer = post(http, "chat", inputs={"text": "a", "picture": sent})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("inputs.picture")


def test_failure_and_deadline_have_their_status_and_what_came_before(http: httpx.Client) -> None:
    failed = post(http, "kitchen", inputs={"text": "burn"})
    assert failed.status_code == 500
    assert failed.json()["error"]["partial"] == {"dish": ["begun"]}
    assert "on fire" in failed.json()["error"]["failures"]["dish"]
    late = post(http, "kitchen", inputs={"text": "wait"}, deadline_s=0.2)
    assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")


def test_a_request_is_cancelled_by_its_id(http: httpx.Client, host: Host) -> None:
    body = {"inputs": {"text": "wait"}, "stream": True}
    with http.stream("POST", "/v1/graphs/kitchen/requests", json=body) as stream:
        lines = stream.iter_lines()
        id = next(json.loads(line[6:])["id"] for line in lines if line.startswith("data: "))
        assert http.get(f"/v1/requests/{id}").json()["outcome"] is None
        assert http.delete(f"/v1/requests/{id}").json()["cancelled"] is True
        rest = list(lines)
    assert '"outcome":"cancelled"' in "\n".join(rest)
    assert http.delete(f"/v1/requests/{id}").json()["cancelled"] is False
    assert http.get(f"/v1/requests/{id}").json()["outcome"] == "cancelled"
    assert http.delete("/v1/requests/nope").status_code == 404
    host.idle()


def test_a_caller_who_leaves_ends_the_request(http: httpx.Client, host: Host) -> None:
    body = {"inputs": {"text": "wait"}}
    with http.stream("POST", "/v1/graphs/kitchen/requests", json={**body, "stream": True}) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "event: request"
        assert host.live() == 1
    host.idle()
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/graphs/kitchen/requests", json=body, timeout=0.3)
    host.idle()


def test_sessions_share_params_and_count_turns(http: httpx.Client) -> None:
    assert http.get("/v1/sessions/s1").status_code == 404
    assert http.patch("/v1/sessions/s1", json={"params": {"heat": 7.0}}).json()["params"] == {"heat": 7.0}
    answer = post(http, "kitchen", inputs={"text": "soup"}, session="s1")
    assert answer.json()["outputs"]["dish"] == ["begun", " 7.0"]
    by_header = http.post(
        "/v1/graphs/kitchen/requests", json={"inputs": {"text": "soup"}}, headers={"x-omni-session": "s1"}
    )
    assert by_header.json()["session"] == "s1"
    assert http.get("/v1/sessions/s1").json()["turns"] == 2
    assert http.delete("/v1/sessions/s1").json()["closed"] is True
    assert http.get("/v1/sessions/s1").status_code == 404


def test_requests_that_ended_keep_their_timeline(http: httpx.Client) -> None:
    id = post(http, "chat", inputs={"text": "a b", "picture": data_url(png())}, timeline=True).json()["id"]
    found = http.get(f"/v1/requests/{id}").json()
    assert found["outcome"] == "done"
    assert {span["interface"] for span in found["timeline"]} == {"llm.say", "voice.speak"}
    assert id in [r["id"] for r in http.get("/v1/requests").json()["data"]]
