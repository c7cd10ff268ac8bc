"""Callers that leave at any moment, read slowly or come ten at a time, and replicas that die under them."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from omni_flow import Graph, Limits, Text
from omni_flow.serve.endpoints import ChatCompletions
from omni_flow.serve.server import Serving

from . import graphs
from .conftest import WAIT_S, Host, asked_until, hosted


@pytest.fixture(scope="module")
def site() -> Iterator[Host]:
    limits = {"limits": Limits(max_requests=32)}
    chat = ChatCompletions(text="text", out_text="answer", out_audio="speech")
    with hosted(
        Serving(graphs.chat(0.002), (chat,), limits), Serving(graphs.flood(), (), limits), processes=True
    ) as host:
        yield host


def address(host: Host) -> tuple[str, int]:
    return "127.0.0.1", int(host.url.rpartition(":")[2])


def raw(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def test_ten_times_the_load_is_answered_or_refused_and_nothing_hangs(site: Host) -> None:
    async def body() -> Counter[int]:
        limits = httpx.Limits(max_connections=320)
        async with httpx.AsyncClient(base_url=site.url, limits=limits, timeout=WAIT_S) as http:
            sent = {"inputs": {"text": "a b c"}}
            answers = await asyncio.gather(*(http.post("/v1/graphs/chat/requests", json=sent) for _ in range(320)))
        for answer in answers:
            if answer.status_code == 429:
                assert answer.headers["retry-after"] == "1"
                assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        return Counter(answer.status_code for answer in answers)

    counts = asyncio.run(body())
    assert set(counts) <= {200, 429}
    assert counts[200] >= 32
    site.idle()


def test_a_caller_may_leave_at_any_moment(site: Host) -> None:
    rng = random.Random(7)
    body = b'{"model": "chat", "stream": true, "messages": [{"role": "user", "content": "a b c d e f g h"}]}'
    whole = raw("/v1/chat/completions", body)
    for _ in range(60):
        with socket.create_connection(address(site), WAIT_S) as caller:
            size = rng.randrange(len(whole)) if rng.random() < 0.4 else len(whole)
            caller.sendall(whole[:size])
            if rng.random() < 0.3:
                caller.shutdown(socket.SHUT_WR)
            elif size == len(whole) and rng.random() < 0.7:
                caller.recv(rng.randrange(1, 2000))
    site.idle()
    with site.client() as http:
        assert http.get("/health/ready").status_code == 200


def test_a_slow_reader_holds_the_graph_back_and_not_the_server(site: Host) -> None:
    """Frames are made only as they are read: what is on the way is bounded by credit and socket buffers."""

    def made() -> float:
        return site.call(lambda: site.server.state.metrics.frames.by.get(("flood", "water"), 0.0))

    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.settimeout(WAIT_S)
        reader.connect(address(site))
        reader.sendall(raw("/v1/graphs/flood/requests", b'{"inputs": {"text": "x"}, "stream": true}'))
        assert reader.recv(1000).startswith(b"HTTP/1.1 200")
        seen, same = -1.0, 0
        with site.client() as http:
            while same < 50:  # nobody reads, so it comes to a halt
                http.get("/health/live")
                now = made()
                same = same + 1 if now == seen and now > 0 else 0
                seen = now
                assert now * 10_000 < 64 * 2**20
        before = made()
        taken = 0
        while taken < 3_000_000:
            taken += len(reader.recv(65_536))
        assert made() > before
    site.idle()


def test_a_replica_that_dies_fails_its_requests_and_no_other(site: Host) -> None:
    with site.client() as http, site.client() as other:
        body: dict[str, Any] = {"inputs": {"text": "x"}, "stream": True}
        with http.stream("POST", "/v1/graphs/flood/requests", json=body) as answer:
            lines = answer.iter_lines()
            next(line for line in lines if line == "event: output")
            status = site.call(lambda: site.server.deployments[1].status())
            os.kill(status["hose"].replicas[0].pid, signal.SIGKILL)
            rest = [line for line in lines if not line.startswith('data: {"output"')]
        assert any('"outcome":"failed"' in line and "hose" in line for line in rest)
        assert other.post("/v1/graphs/chat/requests", json={"inputs": {"text": "a"}}).status_code == 200
        asked_until(200, lambda: other.post("/v1/graphs/flood/requests", json={**body, "deadline_s": 0.1}))
    site.idle()


class Ails:
    """Can't serve while a file is there."""

    def __init__(self, file: str) -> None:
        self._file = file

    async def run(self, x: str) -> str:
        return x

    def ails(self) -> str:
        return "its engine died" if os.path.exists(self._file) else ""


def test_a_role_whose_process_lives_but_cannot_serve_is_not_reported_as_healthy(tmp_path: Path) -> None:
    graph = Graph("ails")
    file = tmp_path / "ails"
    x = graph.placeholder("x", Text)
    graph.output(y=graph.role("r", Ails, init={"file": str(file)}).interface("run", inputs=[[x]], outputs=["y"]).y)
    with hosted(Serving(graph, (), {})) as host, httpx.Client(base_url=host.url, timeout=WAIT_S) as http:
        assert http.get("/health/ready").status_code == 200
        file.touch()
        assert http.get("/health/ready").status_code == 503
        answer = http.get("/health")
        assert answer.status_code == 503
        (replica,) = answer.json()["graphs"]["ails"]["r"]["replicas"]
        assert (replica["state"], replica["cause"]) == ("starting", "its engine died")
        file.unlink()
        assert http.get("/health").json()["status"] == "up"
