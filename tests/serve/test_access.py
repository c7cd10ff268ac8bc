"""API keys, limits, CORS, the size of bodies, patience."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import httpx
import openai
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from omni_flow.serve.endpoints import ChatCompletions
from omni_flow.serve.keys import Key, KeysError, Limiter, digest_of, load, make_key, parse
from omni_flow.serve.server import Serving
from omni_flow.serve.settings import Settings

from . import graphs
from .conftest import WAIT_S, Host, asked_until, hosted

BODY = {"inputs": {"text": "a"}}
URL = "/v1/graphs/kitchen/requests"


def kitchen() -> Serving:
    return Serving(graphs.kitchen(), (ChatCompletions(text="text", out_text="dish"),))


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


def test_a_key_is_needed_where_there_are_keys() -> None:
    alice, bob = Key("alice", digest_of("a-secret")), Key("bob", digest_of("b-secret"))
    with hosted(kitchen(), keys=[alice, bob]) as host, host.client() as http:
        for path in ("/v1/models", "/metrics", "/health", "/v1/live", "/v1/requests"):
            answer = http.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "no_key")
        for path in ("/", "/health/live", "/health/ready", "/page/main.js"):
            assert http.get(path).status_code == 200
        with pytest.raises(openai.AuthenticationError):
            host.openai("wrong").models.list()
        assert host.openai("a-secret").models.list().data[0].id == "kitchen"
        with pytest.raises(InvalidStatus), connect(host.url.replace("http", "ws") + "/v1/graphs/kitchen/stream"):
            pass
        protocols = ["realtime", "openai-insecure-api-key.a-secret"]
        ws = host.url.replace("http", "ws") + "/v1/graphs/kitchen/stream"
        with connect(ws, subprotocols=protocols):  # type: ignore[arg-type]
            pass
        id = http.post(URL, json={**BODY, "session": "s"}, headers=bearer("a-secret")).json()["id"]
        assert http.get(f"/v1/requests/{id}", headers=bearer("a-secret")).status_code == 200
        assert http.get(f"/v1/requests/{id}", headers=bearer("b-secret")).status_code == 404
        assert http.get("/v1/sessions/s", headers=bearer("b-secret")).status_code == 404
        assert alice.salt != bob.salt


def test_keys_come_from_a_file_and_the_environment(tmp_path: Path) -> None:
    secret, line = make_key("alice")
    file = tmp_path / "keys"
    file.write_text(f"# who may call\n{line} rate=2.5 concurrency=3\n\n")
    keys = load(file, {"OMNI_FLOW_API_KEYS": "bob:b-secret, c-secret"})
    assert [(k.name, k.rate, k.concurrency) for k in keys] == [
        ("alice", 2.5, 3),
        ("bob", None, None),
        ("key-1", None, None),
    ]
    assert keys[0].digest == digest_of(secret)
    assert secret not in file.read_text()
    for wrong in ("alice", "alice xyz", f"{line}\n{line}", f"{line} speed=1"):
        with pytest.raises(KeysError):
            parse(wrong.splitlines(), "keys")
    with pytest.raises(KeysError):
        make_key("a b")


@pytest.mark.parametrize(
    ("entries", "why"), [("bob:a,bob:b", "'bob' stands there twice"), ("b b:a", "'b b' is no name")]
)
def test_a_name_of_the_environment_names_one_caller(entries: str, why: str) -> None:
    with pytest.raises(KeysError, match=why):
        load(None, {"OMNI_FLOW_API_KEYS": entries})


def test_a_bucket_lets_a_burst_through_and_then_its_rate() -> None:
    limiter = Limiter(2.0, 3, None)
    assert [limiter.enter(10.0) is None for _ in range(4)] == [True, True, True, False]
    refused = limiter.enter(10.1)
    assert refused is not None
    assert refused[1] == pytest.approx(0.4)
    assert limiter.enter(10.51) is None


def test_too_many_requests_are_told_when_to_come_again() -> None:
    with hosted(kitchen(), settings=Settings(rate_per_s=0.01, burst=2)) as host, host.client() as http:
        assert [http.post(URL, json=BODY).status_code for _ in range(3)] == [200, 200, 429]
        answer = http.post(URL, json=BODY)
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert 1 <= int(answer.headers["retry-after"]) <= 100
        with pytest.raises(openai.RateLimitError):
            host.openai().chat.completions.create(model="kitchen", messages=[{"role": "user", "content": "a"}])


def test_concurrency_is_limited_by_key() -> None:
    with hosted(kitchen(), settings=Settings(concurrency=1)) as host, host.client() as http:
        with http.stream("POST", URL, json={"inputs": {"text": "wait"}, "stream": True}) as waiting:
            lines = waiting.iter_lines()
            next(lines)
            assert http.post(URL, json=BODY).status_code == 429
        host.idle()
        with host.client() as other:
            asked_until(200, lambda: other.post(URL, json=BODY))


def test_another_site_may_call_only_if_it_is_named() -> None:
    origin = {"origin": "https://app.example.org"}
    with hosted(kitchen()) as host, host.client() as http:
        assert "access-control-allow-origin" not in http.get("/v1/models", headers=origin).headers
        refused = http.post(URL, json=BODY, headers=origin)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "origin_not_allowed")
        assert http.post(URL, json=BODY, headers={"origin": host.url}).status_code == 200
        ws = host.url.replace("http", "ws") + "/v1/graphs/kitchen/stream"
        with pytest.raises(InvalidStatus), connect(ws, origin="https://app.example.org"):  # type: ignore[arg-type]
            pass
        with connect(ws, origin=host.url):  # type: ignore[arg-type]
            pass
    named = Settings(cors_origins=("https://app.example.org",))
    with hosted(kitchen(), settings=named) as host, host.client() as http:
        found = http.get("/v1/models", headers=origin)
        assert found.headers["access-control-allow-origin"] == "https://app.example.org"
        ask = http.options("/v1/models", headers={**origin, "access-control-request-method": "POST"})
        assert ask.status_code == 204
        other = http.get("/v1/models", headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers


def test_a_body_that_is_too_large_is_refused_said_or_not() -> None:
    with hosted(kitchen(), settings=Settings(max_body_bytes=1000)) as host, host.client() as http:
        large = {"inputs": {"text": "a" * 2000}}
        answer = http.post(URL, json=large)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")

        def parts():  # type: ignore[no-untyped-def]
            for _ in range(50):
                yield b'{"inputs": "' + b"a" * 100

        unsaid = http.post(URL, content=parts(), headers={"content-type": "application/json"})
        assert unsaid.status_code == 413
        assert http.post(URL, json=BODY).status_code == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /v1/graphs/kitchen/requests HTTP/1.1\r\nHost: a\r\nX-Slow: ",
        b"POST /v1/graphs/kitchen/requests HTTP/1.1\r\nHost: a\r\nContent-Length: 50\r\n\r\n{",
    ],
)
def test_a_client_that_dawdles_is_cut_off(sent: bytes) -> None:
    with hosted(kitchen(), settings=Settings(header_s=1.0, body_s=1.0)) as host:
        with socket.create_connection(("127.0.0.1", int(host.url.rpartition(":")[2])), WAIT_S) as slow:
            slow.sendall(sent)
            with contextlib.suppress(ConnectionResetError):
                assert slow.recv(100) == b""
        with host.client() as http:
            assert http.post(URL, json=BODY).status_code == 200


def test_connections_above_the_limit_are_told_so() -> None:
    with hosted(kitchen(), settings=Settings(max_connections=2)) as host:
        open_ones = [
            socket.create_connection(("127.0.0.1", int(host.url.rpartition(":")[2])), WAIT_S) for _ in range(3)
        ]
        answer = open_ones[2].recv(4096)
        assert answer.startswith(b"HTTP/1.1 503 Service Unavailable")
        assert b"too_many_connections" in answer
        for one in open_ones:
            one.close()
        with host.client() as http:
            asked_until(200, lambda: http.get("/health/live"))


def test_overload_is_refused_and_the_server_stays_up(host: Host) -> None:
    from omni_flow import Limits

    serving = Serving(graphs.kitchen(), (), {"limits": Limits(max_requests=2)})
    with hosted(serving) as small, small.client() as http:
        waiting = [small.client() for _ in range(2)]
        streams = [w.stream("POST", URL, json={"inputs": {"text": "wait"}, "stream": True}) for w in waiting]
        lines = [s.__enter__().iter_lines() for s in streams]
        for line in lines:
            next(line)
        refused: httpx.Response = http.post(URL, json=BODY)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        for stream, client in zip(streams, waiting, strict=True):
            stream.__exit__(None, None, None)
            client.close()
        small.idle()
        assert http.post(URL, json=BODY).status_code == 200
