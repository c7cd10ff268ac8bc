"""KV that comes from disk and from another node: two nodes with a manager, movers, an SSD tier and an engine each."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Coroutine, Iterator
from typing import Any, NamedTuple, TypeVar

import engine_kit as kit
import msgspec
import numpy as np
import pytest

from omni_flow.compute.checkpoint import read_config
from omni_flow.compute.engine import Request, Tokens
from omni_flow.compute.errors import BadRequest, EngineFull
from omni_flow.compute.kv_layout import kv_layout
from omni_flow.compute.prefix import PageChain
from omni_flow.compute.sampling import Sampling
from omni_flow.compute.sglang.config import EngineConfig
from omni_flow.compute.sglang.kernel import SGLangEngine
from omni_flow.compute.sglang.worker import namespace_of
from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.identity import PageHash
from omni_flow.data.launch import start
from omni_flow.data.messages import L1, L2, L3
from omni_flow.data.pool_spec import PoolSpec
from omni_flow.data.server_config import ServerConfig
from omni_flow.data.transfer.client import TransferClient
from omni_flow.data.transfer.node_config import NodeConfig

T = TypeVar("T")
PAGE, QUOTA, LENGTH, WAITING = 16, 64, 800, 3
CACHED = LENGTH - PAGE


class Node(NamedTuple):
    client: MemoryManagerClient
    engine: SGLangEngine

    def movers_stopped(self) -> contextlib.AbstractContextManager[None]:
        """Nothing comes from the disk or from host memory meanwhile."""
        return kit.stopped(*(kit.mover(self.client, name) for name in ("ssd mover", "copy mover")))

    def check(self, counts: dict[str, int]) -> None:
        """The engine's counts of pages are those of its manager, and nothing is in use."""
        assert counts["running"] == counts["waiting"] == counts["loading"] == counts["held"] == counts["locked"] == 0
        assert counts["available"] + counts["pinned"] == counts["quota"] == QUOTA
        mine = next(row for row in self.client.inspect() if row["name"] == f"engine {self.engine.pid}")
        assert mine["held"]["kv"] == [counts["leased"], counts["pinned"]]
        assert self.client.check() == []


class Nodes(NamedTuple):
    a: Node
    b: Node
    loop: asyncio.Runner
    oracle: Any

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run(work)


def prompt_of(seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, 256, LENGTH)]


def keys_of(engine: SGLangEngine, prompt: list[int]) -> list[PageHash]:
    return PageChain(namespace_of(engine.config).root()).upto(prompt, LENGTH - 1, PAGE)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
    return port


@pytest.fixture(scope="module", params=[kit.MODELS[0], pytest.param(kit.MODELS[1], marks=pytest.mark.long)])
def nodes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    checkpoint = kit.GOLDENS / request.param
    page_bytes = kv_layout(read_config(checkpoint)).page_bytes(PAGE, "float32")
    pool = PoolSpec(name="kv", page_bytes=page_bytes, l1_pages=220, l2_pages=96, l3_pages=12_000, padding=1)
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    made, managers = [], []
    for name, listen, peers in (("a", endpoint, ()), ("b", "tcp://127.0.0.1:*", (endpoint,))):
        folder = tmp_path_factory.mktemp(name)
        path = str(folder / "m.sock")
        transfer = NodeConfig(manager=path, name=name, listen=listen, peers=peers, beat_s=0.1)
        movers = (
            ("copy",),
            (
                "{python}",
                "-m",
                "omni_flow.data.ssd.mover",
                "{path}",
                str(folder),
                str(192 << 20),
                "--segment",
                "1048576",
                "--deadline",
                "60",  # a test stops the mover, and the disk is not to be taken for a sick one
            ),
            ("{python}", "-m", "omni_flow.data.transfer.node", msgspec.json.encode(transfer).decode()),
        )
        managers.append(start(ServerConfig(path=path, pools=(pool,), movers=movers, huge=False)))
        config = EngineConfig(
            model=str(checkpoint),
            page_size=PAGE,
            max_tokens=QUOTA * PAGE,
            max_waiting=WAITING,
            manager=path,
            pool="kv",
            share_weights=False,
        )
        made.append(Node(MemoryManagerClient(path, name="test"), SGLangEngine(config)))
    with asyncio.Runner() as loop:

        async def all_of(works: list[Coroutine[Any, Any, None]]) -> None:
            await asyncio.gather(*works)

        loop.run(all_of([node.engine.start() for node in made]))
        for node in made:
            while not node.client.stats().get("pool_l3_on/kv") or node.client.stats()["job_movers"] < 3:
                node.client.wait_end(0.05)
        yield Nodes(made[0], made[1], loop, kit.oracle(checkpoint))
        loop.run(all_of([node.engine.close() for node in made]))
    for node, manager in zip(made, managers, strict=True):
        node.client.close()
        manager.terminate()
        assert manager.wait(20) == 0


def push_down(node: Node, keys: list[PageHash], seed: int) -> None:
    """Write other pages until `keys` are on the disk and nowhere else."""
    number = seed
    while set(node.client.probe("kv", keys).tolist()) != {L3}:
        room = node.client.reserve("kv", 16, timeout=20)
        node.client.commit("kv", room.token, [PageHash(os.urandom(32)) for _ in range(16)])
        number += 1
        assert number < seed + 200, "the pages do not reach the disk"


async def compute(node: Node, *seeds: int) -> None:
    """Have prompts computed, and others until the engine has unpinned them."""
    for seed in (*seeds, 900 + seeds[0], 950 + seeds[0]):
        await kit.answer(node.engine, kit.greedy(prompt_of(seed), 1))


def test_pages_on_disk_alone_come_back_while_others_run(nodes: Nodes) -> None:
    node, prompt = nodes.a, prompt_of(1)
    expected = kit.oracle_greedy(nodes.oracle, prompt, 4)

    async def run() -> None:
        await compute(node, 1)
        push_down(node, keys_of(node.engine, prompt), 0)
        before = (await node.engine.stats())["loaded_pages"]
        with node.movers_stopped():
            again = await kit.beside(node.engine, kit.greedy(prompt, 4, logits=True))
        got = await again
        kit.check_answer(got, *expected)
        assert got.end.hits == (0, 0, CACHED)
        counts = dict(await node.engine.stats())
        assert counts["loaded_pages"] - before >= CACHED // PAGE
        node.check(counts)

    nodes.run(run())


def test_a_request_says_when_it_passed_which_step_to_its_first_token(nodes: Nodes) -> None:
    node, prompt = nodes.a, prompt_of(5)
    ends = ["chosen", "matched", "prepared", "launched", "collected", "computed", "answered", "first_token"]

    async def run() -> None:
        await compute(node, 5)
        push_down(node, keys_of(node.engine, prompt), 0)
        began = time.monotonic_ns()
        from_disk = await kit.answer(node.engine, kit.greedy(prompt, 3, timeline=True))
        assert from_disk.end.hits == (0, 0, CACHED)
        steps = [step for step, _ in from_disk.end.timeline]
        assert steps == ["asked", "admitted", "received", "named", "probed", "fetched", "pinned", "queued", *ends]
        times = [began, *(at for _, at in from_disk.end.timeline), time.monotonic_ns()]
        assert times == sorted(times)
        again = await kit.answer(node.engine, kit.greedy(prompt, 3, timeline=True))
        steps = [step for step, _ in again.end.timeline]
        assert steps == ["asked", "admitted", "received", "named", "probed", "queued", *ends]
        assert (await kit.answer(node.engine, kit.greedy(prompt, 3))).end.timeline == ()

    nodes.run(run())


def test_a_request_that_is_cancelled_while_its_pages_load_leaves_nothing(nodes: Nodes) -> None:
    node, prompt = nodes.a, prompt_of(2)
    expected = kit.oracle_greedy(nodes.oracle, prompt, 4)

    async def run() -> None:
        await compute(node, 2)
        push_down(node, keys_of(node.engine, prompt), 0)
        with node.movers_stopped():
            loading = await kit.beside(node.engine, kit.greedy(prompt, 4))
            loading.cancel()
            await asyncio.wait([loading])
        while (counts := dict(await node.engine.stats()))["loading"] or counts["waiting"]:
            pass
        node.check(counts)
        again = await kit.answer(node.engine, kit.greedy(prompt, 4, logits=True))
        kit.check_answer(again, *expected)
        assert again.end.cached_tokens == CACHED

    nodes.run(run())


def test_those_whose_pages_load_wait_too_and_more_than_may_are_refused(nodes: Nodes) -> None:
    node, prompt = nodes.a, prompt_of(7)
    expected = kit.oracle_greedy(nodes.oracle, prompt, 4)[0]

    async def run() -> None:
        await compute(node, 7)
        push_down(node, keys_of(node.engine, prompt), 0)
        with node.movers_stopped():
            asked = [asyncio.create_task(kit.answer(node.engine, kit.greedy(prompt, 4))) for _ in range(WAITING + 2)]
            while len(refused := [task for task in asked if task.done()]) < 2:
                assert (await node.engine.stats())["loading"] <= WAITING
            urgent = asyncio.create_task(kit.answer(node.engine, kit.greedy(prompt, 4, priority=1)))
            while len(refused := [task for task in asked if task.done()]) < 3:
                assert (await node.engine.stats())["loading"] <= WAITING + 1  # its pages come all the same
            assert all(isinstance(task.exception(), EngineFull) for task in refused)
            assert not urgent.done()
        assert [(await task).tokens for task in asked if task not in refused] == [expected] * (WAITING - 1)
        assert (await urgent).tokens == expected
        node.check(dict(await node.engine.stats()))

    nodes.run(run())


@pytest.mark.parametrize("tier", [L1, L2, L3])
def test_a_request_that_is_refused_on_arrival_leaves_the_engine_alone_wherever_its_pages_lie(
    nodes: Nodes, tier: int
) -> None:
    """A grammar where the checkpoint has no tokenizer: SGLang takes its prompt away before it joins the queue."""
    seed = 60 + tier
    node, prompt = nodes.a, prompt_of(seed)

    async def run() -> None:
        await compute(node, seed)
        if tier != L1:
            push_down(node, keys_of(node.engine, prompt), 0)
        if tier == L2:
            node.client.fetch("kv", keys_of(node.engine, prompt), tier=L2)
        refused = Request(spans=[Tokens(prompt)], sampling=Sampling(max_tokens=4, regex="a+"))
        with pytest.raises(BadRequest, match="grammar"):
            await kit.answer(node.engine, refused)
        again = await kit.answer(node.engine, kit.greedy(prompt, 4, logits=True))
        kit.check_answer(again, *kit.oracle_greedy(nodes.oracle, prompt, 4))
        node.check(dict(await node.engine.stats()))

    nodes.run(run())


def test_what_one_node_computed_another_continues(nodes: Nodes) -> None:
    a, b, prompt = nodes.a, nodes.b, prompt_of(4)
    tokens, logits = kit.oracle_greedy(nodes.oracle, prompt, 5)

    async def run() -> None:
        first = await kit.answer(a.engine, kit.greedy(prompt, 1, logits=True))
        kit.check_answer(first, tokens[:1], logits[:1])
        keys = keys_of(a.engine, prompt)
        transfer = TransferClient(b.client)
        while "a" not in transfer.nodes():
            b.client.wait_end(0.05)
        assert transfer.pull("kv", keys, "a").all()
        rest = await kit.answer(b.engine, kit.greedy(prompt + first.tokens, 4, logits=True))
        assert rest.end.cached_tokens == CACHED
        kit.check_answer(rest, tokens[1:], logits[1:])
        b.check(dict(await b.engine.stats()))

    nodes.run(run())
