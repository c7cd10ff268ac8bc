"""A request may be cancelled in every state: afterwards the engine and its manager count the pages they had before."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import engine_kit as kit
import numpy as np
import pytest
from step_hooks import GATE, GATED, Gate
from test_engine_pool import PAGE, QUOTA, config, serving

from omni_flow.compute.engine import TokenEvent
from omni_flow.compute.prefix import PageChain
from omni_flow.compute.sglang.kernel import SGLangEngine
from omni_flow.compute.sglang.worker import namespace_of
from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.messages import L2

CHUNK = len(GATED)


class Rig(NamedTuple):
    """An engine that runs one request at a time, its manager, and the pipe at which a prefill waits once it is made."""

    engine: SGLangEngine
    client: MemoryManagerClient
    pipe: Path
    loop: asyncio.Runner

    @asynccontextmanager
    async def gives_all_back(self) -> AsyncIterator[None]:
        """The count after this is that before."""
        before = await self.pages()
        yield
        assert await self.pages() == before

    async def pages(self) -> int:
        """Pages that can be taken, and those that were since left in the cache, once nothing is under way: that is
        certain when a request that came last has ended."""
        assert len((await kit.answer(self.engine, kit.greedy([5, 4, 3], 2))).tokens) == 2
        while (counts := await self.engine.stats())["loading"]:
            pass
        mine = next(row for row in self.client.inspect() if row["name"] == f"engine {self.engine.pid}")
        assert mine["held"]["kv"] == [counts["leased"] + counts["held"], counts["pinned"]]
        assert self.client.check() == []
        assert (counts["running"], counts["waiting"], counts["held"], counts["locked"]) == (0, 0, 0, 0)
        return counts["available"] + counts["sealed"] - counts["replaced"]

    async def until(self, name: str, count: int, task: asyncio.Task[kit.Answer]) -> None:
        """Wait until so many requests are in this state; `task`, one of them, goes on."""
        while (await self.engine.stats())[name] != count:
            assert not task.done()


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("cancel")
    pipe = folder / "pipe"
    with (
        serving(str(folder / "m.sock"), (("copy",),), l1_pages=220, l2_pages=100) as manager,
        MemoryManagerClient(manager, name="test") as client,
        pytest.MonkeyPatch.context() as patch,
        asyncio.Runner() as loop,
    ):
        patch.setenv(GATE, str(pipe))
        engine = SGLangEngine(config(manager, max_running=1, chunk=CHUNK), step_hook=Gate)
        loop.run(engine.start())
        yield Rig(engine, client, pipe, loop)
        loop.run(engine.close())


def prompt_of(length: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, 256, length)]


async def cancel(task: asyncio.Task[kit.Answer]) -> None:
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


def test_while_it_decodes(rig: Rig) -> None:
    async def run() -> None:
        async with rig.gives_all_back():
            stream = rig.engine.generate(kit.greedy(prompt_of(PAGE - 5, 1), 500))
            for _ in range(3):
                assert isinstance(await anext(stream), TokenEvent)
            assert (await rig.engine.stats())["running"] == 1
            await stream.aclose()

    rig.loop.run(run())


def test_while_it_is_queued(rig: Rig) -> None:
    async def run() -> None:
        async with rig.gives_all_back():
            first = asyncio.create_task(kit.answer(rig.engine, kit.greedy(prompt_of(PAGE - 5, 2), 500)))
            await rig.until("running", 1, first)
            queued = asyncio.create_task(kit.answer(rig.engine, kit.greedy(prompt_of(3 * PAGE, 3), 5)))
            await rig.until("waiting", 1, queued)
            await cancel(queued)
            await rig.until("waiting", 0, first)
            assert (await rig.engine.stats())["running"] == 1
            await cancel(first)

    rig.loop.run(run())


def test_while_its_pages_are_fetched(rig: Rig) -> None:
    prompt = prompt_of(10 * PAGE + 1, 4)
    keys = PageChain(namespace_of(rig.engine.config).root()).upto(prompt, len(prompt) - 1, PAGE)
    room = rig.client.reserve("kv", len(keys), tier=L2)
    rig.client.commit("kv", room.token, keys)

    async def run() -> None:
        async with rig.gives_all_back():
            with kit.stopped(kit.mover(rig.client, "copy mover")):
                await cancel(await kit.beside(rig.engine, kit.greedy(prompt, 5)))
                assert (await rig.engine.stats())["loading"] == 1

    rig.loop.run(run())


def test_in_the_second_of_five_chunks_of_its_prefill(rig: Rig) -> None:
    os.mkfifo(rig.pipe)

    async def run() -> None:
        prompt = prompt_of(5 * CHUNK, 5)
        async with rig.gives_all_back():
            prefill = asyncio.create_task(kit.answer(rig.engine, kit.greedy(prompt, 5)))
            gate = await asyncio.to_thread(rig.pipe.open, "w")  # when the forward of the second chunk has opened it
            await cancel(prefill)
            counts = asyncio.create_task(rig.engine.stats())
            for _ in range(2):  # the question is written in the turn of the loop behind the next
                await asyncio.sleep(0)
            gate.close()
            assert (await counts)["held"] == 2 * CHUNK // PAGE
        rig.pipe.unlink()
        assert (await kit.answer(rig.engine, kit.greedy(prompt, 5))).end.cached_tokens == 0

    rig.loop.run(run())
    assert QUOTA > 5 * CHUNK // PAGE
