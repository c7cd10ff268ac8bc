"""KV of a launched graph that has left L1: found again in CPU memory, and on the disk by who comes next."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from deepseek_v2_llm_only.graph import build

from omni_flow import alaunch
from omni_flow.compute.prefix import PageChain
from omni_flow.compute.sglang.config import EngineConfig
from omni_flow.compute.sglang.worker import namespace_of
from omni_flow.control.graph import Graph
from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.identity import PageHash
from omni_flow.data.messages import L2, L3
from omni_flow.deploy.launchers import LocalLauncher
from omni_flow.deploy.local import AsyncDeployment
from omni_flow.deploy.memory import Memory
from omni_flow.models.deepseek_v2.template import TEMPLATE
from omni_flow.models.tokenizer import Processor
from omni_flow.testing import tiny_checkpoint

PAGE = 16
QUESTION = "Why is the sky blue, and why is it red when the sun goes down? " * 12
PARAMS = {"max_tokens": 16}


def keys_of(folder: str) -> list[PageHash]:
    """The pages of the question's prompt that a cache hit takes."""
    ids = list(Processor(folder, TEMPLATE).chat([{"role": "user", "content": QUESTION}]).ids)
    root = namespace_of(EngineConfig(model=folder, page_size=PAGE)).root()
    return PageChain(root).upto(ids, len(ids) - 1, PAGE)


def client_of(app: AsyncDeployment) -> MemoryManagerClient:
    assert isinstance(app.launcher, LocalLauncher)
    assert app.launcher.memory is not None
    return MemoryManagerClient(app.launcher.memory.address, name="test")


async def ask(app: AsyncDeployment, question: str = QUESTION) -> dict[str, Any]:
    return await (await app.submit(prompt=question, params=PARAMS)).result()


async def push_down(app: AsyncDeployment, keys: list[PageHash], tier: int) -> None:
    """Ask other questions until the pages lie in `tier` and in none above it."""
    with client_of(app) as client:
        for number in range(100):
            if set(client.probe("kv", keys).tolist()) == {tier}:
                return
            await ask(app, f"{number} " + QUESTION)
    raise AssertionError("the pages do not leave the tiers above")


async def until_on(app: AsyncDeployment) -> None:
    """Wait until the disk has been read."""
    with client_of(app) as client:
        while not client.stats()["pool_l3_on/kv"]:
            client.wait_end(0.02)
            await asyncio.sleep(0)


async def hits(app: AsyncDeployment) -> dict[str, int]:
    """Tokens that prompts have found in each tier."""
    (counted,) = (await app.counters()).values()
    return {tier: counted[f"kv_hit_tokens/{tier}"] for tier in ("l1", "l2", "l3")}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_prompt_whose_kv_was_pushed_out_of_l1_finds_it_in_l2_and_has_the_same_answer(tmp_path: Path) -> None:
    folder = str(tiny_checkpoint("deepseek_v2", tmp_path))

    async def body() -> None:
        graph = build(folder, engine={"max_tokens": 1024, "page_size": PAGE}, l2_tokens=1 << 16)
        async with alaunch(graph) as app:
            first, keys = await ask(app), keys_of(folder)
            await push_down(app, keys, L2)
            before = await hits(app)
            again = await ask(app)
            assert "".join(again["text"]) == "".join(first["text"]) != ""
            assert await hits(app) == {**before, "l2": before["l2"] + len(keys) * PAGE}

    asyncio.run(body())


def with_disk(folder: Path) -> tuple[Graph, Memory, list[PageHash]]:
    """A graph whose pages may go down to a disk, the memory of its deployments, and the keys of the prompt."""
    model = str(tiny_checkpoint("deepseek_v2", folder))
    graph = build(model, engine={"max_tokens": 1024, "page_size": PAGE}, l2_tokens=1024)
    return graph, Memory(ssd=str(folder / "ssd"), ssd_bytes=64 << 20), keys_of(model)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_kv_on_the_disk_is_found_by_the_next_deployment_of_the_graph(tmp_path: Path) -> None:
    graph, memory, keys = with_disk(tmp_path)

    async def before() -> dict[str, Any]:
        async with alaunch(graph, memory=memory) as app:
            said = await ask(app)
            await push_down(app, keys, L3)
            return said

    async def after() -> dict[str, Any]:
        async with alaunch(graph, memory=memory) as app:
            await until_on(app)
            said = await ask(app)
            assert await hits(app) == {"l1": 0, "l2": 0, "l3": len(keys) * PAGE}
            return said

    first, again = asyncio.run(before()), asyncio.run(after())
    assert "".join(again["text"]) == "".join(first["text"]) != ""
    assert again["usage"]["cached_tokens"] == len(keys) * PAGE


@pytest.mark.long
@pytest.mark.timeout(300)
def test_kv_on_the_disk_is_found_after_the_memory_manager_was_killed(tmp_path: Path) -> None:
    graph, memory, keys = with_disk(tmp_path)

    async def body() -> None:
        up = asyncio.Event()
        async with alaunch(
            graph, memory=memory, on_event=lambda line: up.set() if "is up again" in line else None
        ) as app:
            first = await ask(app)
            await push_down(app, keys, L3)
            before = await hits(app)
            assert isinstance(app.launcher, LocalLauncher)
            assert app.launcher.memory is not None
            assert app.launcher.memory.pid is not None
            os.kill(app.launcher.memory.pid, signal.SIGKILL)
            await up.wait()
            await until_on(app)
            again = await ask(app)
            assert "".join(again["text"]) == "".join(first["text"]) != ""
            assert await hits(app) == {**before, "l3": before["l3"] + len(keys) * PAGE}

    asyncio.run(body())
