"""Sessions end: closed by their caller, idle, or too many; roles then let go of what they keep for them."""

from __future__ import annotations

import os
import time
from typing import Any

from websockets.sync.client import ClientConnection

from omni_flow import Context, Graph, Text
from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.pool_spec import PoolSpec
from omni_flow.data.session_leases import lease_name
from omni_flow.deploy.memory import Memory as Arenas
from omni_flow.serve.endpoints import Realtime
from omni_flow.serve.keys import Key, digest_of
from omni_flow.serve.server import Serving
from omni_flow.serve.sessions import Sessions
from omni_flow.serve.settings import Settings

from .conftest import Host, hosted
from .test_access import bearer
from .test_sockets import send, socket, until


class Memory:
    """Counts the turns of each session."""

    def __init__(self) -> None:
        self.turns: dict[tuple[str, str], int] = {}

    async def count(self, ctx: Context, text: str) -> str:
        assert ctx.session is not None
        key = (ctx.tenant, ctx.session)
        self.turns[key] = self.turns.get(key, 0) + 1
        return f"turn {self.turns[key]}, sessions {len(self.turns)}"

    async def end_session(self, session: str, tenant: str) -> None:
        del self.turns[tenant, session]


def memory() -> Graph:
    graph = Graph("memory")
    text = graph.placeholder("text", Text)
    counted = graph.role("memory", Memory).interface("count", inputs=[[text]], outputs=["counted"])
    graph.output(counted=counted.counted)
    return graph


def test_a_role_is_told_of_the_session_that_its_caller_closes_and_of_no_other() -> None:
    keys = [Key("a", digest_of("a-secret")), Key("b", digest_of("b-secret"))]
    with hosted(Serving(memory()), keys=keys) as host, host.client() as http:

        def turn(who: str) -> str:
            body = {"inputs": {"text": "x"}, "session": "s"}
            answer = http.post("/v1/graphs/memory/requests", json=body, headers=bearer(f"{who}-secret"))
            counted: str = answer.json()["outputs"]["counted"]
            return counted

        assert [turn("a"), turn("a"), turn("b")] == ["turn 1, sessions 1", "turn 2, sessions 1", "turn 1, sessions 2"]
        assert http.delete("/v1/sessions/s", headers=bearer("a-secret")).json()["closed"] is True
        assert [turn("b"), turn("a")] == ["turn 2, sessions 1", "turn 1, sessions 2"]


def test_the_turns_of_a_realtime_connection_are_one_session_that_ends_with_it() -> None:
    served = Serving(memory(), (Realtime(text="text", out_text="counted"),))
    with hosted(served) as host:

        def turn(ws: ClientConnection) -> str:
            content = [{"type": "input_text", "text": "x"}]
            send(ws, type="conversation.item.create", item={"type": "message", "role": "user", "content": content})
            send(ws, type="response.create")
            [done] = [m for m in until(ws, "response.done") if m["type"] == "response.output_text.done"]
            counted: str = done["text"]
            return counted

        for _ in range(2):
            with socket(host, "/v1/realtime?model=memory") as ws:
                assert [turn(ws), turn(ws)] == ["turn 1, sessions 1", "turn 2, sessions 1"]
            until_closed(host)
        with socket(host, "/v1/realtime?model=memory"):
            pass


def until_closed(host: Host) -> None:
    """Wait until the server has noticed that its last connection is gone."""
    with host.client() as http:
        while http.get("/v1/sessions").json()["data"]:
            pass


class Keeper:
    """Keeps a page of 64 bytes, 16 tokens, for each turn of a session."""

    def __init__(self) -> None:
        self.keys: list[bytes] = []

    def setup(self, data: Any) -> None:
        self.client = MemoryManagerClient(data.address, name="keeper")

    def keep(self, ctx: Context, text: str) -> int:
        assert ctx.session is not None
        self.keys.append(os.urandom(32))
        self.client.commit("kv", self.client.reserve("kv", 1).token, self.keys[-1:])
        name = lease_name(ctx.session, ctx.tenant)
        self.client.keep_session("kv", name, b"root", self.keys, tokens=16, ttl=60)
        return len(self.keys)

    def end_session(self, session: str, tenant: str) -> None:
        self.client.end_session(lease_name(session, tenant))


def test_a_session_says_what_kv_it_has_in_each_tier_to_its_caller_alone() -> None:
    graph = Graph("keeper")
    text = graph.placeholder("text", Text)
    graph.output(n=graph.role("keeper", Keeper).interface("keep", inputs=[[text]], outputs=["n"]).n)
    arenas = Arenas(pools=(PoolSpec(name="kv", page_bytes=64, l1_pages=16),))
    keys = [Key("a", digest_of("a-secret")), Key("b", digest_of("b-secret"))]
    serving = Serving(graph, (), {"memory": arenas})
    with hosted(serving, keys=keys, processes=True) as host, host.client(headers=bearer("a-secret")) as http:
        body = {"inputs": {"text": "x"}, "session": "s"}
        for _ in range(3):
            assert http.post("/v1/graphs/keeper/requests", json=body).status_code == 200
        session = http.get("/v1/sessions/s").json()
        has, none = {"tokens": 48, "bytes": 192}, {"tokens": 0, "bytes": 0}
        assert (session["turns"], session["kv"]) == (3, {"kept": has, "l1": has, "l2": none, "l3": none})
        assert http.get("/v1/sessions/s", headers=bearer("b-secret")).status_code == 404
        assert http.delete("/v1/sessions/s").json()["closed"] is True
        with MemoryManagerClient(host.server.deployments[0].launcher.memory.address, role="viewer") as client:
            while client.stats()["pool_objects/kv"]:
                client.wait_end(0.01)
            assert client.stats()["pool_session_leases/kv"] == 0


def test_without_a_memory_manager_a_session_has_no_kv() -> None:
    with hosted(Serving(memory())) as host, host.client() as http:
        http.post("/v1/graphs/memory/requests", json={"inputs": {"text": "x"}, "session": "s"})
        assert http.get("/v1/sessions/s").json()["kv"] is None


def test_a_refused_request_makes_no_session() -> None:
    with hosted(Serving(memory())) as host, host.client() as http:

        def ask(params: dict[str, int]) -> list[str]:
            http.post("/v1/graphs/memory/requests", json={"inputs": {"text": "x"}, "params": params, "session": "s"})
            return [session["id"] for session in http.get("/v1/sessions").json()["data"]]

        assert ask({"nope": 1}) == []
        assert ask({}) == ["s"]
        assert ask({"nope": 1}) == ["s"]


def test_sessions_that_are_forgotten_are_over() -> None:
    now = 0.0
    over: list[str] = []
    sessions = Sessions(2, 10.0, lambda: now)
    sessions.on_over = lambda state: over.append(state.id)
    for name in "abc":
        sessions.of("", name)
    assert over == ["a"]
    sessions.of("", "b").begin("")
    now = 11.0
    sessions.expire()
    assert over == ["a", "c"]
    sessions.of("", "b").end()
    sessions.expire()
    assert over == ["a", "c"]
    now = 22.0
    sessions.expire()
    assert over == ["a", "c", "b"]


def test_who_opens_many_sessions_costs_nobody_else_one() -> None:
    sessions = Sessions(most=4, idle_s=1000)
    sessions.of("few", "a")
    for number in range(20):
        sessions.of("many", str(number))
    assert len(sessions) == 4
    assert [state.id for state in sessions.list("few")] == ["a"]
    assert [state.id for state in sessions.list("many")] == ["17", "18", "19"]
    for state in (*sessions.list("few"), *sessions.list("many")):
        state.begin("")
    sessions.of("more", "b")
    assert len(sessions) == 5


def test_a_session_that_nobody_uses_ends_by_itself() -> None:
    with hosted(Serving(memory()), settings=Settings(session_idle_s=0.01)) as host, host.client() as http:
        http.post("/v1/graphs/memory/requests", json={"inputs": {"text": "x"}, "session": "s"})
        while http.get("/v1/sessions/s").status_code == 200:
            time.sleep(0.05)
        answer = http.post("/v1/graphs/memory/requests", json={"inputs": {"text": "x"}, "session": "t"})
        assert answer.json()["outputs"]["counted"] == "turn 1, sessions 1"
