"""Servers with small real graphs on a free port of the loopback, run by an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import base64
import io
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile
import uvloop
from numpy.typing import NDArray
from PIL import Image

from omni_flow.serve.endpoints import (
    ChatCompletions,
    Completions,
    Images,
    Realtime,
    Speech,
    Transcriptions,
)
from omni_flow.serve.keys import Key
from omni_flow.serve.server import Server, Serving
from omni_flow.serve.settings import Settings

from . import graphs

WAIT_S = 20.0
RESTART_S = 60.0


def asked_until(status: int, ask: Callable[[], httpx.Response], within_s: float = RESTART_S) -> httpx.Response:
    """The first answer with that status. Long enough for a replica to start on a machine with other work."""
    end = time.monotonic() + within_s
    while (answer := ask()).status_code != status:
        assert time.monotonic() < end, f"still {answer.status_code} {answer.text:.300}"
    return answer


class Host:
    """A server that runs until the test ends; `do` runs a coroutine on its loop."""

    def __init__(self, serving: Sequence[Serving], settings: Settings | None, keys: Iterable[Key]) -> None:
        self.server = Server(serving, settings, keys)
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.do(self.server.__aenter__())
        self.url = self.server.url

    def do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    def call(self, function: Callable[[], Any]) -> Any:
        async def run() -> Any:
            return function()

        return self.do(run())

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=WAIT_S, **options)

    def openai(self, key: str = "none", **options: Any) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1",
            websocket_base_url=f"{self.url.replace('http', 'ws')}/v1",
            api_key=key,
            max_retries=0,
            timeout=WAIT_S,
            **options,
        )

    def live(self) -> int:
        """Requests that some gateway has."""
        return self.call(lambda: sum(len(d.gateway.live) for d in self.server.deployments))

    def idle(self) -> None:
        """Wait until no request is live and no replica holds anything."""

        async def busy() -> bool:
            for deployment in self.server.deployments:
                census = await deployment.census()
                if deployment.gateway.live or any(any(held.values()) for held in census.values()):
                    return True
            return False

        async def wait() -> None:
            async with asyncio.timeout(WAIT_S):
                while await busy():  # noqa: ASYNC110 - asking takes its time
                    await asyncio.sleep(0)

        self.do(wait())

    def close(self) -> None:
        try:
            self.do(self.server.__aexit__(None, None, None))
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(WAIT_S)
            self._loop.close()


@contextmanager
def hosted(
    *serving: Serving, settings: Settings | None = None, keys: Iterable[Key] = (), processes: bool = False
) -> Iterator[Host]:
    """A server of graphs, all in this process unless `processes`; at its end nothing may be live."""
    each = [Serving(s.graph, s.endpoints, {"processes": processes, **s.options}) for s in serving]
    host = Host(each, settings, keys)
    try:
        yield host
        host.idle()
    finally:
        host.close()


def all_graphs() -> list[Serving]:
    """Every small graph with every endpoint it can serve."""
    return [
        Serving(
            graphs.chat(),
            (
                ChatCompletions(text="text", image="picture", audio="sound", out_text="answer", out_audio="speech"),
                Completions(prompt="text", out_text="answer"),
            ),
        ),
        Serving(graphs.voice(), (Speech(text="text", out_audio="speech", voices=("low",), ignores=("speed",)),)),
        Serving(graphs.ear(), (Transcriptions(audio="sound", out_text="heard"),)),
        Serving(
            graphs.painter(),
            (
                Images(
                    prompt="prompt",
                    image="picture",
                    width="width",
                    height="height",
                    out_image="picture",
                    out_partial="partial",
                ),
            ),
        ),
        Serving(
            graphs.tools(),
            (
                ChatCompletions(
                    messages="messages",
                    fields={
                        "tools": "tools",
                        "response_format": "schema",
                        "temperature": "temperature",
                        "max_tokens": "limit",
                        "stop": "stop",
                    },
                    ignores=("tool_choice",),
                    out_text="text",
                    out_tool_calls="calls",
                    out_logprobs="logprobs",
                    out_finish="finish",
                ),
            ),
        ),
        Serving(
            graphs.forms(),
            (
                ChatCompletions(
                    text="text",
                    json_schema="schema",
                    top_logprobs="top",
                    out_text="text",
                    out_logprobs="logprobs",
                    out_usage="usage",
                ),
            ),
        ),
        Serving(graphs.kitchen(), (ChatCompletions(text="text", out_text="dish", fields={"temperature": "heat"}),)),
        Serving(
            graphs.microphone(),
            (Realtime(audio="sound", out_audio="speech", out_text="answer", out_heard="heard"),),
        ),
        Serving(graphs.listener(), (Realtime(model="slow", audio="sound", text="text", out_text="answer"),)),
    ]


@pytest.fixture(scope="session")
def host() -> Iterator[Host]:
    """One server with all small graphs."""
    with hosted(*all_graphs()) as running:
        yield running


@pytest.fixture
def http(host: Host) -> Iterator[httpx.Client]:
    with host.client() as client:
        yield client


@pytest.fixture
def ai(host: Host) -> openai.OpenAI:
    return host.openai()


def png(colour: tuple[int, int, int] = (200, 30, 30), size: tuple[int, int] = (32, 16)) -> bytes:
    """A picture of one colour."""
    out = io.BytesIO()
    Image.new("RGB", size, colour).save(out, "PNG")
    return out.getvalue()


def wav(seconds: float = 0.5, rate: int = 16_000) -> bytes:
    """A tone as a WAV file."""
    out = io.BytesIO()
    soundfile.write(out, tone(seconds, rate), rate, format="WAV", subtype="PCM_16")
    return out.getvalue()


def tone(seconds: float = 0.5, rate: int = 16_000) -> NDArray[np.float32]:
    return (0.3 * np.sin(2 * np.pi * 440 * np.arange(int(seconds * rate)) / rate)).astype(np.float32)


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{b64(data)}"


def sound(data: bytes) -> tuple[NDArray[np.float32], int]:
    """The samples and rate of a sound file."""
    samples, rate = soundfile.read(io.BytesIO(data), dtype="float32")
    return samples, rate
