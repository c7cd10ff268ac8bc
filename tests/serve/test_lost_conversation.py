"""What a session over HTTP sees of what it has said, when its engine is killed and when its role is."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from omni_flow import Graph, Json, Text, stream
from omni_flow.models.deepseek_v2.role import DeepseekV2
from omni_flow.serve.endpoints import ChatCompletions
from omni_flow.serve.server import Serving
from omni_flow.testing import tiny_checkpoint

from . import conftest
from .test_command import children, wait_end

WAIT_S = 240.0
"""An engine takes a while to start where other tests run."""


def ask(http: httpx.Client, question: str, **more: str) -> httpx.Response:
    body = {"model": "talk", "messages": [{"role": "user", "content": question}], **more}
    return http.post("/v1/chat/completions", json=body)


def replica(http: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = http.get("/health").json()["graphs"]["talk"]["llm"]["replicas"][0]
    return found


def kill(http: httpx.Client, pid: int) -> None:
    """Kill a process of the role, and wait until the role answers again."""
    os.kill(pid, signal.SIGKILL)
    wait_end(pid)
    while ask(http, "Hello?").status_code != 200:
        time.sleep(0.1)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_conversation_outlives_its_engine_and_one_that_died_with_its_role_is_refused_as_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conftest, "WAIT_S", WAIT_S)
    graph = Graph("talk")
    prompt = graph.placeholder("prompt", Text, required=True)
    init = {"model": str(tiny_checkpoint("deepseek_v2", tmp_path)), "sampling": {"max_tokens": 8, "ignore_eos": True}}
    said = graph.role("llm", DeepseekV2, init=init, stateful=True, balance="session").interface(
        "reply",
        inputs=[[{"question": prompt}]],
        outputs=[stream("token", Text), stream("logprobs", Json), {"usage": Json, "finish": Text}],
    )
    graph.output(text=said.token, usage=said.usage)
    endpoint = ChatCompletions(text="prompt", out_text="text", out_usage="usage")
    with conftest.hosted(Serving(graph, (endpoint,)), processes=True) as host, host.client() as http:

        def tokens(question: str) -> int:
            answer = ask(http, question, session="s")
            assert answer.status_code == 200, answer.text
            found: int = answer.json()["usage"]["prompt_tokens"]
            return found

        first = tokens("My name is Ada.")
        role = replica(http)["pid"]
        (engine,) = [pid for pid in children(role) if b"sglang.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        kill(http, engine)
        assert replica(http)["pid"] == role
        second = tokens("What is it?")
        assert second > first + 8
        kill(http, role)
        assert replica(http)["pid"] != role
        for _ in range(2):
            lost = ask(http, "And now?", session="s")
            assert (lost.status_code, lost.json()["error"]["code"]) == (409, "conversation_lost")
            assert "has had 2 answers, this replica knows of 0" in lost.json()["error"]["message"]
        # closed, its name begins anew
        http.delete("/v1/sessions/s")
        assert tokens("My name is Ada.") == first
