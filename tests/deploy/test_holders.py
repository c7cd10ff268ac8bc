"""What memory managers hold decides where requests go; real managers, real replicas, managers that are killed."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from omni_flow import Context, Graph, Text, cache_aware, launch
from omni_flow.control.runtime.prefixes import PIECE, Key, Prefix
from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.launch import start
from omni_flow.data.pool_spec import PoolSpec
from omni_flow.data.server_config import ServerConfig
from omni_flow.deploy.holders import ManagerHolders
from omni_flow.deploy.memory import Memory


class Manager(NamedTuple):
    """A memory manager and a client of it."""

    process: subprocess.Popen[bytes]
    client: MemoryManagerClient


POOL = PoolSpec(name="kv", page_bytes=64, l1_pages=64)
A, B = "llm/0@0", "llm/1@0"
KEYS: list[Key] = list(range(1, 11))


@contextmanager
def manager(path: str) -> Iterator[Manager]:
    process = start(ServerConfig(path=path, pools=(POOL,), huge=False))
    try:
        yield Manager(process, MemoryManagerClient(path))
    finally:
        process.kill()
        process.wait(20)


def pages(count: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(count)]


def store(client: MemoryManagerClient, names: list[bytes]) -> None:
    client.commit("kv", client.reserve("kv", len(names)).token, names)


def marks(names: list[bytes]) -> Prefix:
    return Prefix("kv", [(16 * at, name) for at, name in enumerate(names, 1)])


def two(tmp_path: Path, body: Callable[[ManagerHolders, list[Manager]], Awaitable[None]]) -> None:
    """Two managers and what asks them."""
    paths = [str(tmp_path / f"{k}.sock") for k in range(2)]
    with ExitStack() as stack:
        managers = [stack.enter_context(manager(path)) for path in paths]

        async def run() -> None:
            holders = ManagerHolders(paths, 100)
            try:
                await body(holders, managers)
            finally:
                await holders.close()

        asyncio.run(run())


def test_a_replica_holds_what_its_manager_has_now_whatever_was_sent_where(tmp_path: Path) -> None:
    async def body(holders: ManagerHolders, managers: list[Manager]) -> None:
        names = pages(5)
        store(managers[0].client, names[:2])
        store(managers[1].client, names)
        holders.sent(KEYS, A)
        assert holders.held(KEYS, [A, B]) == {A: 10}  # nobody was asked yet: what was sent counts
        holders.learned(KEYS, marks(names))
        await holders.idle()
        assert holders.held(KEYS, [A, B]) == {A: 4, B: 10}
        # another request that begins with the same six pieces, or with none of them
        assert holders.held([*KEYS[:6], 77], [A, B]) == {A: 4, B: 6}
        assert holders.held([88, 99], [A, B]) == {A: 0}
        # sent since then: it counts as being there until they are asked again
        holders.sent(KEYS, A)
        assert holders.held(KEYS, [A, B]) == {A: 10, B: 10}
        # a page in the middle is gone, so is what comes after it
        managers[1].client.drop("kv", names[1:2])
        holders.learned(KEYS, marks(names))
        await holders.idle()
        assert holders.held(KEYS, [A, B]) == {A: 4, B: 2}

    two(tmp_path, body)


def test_of_a_manager_that_is_killed_what_was_sent_counts(tmp_path: Path) -> None:
    async def body(holders: ManagerHolders, managers: list[Manager]) -> None:
        names = pages(5)
        for each in managers:
            store(each.client, names)
        holders.sent(KEYS[:3], B)
        holders.learned(KEYS, marks(names))
        await holders.idle()
        assert holders.held(KEYS, [A, B]) == {A: 10, B: 10}
        managers[1].process.kill()
        managers[1].process.wait(20)
        holders.learned(KEYS, marks(names))
        await holders.idle()
        assert holders.held(KEYS, [A, B]) == {A: 10, B: 3}

    two(tmp_path, body)


def test_the_table_of_prompts_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_flow.deploy.holders.MOST_PIECES", 30)

    async def body(holders: ManagerHolders, managers: list[Manager]) -> None:
        for start_at in range(0, 1000, 10):
            keys: list[Key] = list(range(start_at, start_at + 10))
            holders.learned(keys, marks(pages(2)))
            holders.learned(keys, marks(pages(2)))
            assert len(holders._of) <= 30
            assert len(holders._known) <= 3

    two(tmp_path, body)


class Cached:
    """Keeps a page for each 64 bytes of its input in its replica's pool; says how many were there, and who it is."""

    def setup(self, data: Any) -> None:
        self.client = MemoryManagerClient(data.address, name="cached")

    @classmethod
    def kv_pools(cls) -> list[PoolSpec]:
        return [POOL]

    async def run(self, ctx: Context, x: str) -> list[int]:
        names = [x[: at + 64].encode()[-32:] for at in range(0, len(x) - 63, 64)]
        found = self.client.lookup("kv", names, pin=False).pages
        if found < len(names):
            store(self.client, names[found:])
        ctx.prefix("kv", [(at, name) for at, name in enumerate(names, 1)])
        return [found, os.getpid()]


def test_replicas_with_pools_of_their_own_get_what_their_managers_hold() -> None:
    graph = Graph("cached")
    x = graph.placeholder("x", Text, required=True)
    role = graph.role("llm", Cached, replicas=2, balance=cache_aware(load_weight=1))
    graph.output(y=role.interface("run", inputs=[[x]], outputs=["y"]).y)
    texts = ["".join(chr(97 + (k + at // 32) % 26) for at in range(4 * PIECE)) for k in range(2)]
    with launch(graph, memory=Memory(managers=2)) as app:
        first = [app.submit(x=text).result(20)["y"] for text in texts]
        assert [found for found, _ in first] == [0, 0]
        for _ in range(3):
            for text, (_, pid) in zip(texts, first, strict=True):
                found, again = app.submit(x=text).result(20)["y"]
                assert (found, again) == (16, pid)
