"""What a caller is told whose engine is full, or dies under the answer; an answer that may be retried is whole."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import httpx
import pytest

from . import conftest
from .conftest import asked_until, hosted
from .talk import WAIT_S, talk
from .test_command import children, wait_end

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
LONG = 2000
"""Tokens of an answer that is still being made while a test does something."""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "WAIT_S", WAIT_S)


def body(**more: Any) -> dict[str, Any]:
    return {"model": "talk", "messages": [{"role": "user", "content": "Hello?"}], "max_tokens": 4, **more}


def ask(http: httpx.Client, **more: Any) -> httpx.Response:
    return http.post("/v1/chat/completions", json=body(**more))


def texts(lines: Iterable[str]) -> Iterator[str]:
    """The pieces of a streamed answer, to its end."""
    for line in lines:
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            yield json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
    raise AssertionError("the stream has no end")


def begun(lines: Iterator[str]) -> str:
    """What a streamed answer begins with."""
    return next(text for text in texts(lines) if text)


def first_done(asked: list[Future[httpx.Response]]) -> httpx.Response:
    """Takes out the call that is answered first."""
    done = next(as_completed(asked, WAIT_S))
    asked.remove(done)
    return done.result()


def engine_under(pid: int) -> int:
    """The process id of the engine that a process has started."""
    (engine,) = [each for each in children(pid) if b"sglang.worker" in Path(f"/proc/{each}/cmdline").read_bytes()]
    return engine


def role_of(http: httpx.Client) -> int:
    """The process id of the role."""
    return int(http.get("/health").json()["graphs"]["talk"]["llm"]["replicas"][0]["pid"])


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    wait_end(pid)


def test_a_request_that_finds_the_queue_full_is_a_429_and_those_before_it_are_answered(tmp_path: Path) -> None:
    few = {"max_running": 1, "max_waiting": 1}
    with hosted(talk(tmp_path, engine=few)) as host, host.client() as http, ThreadPoolExecutor() as pool:
        alone = ask(http).json()["choices"][0]["message"]["content"]
        with http.stream("POST", "/v1/chat/completions", json=body(max_tokens=LONG, stream=True)) as first:
            lines = first.iter_lines()  # to be kept: without it httpx leaves
            begun(lines)
            asked = [pool.submit(ask, http, stream=stream) for stream in (False, True, False, True)]
            refused = [first_done(asked) for _ in range(3)]
            (left,) = asked
            assert not left.done()
        for answer in refused:
            assert answer.status_code == 429, answer.text
            assert answer.headers["retry-after"] == "1"
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
            assert error["message"].startswith("1 requests wait, the limit")
        assert left.result().status_code == 200
        assert ask(http).json()["choices"][0]["message"]["content"] == alone


def test_an_engine_that_dies_under_an_answer_is_a_503_or_ends_its_stream_and_is_replaced(tmp_path: Path) -> None:
    with hosted(talk(tmp_path)) as host, host.client() as http, ThreadPoolExecutor() as pool:
        whole = pool.submit(ask, http, max_tokens=LONG)
        while not any("text" in request["first"] for request in http.get("/v1/requests").json()["data"]):
            assert not whole.done()
        with http.stream("POST", "/v1/chat/completions", json=body(max_tokens=LONG, stream=True)) as streamed:
            lines = streamed.iter_lines()
            begun(lines)
            kill(engine_under(os.getpid()))
            rest = list(lines)
        at = rest.index("event: error")
        errors = [json.loads(rest[at + 1].removeprefix("data: "))["error"], whole.result().json()["error"]]
        assert [(error["type"], error["code"]) for error in errors] == [("server_error", "engine_died")] * 2
        assert all("the engine process ended" in error["message"] for error in errors)
        assert whole.result().status_code == 503
        assert whole.result().headers["retry-after"] == "1"
        assert asked_until(200, lambda: ask(http), WAIT_S).json()["usage"]["completion_tokens"] == 4


def test_an_answer_that_may_be_retried_is_whole_and_the_same_whoever_dies_under_it(tmp_path: Path) -> None:
    with hosted(talk(tmp_path, retries=1), processes=True) as host, host.client() as http:
        alone = ask(http, max_tokens=LONG).json()
        role = role_of(http)
        for victim in ("engine", "role"):
            with http.stream("POST", "/v1/chat/completions", json=body(max_tokens=LONG, stream=True)) as streamed:
                lines = streamed.iter_lines()
                said = begun(lines)
                kill(role if victim == "role" else engine_under(role))
                said += "".join(texts(lines))
            assert said == alone["choices"][0]["message"]["content"]
            assert (role_of(http) == role) == (victim == "engine")
