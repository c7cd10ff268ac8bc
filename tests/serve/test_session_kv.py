"""The KV of a session over HTTP, with a real engine: found by the next turn, counted by tier, gone when closed."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from . import conftest
from .talk import WAIT_S, talk


def test_a_session_has_kv_between_its_turns_and_none_when_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conftest, "WAIT_S", WAIT_S)
    with conftest.hosted(talk(tmp_path), processes=True) as host, host.client() as http:

        def turn(question: str) -> dict[str, int]:
            body = {"model": "talk", "messages": [{"role": "user", "content": question}], "session": "s"}
            answer = http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
            return {"prompt": usage["prompt_tokens"], "cached": usage["prompt_tokens_details"]["cached_tokens"]}

        first = turn("a question of some length, so that it fills several pages of KV")
        assert first["cached"] == 0
        held = session(http)["kv"]
        assert held["l1"] == held["kept"]
        assert first["prompt"] - 16 < held["l1"]["tokens"] <= first["prompt"] + 8
        second = turn("and another one")
        assert second["cached"] == held["l1"]["tokens"]
        assert session(http)["turns"] == 2
        assert session(http)["kv"]["l1"]["tokens"] > held["l1"]["tokens"]
        found = {s.name: s.value for f in text_string_to_metric_families(http.get("/metrics").text) for s in f.samples
                 if s.labels.get("tier") == "l1" or s.name == "omni_flow_prompt_tokens_total"}  # fmt: skip
        assert found["omni_flow_kv_hit_tokens_total"] == second["cached"]
        assert found["omni_flow_prompt_tokens_total"] == first["prompt"] + second["prompt"]
        assert http.delete("/v1/sessions/s").json()["closed"] is True
        # a new session of that name knows nothing, and finds nothing
        assert turn("a question of some length, so that it fills several pages of KV") == first


def session(http: httpx.Client) -> dict[str, dict[str, dict[str, int]]]:
    """What the server says of the session."""
    said: dict[str, dict[str, dict[str, int]]] = http.get("/v1/sessions/s").json()
    return said
