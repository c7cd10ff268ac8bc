"""Health, metrics, the live feed, spans, log lines."""

from __future__ import annotations

import json
import logging
import os
import signal
from pathlib import Path

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from omni_flow import Graph, Text
from omni_flow.data.pool_spec import PoolSpec
from omni_flow.deploy.memory import Memory
from omni_flow.serve.logs import JsonLines
from omni_flow.serve.metrics import Histogram
from omni_flow.serve.server import Serving
from omni_flow.serve.tracing import Tracing

from . import graphs
from .conftest import asked_until, hosted


def samples(http: httpx.Client) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    found = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            found[sample.name, frozenset(sample.labels.items())] = sample.value
    return found


def test_health_says_every_role_and_replica(http: httpx.Client) -> None:
    assert http.get("/health/live").json() == {"status": "live"}
    assert http.get("/health/ready").status_code == 200
    health = http.get("/health").json()
    assert health["status"] == "up"
    assert [r["state"] for r in health["graphs"]["chat"]["voice"]["replicas"]] == ["up"]


def test_a_dead_role_is_never_healthy_and_its_cause_is_said(tmp_path: Path) -> None:
    flag = tmp_path / "held"
    with hosted(Serving(graphs.held(str(flag))), processes=True) as host, host.client() as http:
        flag.touch()
        os.kill(http.get("/health").json()["graphs"]["held"]["r"]["replicas"][0]["pid"], signal.SIGKILL)
        health = asked_until(503, lambda: http.get("/health"))
        assert health.json()["status"] == "starting"
        assert "SIGKILL" in health.json()["graphs"]["held"]["r"]["replicas"][0]["cause"]
        assert http.get("/health/ready").status_code == 503
        answer = http.post("/v1/graphs/held/requests", json={"inputs": {"text": "a"}})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
        assert "retry-after" in answer.headers
        flag.unlink()
        again = asked_until(200, lambda: http.get("/health/ready"))
        assert again.json() == {"status": "ready"}


def test_metrics_count_requests_activations_and_edges() -> None:
    with hosted(Serving(graphs.chat())) as host, host.client() as http:
        body = {"inputs": {"text": "a b c"}, "stream": True}
        for _ in range(2):
            http.post("/v1/graphs/chat/requests", json=body)
        found = samples(http)

        def value(name: str, **labels: str) -> float:
            return found[name, frozenset(labels.items())]

        assert value("omni_flow_requests_total", graph="chat", endpoint="graph", outcome="done") == 2
        assert value("omni_flow_http_requests_total", route="/v1/graphs/{graph}/requests", status="200") == 2
        assert value("omni_flow_first_text_seconds_count", graph="chat", endpoint="graph") == 2
        assert value("omni_flow_first_audio_seconds_count", graph="chat", endpoint="graph") == 2
        assert value("omni_flow_output_frames_total", graph="chat", output="answer") == 6
        assert value("omni_flow_activations_total", graph="chat", interface="voice.speak") == 6
        assert value("omni_flow_queue_seconds_count", graph="chat", interface="llm.say") == 2
        edge = {"graph": "chat", "source": "llm.say", "field": "llm.say.word", "reader": "voice.speak"}
        assert value("omni_flow_edge_seconds_count", **edge) == 6
        assert value("omni_flow_replica_nodes", graph="chat", role="llm", replica="llm/0") == 0
        assert value("omni_flow_replica_state", graph="chat", role="llm", replica="llm/0", state="up") == 1
        live = http.get("/v1/live", params={"once": "true"}).json()
        rates = {(e["source"], e["reader"], e["field"]): e["per_s"] for e in live["graphs"][0]["edges"]}
        assert rates["llm.say", "voice.speak", "llm.say.word"] == 0.6
        assert rates["llm.say", "client", "llm.say.word"] == 0.6
        assert rates["client", "llm.say", "picture"] == 0


def test_the_live_feed_is_a_stream_of_snapshots(http: httpx.Client) -> None:
    with http.stream("GET", "/v1/live") as feed:
        line = next(feed.iter_lines())
    snapshot = json.loads(line.removeprefix("data: "))
    assert {g["name"] for g in snapshot["graphs"]} >= {"chat", "ear"}
    assert snapshot["status"] == "up"


def test_the_tiers_of_the_memory_manager_are_seen() -> None:
    pool = PoolSpec(name="kv", page_bytes=65_536, l1_pages=16, l2_pages=32)
    serving = Serving(graphs.chat(), (), {"memory": Memory(pools=(pool,))})
    with hosted(serving, processes=True) as host, host.client() as http:
        memory = http.get("/v1/live", params={"once": "true"}).json()["graphs"][0]["memory"]
        assert [(t["name"], t["used"], t["total"]) for t in memory["tiers"][:2]] == [("kv L1", 0, 16), ("kv L2", 0, 32)]
        found = samples(http)
        assert found["omni_flow_memory_up", frozenset({("graph", "chat"), ("part", "")})] == 1
        assert found["omni_flow_memory_pool_hits_l1", frozenset({("graph", "chat"), ("part", "kv")})] == 0


class Counting:
    """A role that says what it has counted."""

    def __init__(self) -> None:
        self._calls = 0

    async def run(self, text: str) -> str:
        self._calls += 1
        return text

    def counters(self) -> dict[str, float]:
        return {
            "kv_hit_tokens/l2": 3 * self._calls,
            "prompt_tokens": 4 * self._calls,
            "calls": self._calls,
            "odd-one": 1.5,
        }


@pytest.mark.parametrize("processes", [False, True])
def test_what_roles_count_is_in_the_metrics_and_on_the_page(processes: bool) -> None:
    graph = Graph("counting")
    text = graph.placeholder("text", Text, required=True)
    graph.output(y=graph.role("llm", Counting).interface("run", inputs=[[text]], outputs=["y"]).y)
    memory = Memory(pools=(PoolSpec(name="kv", page_bytes=64, l1_pages=16),))
    with hosted(Serving(graph, (), {"memory": memory}), processes=processes) as host, host.client() as http:
        for _ in range(2):
            http.post("/v1/graphs/counting/requests", json={"inputs": {"text": "a"}})
        found = samples(http)
        place = {"graph": "counting", "role": "llm", "replica": "llm/0"}
        assert found["omni_flow_kv_hit_tokens_total", frozenset({**place, "tier": "l2"}.items())] == 6
        assert found["omni_flow_prompt_tokens_total", frozenset(place.items())] == 8
        assert found["omni_flow_role_calls_total", frozenset({**place, "part": ""}.items())] == 2
        assert not [name for name, _ in found if "odd" in name]
        (seen,) = http.get("/v1/live", params={"once": "true"}).json()["graphs"]
        assert seen["roles"][0]["replicas"][0]["counters"]["calls"] == 2
        assert not processes or seen["memory"]["tokens"] == {"l2": 6, "prompt_tokens": 8}


def test_a_histogram_counts_by_bucket() -> None:
    one = Histogram()
    for value in (0.0001, 0.003, 0.003, 1000.0):
        one.observe(value)
    assert (one.number, one.quantile(0.5), one.counts[0], one.counts[-1]) == (4, 0.005, 1, 1)


def test_each_activation_is_a_span_below_its_request() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with hosted(Serving(graphs.chat()), processes=True) as host, host.client() as http:
        host.server.state.book.on_end.append(Tracing(provider))
        parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        http.post(
            "/v1/graphs/chat/requests",
            json={"inputs": {"text": "a b"}, "timeline": True},
            headers={"traceparent": parent},
        )
    spans = exporter.get_finished_spans()
    (root,) = [s for s in spans if s.name == "chat graph"]
    assert root.parent is not None
    assert f"{root.parent.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    below = [s for s in spans if s.parent is not None and s.parent.span_id == root.context.span_id]
    assert sorted(s.name for s in below) == ["llm.say", "voice.speak", "voice.speak"]


def test_a_call_has_an_id_in_its_answer_and_its_log_line(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "omni_flow.serve"):
        answer = http.get("/v1/models", headers={"x-request-id": "my-id-7"})
        assert answer.headers["x-request-id"] == "my-id-7"
        assert http.get("/v1/models", headers={"x-request-id": "bad id"}).headers["x-request-id"].startswith("req_")
    (record,) = [r for r in caplog.records if getattr(r, "request", "") == "my-id-7"]
    line = json.loads(JsonLines().format(record))
    assert (line["request"], line["status"], line["message"]) == ("my-id-7", 200, "GET /v1/models 200")
