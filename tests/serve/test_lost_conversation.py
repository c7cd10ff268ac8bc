"""What a session over HTTP sees of what it has said, when its engine is killed and when its role is."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from . import conftest
from .talk import WAIT_S, talk
from .test_command import children, wait_end


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
    conftest.asked_until(200, lambda: ask(http, "Hello?"), WAIT_S)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_conversation_outlives_its_engine_and_one_that_died_with_its_role_is_refused_as_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conftest, "WAIT_S", WAIT_S)
    with (
        conftest.hosted(talk(tmp_path, stateful=True, balance="session"), processes=True) as host,
        host.client() as http,
    ):

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
