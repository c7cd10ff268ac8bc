"""A role with an engine: what it asks of the pool, how params choose its sampling, and that it outlives its engine."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from omni_flow.compute.engine import EndEvent
from omni_flow.compute.errors import BadCheckpoint, BadRequest, EngineDied
from omni_flow.compute.sampling import Sampling
from omni_flow.data.launch import start
from omni_flow.data.server_config import ServerConfig
from omni_flow.models.engine_role import EngineRole
from omni_flow.testing import tiny_checkpoint

TOKEN_BYTES = 3 * (32 + 16) * 4


def turn(retries: int = 0, **params: object) -> SimpleNamespace:
    return SimpleNamespace(
        session=None, tenant="", params=SimpleNamespace(**params), seed=7, retries=retries, prefix=lambda *_: None
    )


def test_the_pool_of_a_replica_holds_its_quota_and_its_cache(tmp_path: Path) -> None:
    folder = str(tiny_checkpoint("deepseek_v2", tmp_path))
    (pool,) = EngineRole.kv_pools(folder, engine={"max_tokens": 1024, "page_size": 32}, cache_tokens=100, template="x")
    assert (pool.name, pool.page_bytes) == ("kv", 32 * TOKEN_BYTES)
    assert (pool.l1_pages, pool.l2_pages) == (32 + 128 + 4, 0)
    (deep,) = EngineRole.kv_pools(folder, engine={"page_size": 32}, l2_tokens=100)
    assert deep.l2_pages == 4
    with pytest.raises(BadCheckpoint, match=r"config\.json"):
        EngineRole.kv_pools(str(tmp_path / "none"))


def test_params_go_before_init_and_the_seed_is_that_of_the_activation(tmp_path: Path) -> None:
    role = EngineRole(str(tmp_path), sampling={"top_k": 5, "max_tokens": 9})
    assert role.sampling(turn()) == Sampling(seed=7, top_k=5, max_tokens=9)
    assert role.sampling(turn(max_tokens=3, voice="a", top_p=None)) == Sampling(seed=7, top_k=5, max_tokens=3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", 2.5),
        ("temperature", math.nan),
        ("temperature", "hot"),
        ("top_k", 2**70),
        ("stop", "text"),
        ("stop", [""]),
        ("logit_bias", {"x": 1.0}),
        ("logit_bias", {"1": math.inf}),
        ("logprobs", 21),
        ("json_schema", {"type": "object"}),
    ],
)
def test_a_param_that_is_wrong_is_refused_by_name(tmp_path: Path, name: str, value: object) -> None:
    with pytest.raises(BadRequest, match=name):
        EngineRole(str(tmp_path)).sampling(turn(**{name: value}))


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_role_outlives_its_engine_and_finds_its_kv_again(tmp_path: Path) -> None:
    folder = str(tiny_checkpoint("deepseek_v2", tmp_path / "model"))
    address = str(tmp_path / "memory.sock")
    manager = start(ServerConfig(path=address, pools=EngineRole.kv_pools(folder), huge=False))
    try:
        asyncio.run(_killed(folder, address))
    finally:
        manager.terminate()
        assert manager.wait(20) == 0


async def _killed(folder: str, address: str) -> None:
    role = EngineRole(folder)
    await role.setup(SimpleNamespace(address=address))
    many = Sampling(max_tokens=2000, ignore_eos=True)
    prompt = role.prompt("Why is the sky blue, and why is it red when the sun goes down?")

    async def first_tokens() -> tuple[list[int], int]:
        got = [one async for one in role.tokens(turn(), prompt, Sampling(max_tokens=8, ignore_eos=True))]
        end = got.pop()
        assert isinstance(end, EndEvent)
        return [one for one in got if isinstance(one, int)], end.cached_tokens

    try:
        said, cached = await first_tokens()
        assert cached == 0
        running = role.tokens(turn(), prompt, many)
        await anext(running)
        assert role.ails() == ""
        os.kill(role.engine.pid, signal.SIGKILL)
        with pytest.raises(EngineDied):
            async for _ in running:
                pass
        assert "the engine process ended" in role.ails()
        # two at once: one of them starts the new engine, both go on from what the dead one had written
        both = await asyncio.gather(first_tokens(), first_tokens())
        assert list(both) == [(said, len(prompt) // 16 * 16)] * 2
        assert role.ails() == ""
        dead = role.engine
        os.kill(dead.pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            await dead.ended()
            while role.engine is dead:  # noqa: ASYNC110 - replaced though nobody asks for anything
                await asyncio.sleep(0.01)
        assert role.ails() == ""
    finally:
        await role.close()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_an_answer_that_may_be_retried_goes_on_where_its_engine_died_as_if_nothing_had_happened(tmp_path: Path) -> None:
    asyncio.run(_retried(tmp_path))


async def _retried(folder: Path) -> None:
    role = EngineRole(str(tiny_checkpoint("deepseek_v2", folder)))
    warm = Sampling(max_tokens=400, temperature=1, seed=7, ignore_eos=True)

    async def answer(retries: int, meanwhile: Callable[[], Awaitable[None]] | None = None) -> list[int | EndEvent]:
        got: list[int | EndEvent] = []
        async for one in role.tokens(turn(retries), role.prompt("Why is the sky blue?"), warm):
            got.append(one)
            if len(got) == 20 and meanwhile is not None:
                await meanwhile()
        return got

    async def kill() -> None:
        os.kill(role.engine.pid, signal.SIGKILL)

    async def kill_twice() -> None:
        dead = role.engine
        await kill()
        async with asyncio.timeout(200):
            while role.engine is dead:  # noqa: ASYNC110 - it is replaced by the role
                await asyncio.sleep(0.01)
        await kill()

    async def change() -> None:
        tiny_checkpoint("deepseek_v2", folder, seed=1)
        await kill()

    await role.setup()
    try:
        whole = await answer(0)
        assert len(whole) == 401
        assert await answer(1, kill) == whole
        with pytest.raises(EngineDied, match=r"of \d+ tokens the next one chose others"):
            await answer(1, change)
        with pytest.raises(EngineDied, match="the engine process ended"):
            await answer(1, kill_twice)
    finally:
        await role.close()
