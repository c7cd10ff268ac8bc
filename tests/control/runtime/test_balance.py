"""Balancers as pure logic, above all `cache_aware`: the longest cached prefix against load."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import pytest

from omni_flow import Batch, Context, Graph, Text, cache_aware, weighted
from omni_flow.control.facts import Message
from omni_flow.control.lint.names import BALANCES
from omni_flow.control.runtime.balance import STRATEGIES, Balancer, CacheAware, RoundRobin, balancer_of, make_balancer
from omni_flow.control.runtime.client import AsyncSession
from omni_flow.control.runtime.party import Outbox
from omni_flow.control.runtime.prefixes import PIECE, Key, Prefix, Routed, pieces_of
from omni_flow.control.runtime.wire import PREFIX

from .conftest import deployed
from .roles import Echo

A, B, C = "llm/0@0", "llm/1@0", "llm/2@0"
KEYS = list(range(1, 41))


def test_every_strategy_that_lint_knows_exists_and_gives_each_replica_once() -> None:
    assert set(BALANCES) == set(STRATEGIES)
    for name in BALANCES:
        for session in (None, "s"):
            assert sorted(make_balancer(name).order([A, B, C], {A: 1}, session, KEYS)) == [A, B, C]


def test_a_prompt_goes_where_it_was_before() -> None:
    balancer = CacheAware()
    first = balancer.order([A, B, C], {}, None, KEYS)[0]
    for _ in range(5):
        assert balancer.order([A, B, C], {}, None, KEYS)[0] == first
        assert balancer.order([A, B, C], {}, None, [*KEYS, 99])[0] == first


def test_the_longest_prefix_wins_and_a_prefix_is_worth_so_much_load_and_no_more() -> None:
    holders = Routed()
    holders.sent(KEYS, A)
    holders.sent(KEYS[:20], B)
    balancer = CacheAware(holders, load_weight=8)
    assert balancer.order([A, B, C], {}, None, KEYS) == [A, B, C]
    # 40 pieces more than C has are worth five requests
    assert balancer.order([A, C], {A: 4}, None, KEYS)[0] == A
    holders = Routed()
    holders.sent(KEYS, A)
    assert CacheAware(holders, load_weight=8).order([A, C], {A: 6}, None, KEYS)[0] == C


def test_equal_costs_and_prompts_without_a_whole_piece_go_to_the_least_loaded() -> None:
    balancer = CacheAware()
    assert balancer.order([A, B, C], {A: 1, B: 2}, None, KEYS)[0] == C
    assert balancer.order([A, B, C], {A: 1, C: 2}, None)[0] == B
    assert {balancer.order([A, B, C], {}, None)[0] for _ in range(3)} == {A, B, C}


def test_a_restarted_replica_holds_nothing() -> None:
    balancer = CacheAware()
    first = balancer.order([A, B], {}, None, KEYS)[0]
    other = B if first == A else A
    balancer.order([A, B], {first: 9}, None, KEYS)
    again = first.replace("@0", "@1")
    assert balancer.order(sorted([again, other]), {}, None, KEYS)[0] == other


def test_what_was_sent_longest_ago_is_forgotten_the_ends_of_prompts_first() -> None:
    routed = Routed(room=50)
    routed.sent(KEYS, A)
    routed.sent(list(range(100, 120)), A)
    routed.sent(KEYS, B)
    assert routed.held(KEYS, [A, B]) == {A: 30, B: 40}
    assert routed.held(list(range(100, 120)), [A, B]) == {A: 20, B: 0}
    # nothing is kept of replicas that are gone
    assert routed.held(KEYS, [B]) == {B: 40}
    assert routed.held(KEYS, [A, B]) == {B: 40}


def test_pieces_are_named_by_all_before_them() -> None:
    text = "x" * (4 * PIECE)
    keys = pieces_of({"prompt": text})
    assert len(keys) == 4
    assert len(set(keys)) == 4
    assert pieces_of({"prompt": text + "and a question"})[:4] == keys
    assert pieces_of({"prompt": "y" + text[1:]})[1:] != keys[1:]
    assert not set(pieces_of({"prompt": text}, tenant="other")) & set(keys)
    assert not set(pieces_of({"system": text})) & set(keys)
    assert pieces_of({"prompt": "short"}) == []


def test_messages_and_token_ids_have_pieces_and_what_has_no_plain_form_ends_them() -> None:
    ids = list(range(1000))
    keys = pieces_of({"ids": ids})
    assert pieces_of({"ids": [*ids, 5, 6]})[: len(keys)] == keys
    messages = [{"role": "user", "content": "x" * 1000}]
    keys = pieces_of({"messages": messages})
    assert len(keys) == 4
    assert pieces_of({"messages": [*messages, {"role": "assistant", "content": "y"}]})[:4] == keys
    text = "x" * 1000
    assert pieces_of({"text": text, "picture": object(), "more": text}) == pieces_of({"text": text})
    assert pieces_of({"text": text, "odd": [object()]}) == pieces_of({"text": text})


class Cache:
    """A replica's prefix cache of `room` pieces, least recently used first out."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._there: OrderedDict[Key, None] = OrderedDict()

    def hit(self, keys: list[Key]) -> int:
        """Leading pieces found; all of them are there afterwards."""
        hits = next((at for at, key in enumerate(keys) if key not in self._there), len(keys))
        for key in reversed(keys):
            self._there[key] = None
            self._there.move_to_end(key)
        while len(self._there) > self._room:
            self._there.popitem(last=False)
        return hits


def served(balancer: Balancer) -> tuple[int, int]:
    """Shared-prefix traffic on two replicas of which each has room for half of all prefixes.

    Returns:
        Pieces found in caches, and the longest a queue was.
    """
    draw = random.Random(3)
    caches = {A: Cache(160), B: Cache(160)}
    load = {A: 0, B: 0}
    running: list[str] = []
    hits = longest = 0
    for request in range(2000):
        prefix = draw.randrange(10)
        keys: list[Key] = [*range(1000 * prefix, 1000 * prefix + 30), 100_000 + request]
        to = balancer.order([A, B], load, None, keys)[0]
        hits += caches[to].hit(keys)
        load[to] += 1
        longest = max(longest, load[to])
        running.append(to)
        if len(running) == 8:
            load[running.pop(draw.randrange(8))] -= 1
    return hits, longest


def test_two_replicas_with_shared_prefixes_find_more_than_under_round_robin_and_stay_even() -> None:
    aware, queue = served(CacheAware(Routed(room=160)))
    blind, _ = served(RoundRobin())
    assert aware > 1.5 * blind
    assert aware > 0.75 * 30 * 2000
    assert queue <= 7


def test_requests_with_one_prefix_meet_at_one_replica_of_a_deployment() -> None:
    graph = Graph("echo")
    x = graph.placeholder("x", Text, required=True)
    echo = graph.role("echo", Echo, replicas=3, balance="cache_aware").interface("run", inputs=[[x]], outputs=["y"])
    graph.output(y=echo.y)

    async def body() -> None:
        async with deployed(graph) as app:
            places = set()
            for turn in range(6):
                request = await AsyncSession(app.gateway).submit(x="x" * 4 * PIECE + str(turn), timeline=True)
                await request.result()
                places.add(request.timeline()[0].replica)
            assert len(places) == 1

    asyncio.run(body())


class Reporter:
    """Says which KV its input became."""

    async def run(self, ctx: Context, x: str) -> str:
        ctx.prefix("kv", [(64, b"a" * 32), (128, b"b" * 32)])
        return x

    def slow(self, ctx: Context, x: str) -> str:
        ctx.prefix("kv", [(1, b"c" * 32)])
        return x

    def many(self, ctx: list[Context], x: list[str]) -> list[str]:
        for one in ctx:
            one.prefix("kv", [(2, b"d" * 32)])
        return x


class Listener(Routed):
    """Remembers what it learned."""

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self.room = room
        self.heard: list[tuple[Sequence[Key], Prefix]] = []

    def learned(self, keys: Sequence[Key], prefix: Prefix) -> None:
        self.heard.append((keys, prefix))


def test_weights_come_from_the_graph_and_what_roles_say_of_their_prefixes_reaches_the_holders() -> None:
    graph = Graph("reports")
    x = graph.placeholder("x", Text, required=True)
    role = graph.role("llm", Reporter, replicas=2, balance=cache_aware(load_weight=3, room=77))
    graph.output(
        y=role.interface("run", inputs=[[x]], outputs=["y"]).y, z=role.interface("slow", inputs=[[x]], outputs=["z"]).z
    )
    spec = graph.compile().plan.roles[0].spec
    made: list[Listener] = []

    def holders(room: int) -> Listener:
        made.append(Listener(room))
        return made[-1]

    balancer = balancer_of(spec, holders)
    assert isinstance(balancer, CacheAware)
    assert made[0].room == 77
    made[0].sent(KEYS, A)
    # 40 pieces are worth 13 requests of weight 3
    assert balancer.order([A, B], {A: 13}, None, KEYS)[0] == A
    assert balancer.order([A, B], {A: 14}, None, [*KEYS[:39], 7])[0] == B

    async def body() -> None:
        async with deployed(graph, holders=holders) as app:
            text = "x" * 3 * PIECE
            await (await AsyncSession(app.gateway).submit(x=text)).result()
            heard = made[-1].heard
            assert [prefix.pool for _, prefix in heard] == ["kv", "kv"]
            assert {len(prefix.marks) for _, prefix in heard} == {1, 2}
            assert all(list(keys) == pieces_of({"x": text}) for keys, _ in heard)

    asyncio.run(body())


@pytest.mark.parametrize("method", ["run", "slow", "many"])
def test_a_prefix_is_said_on_the_loop_wherever_role_code_runs(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Graph("reports")
    x = graph.placeholder("x", Text, required=True)
    role = graph.role("llm", Reporter, replicas=2, balance="cache_aware")
    batch = {"batch": Batch(max=1)} if method == "many" else {}
    graph.output(y=role.interface(method, inputs=[[x]], outputs=["y"], **batch).y)
    threads: list[threading.Thread] = []
    original = Outbox.to_gateway

    def seen(box: Outbox, message: Message) -> None:
        if message.kind == PREFIX:
            threads.append(threading.current_thread())
        original(box, message)

    async def body() -> None:
        async with deployed(graph) as app:
            await (await AsyncSession(app.gateway).submit(x="x" * PIECE)).result()

    monkeypatch.setattr(Outbox, "to_gateway", seen)
    asyncio.run(body())
    assert threads == [threading.current_thread()]


@pytest.mark.parametrize("wrong", [lambda: cache_aware(load_weight=0), lambda: cache_aware(room=0)])
def test_options_that_make_no_sense_are_refused_where_they_are_written(wrong: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        wrong()


def test_weights_by_place_can_be_set_from_the_graph() -> None:
    graph = Graph("weights")
    x = graph.placeholder("x", Text)
    role = graph.role("tts", Echo, replicas=2, balance=weighted({"tts/0": 3.0}))
    graph.output(y=role.interface("run", inputs=[[x]], outputs=["y"]).y)
    balancer = balancer_of(graph.compile().plan.roles[0].spec)
    load = {"tts/0@0": 0, "tts/1@0": 0}
    for _ in range(40):
        load[balancer.order(sorted(load), load, None)[0]] += 1
    assert load == {"tts/0@0": 30, "tts/1@0": 10}
    with pytest.raises(ValueError, match="weights must be positive"):
        weighted({"tts/0": 0})


@pytest.mark.parametrize("wrong", [0, -1.0])
def test_a_request_must_weigh_something(wrong: float) -> None:
    with pytest.raises(ValueError, match="load_weight must be positive"):
        CacheAware(load_weight=wrong)
