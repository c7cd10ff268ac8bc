"""Sessions end: closed by their caller, idle, or too many; roles then let go of what they keep for them."""

from __future__ import annotations

from omni_flow import Context, Graph, Text
from omni_flow.serve.keys import Key, digest_of
from omni_flow.serve.server import Serving
from omni_flow.serve.sessions import Sessions

from .conftest import hosted
from .test_access import bearer


class Memory:
    """Counts the turns of each session."""

    def __init__(self) -> None:
        self.turns: dict[tuple[str, str], int] = {}

    async def count(self, ctx: Context, text: str) -> list[int]:
        assert ctx.session is not None
        key = (ctx.tenant, ctx.session)
        self.turns[key] = self.turns.get(key, 0) + 1
        return [self.turns[key], len(self.turns)]

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

        def turn(who: str) -> list[int]:
            body = {"inputs": {"text": "x"}, "session": "s"}
            answer = http.post("/v1/graphs/memory/requests", json=body, headers=bearer(f"{who}-secret"))
            counted: list[int] = answer.json()["outputs"]["counted"]
            return counted

        assert [turn("a"), turn("a"), turn("b")] == [[1, 1], [2, 1], [1, 2]]
        assert http.delete("/v1/sessions/s", headers=bearer("a-secret")).json()["closed"] is True
        assert [turn("b"), turn("a")] == [[2, 1], [1, 2]]


def test_sessions_that_are_forgotten_are_over() -> None:
    now = 0.0
    over: list[str] = []
    sessions = Sessions(2, 10.0, lambda: now)
    sessions.on_over = lambda state: over.append(state.id)
    for name in "abc":
        sessions.of("", name)
    assert over == ["a"]
    now = 11.0
    sessions.of("", "d")
    assert over == ["a", "b", "c"]
