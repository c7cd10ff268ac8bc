"""Engines over the pool of a memory manager: pages shared by processes, given back by the dead, counted."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import engine_kit as kit
import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from omni_flow.compute.checkpoint import read_config
from omni_flow.compute.errors import BadCheckpoint, ComputeError, EngineDied, PromptTooLong
from omni_flow.compute.kv_layout import kv_layout
from omni_flow.compute.prefix import PageChain
from omni_flow.compute.sglang.config import EngineConfig
from omni_flow.compute.sglang.kernel import SGLangEngine
from omni_flow.compute.sglang.pages import LOT
from omni_flow.compute.sglang.worker import namespace_of
from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.launch import start
from omni_flow.data.messages import L2
from omni_flow.data.pool_spec import PoolSpec
from omni_flow.data.server_config import ServerConfig

PAGE, PAGES, QUOTA = 16, 400, 64
FOLDER = kit.GOLDENS / "deepseek_v2_lite"
"""Its pages have the size of those of the full layout's golden as well."""
both_layouts = pytest.mark.parametrize("model", [kit.MODELS[0], pytest.param(kit.MODELS[1], marks=pytest.mark.long)])


@contextmanager
def serving(path: str, movers: tuple[tuple[str, ...], ...] = (), **tiers: int) -> Iterator[str]:
    page_bytes = kv_layout(read_config(FOLDER)).page_bytes(PAGE, "float32")
    pool = PoolSpec(name="kv", page_bytes=page_bytes, padding=1, **tiers)
    process = start(ServerConfig(path=path, pools=(pool,), huge=False, movers=movers))
    yield path
    process.terminate()
    assert process.wait(20) == 0


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[str]:
    with serving(str(tmp_path / "memory.sock"), l1_pages=PAGES) as path:
        yield path


def config(manager: str, model: str = FOLDER.name, **more: object) -> EngineConfig:
    folder = str(kit.GOLDENS / model)
    return EngineConfig(model=folder, page_size=PAGE, max_tokens=QUOTA * PAGE, manager=manager, pool="kv", **more)


def used(manager: str) -> tuple[int, int]:
    """Pages reserved and pages pinned in the manager."""
    with MemoryManagerClient(manager, name="viewer", role="viewer") as client:
        while client.stats()["reclaims_running"]:
            client.ping()
        sessions = client.inspect()
        assert client.check() == []
    held = [session["held"]["kv"] for session in sessions]
    return sum(reserved for reserved, _ in held), sum(pinned for _, pinned in held)


@both_layouts
def test_what_one_engine_computed_another_continues_and_a_killed_one_gives_everything_back(
    manager: str, model: str
) -> None:
    asyncio.run(_two_engines(manager, model))


async def _two_engines(manager: str, model: str) -> None:
    oracle = kit.oracle(kit.GOLDENS / model)
    random = np.random.default_rng(2)
    prompts = [random.integers(3, 256, length).tolist() for length in (15, 16, 17, 64, 65, 200)]
    expected = [kit.oracle_greedy(oracle, prompt, 8) for prompt in prompts]
    asked = [kit.greedy(prompt, 8, logits=True) for prompt in prompts]
    first, second = SGLangEngine(config(manager, model)), SGLangEngine(config(manager, model))
    await asyncio.gather(first.start(), second.start())
    try:
        # one of them loaded the weights, the other mapped them
        assert sum([(await engine.stats())["weights_mapped"] for engine in (first, second)]) == 1
        alone = [await kit.answer(first, one) for one in asked]
        assert [one.end.cached_tokens for one in alone] == [0] * 6
        # the other engine finds every whole page and goes on from it; all at once, in one batch
        batch = await asyncio.gather(*(kit.answer(second, one) for one in asked))
        assert [one.end.cached_tokens for one in batch] == [0, 0, 16, 48, 64, 192]
        for got in (alone, batch):
            for one, wanted in zip(got, expected, strict=True):
                kit.check_answer(one, *wanted)
        # prefill in one and decode in the other: the golden tokens
        case = kit.golden(model)
        prompt, tokens = case["in.input_ids"][0].tolist(), case["out.greedy_tokens"][0].tolist()
        begun = await kit.answer(first, kit.greedy(prompt, 1, logits=True))
        ended = await kit.answer(second, kit.greedy(prompt + begun.tokens, len(tokens) - 1, logits=True))
        assert ended.end.cached_tokens == PAGE
        kit.check_answer(begun, tokens[:1], case["out.prefill_logits"][0, -1:])
        kit.check_answer(ended, tokens[1:], case["out.decode_logits"][0])
        # kill it in mid-decode: its requests end with an error, its pages and pins are gone, the first goes on
        running = asyncio.create_task(kit.answer(second, kit.greedy(prompts[5], 500)))
        async for _ in second.generate(kit.greedy(prompts[4], 3)):
            break
        os.kill(second.pid, signal.SIGKILL)
        with pytest.raises(EngineDied):
            await running
        stats = await first.stats()
        reserved, pinned = used(manager)
        assert (reserved, pinned) == (stats["leased"] + stats["held"], stats["pinned"])
        again = await kit.answer(first, asked[5])
        kit.check_answer(again, *expected[5])
        assert again.end.cached_tokens == 192
        with pytest.raises(PromptTooLong, match=f"quota {QUOTA * PAGE}"):
            await kit.answer(first, kit.greedy([5] * (QUOTA * PAGE), 1))
    finally:
        await asyncio.gather(first.close(), second.close())
    assert used(manager) == (0, 0)
    # a new engine has the pages and the weights of the dead ones
    async with SGLangEngine(config(manager, model)) as third:
        assert (await third.stats())["weights_mapped"] == 1
        warm = await kit.answer(third, asked[5])
        kit.check_answer(warm, *expected[5])
        assert warm.end.cached_tokens == 192
    assert used(manager) == (0, 0)


@both_layouts
def test_pages_that_went_to_the_second_tier_come_back_while_others_run(tmp_path: Path, model: str) -> None:
    random = np.random.default_rng(4)
    prompts = [random.integers(3, 256, 800).tolist() for _ in range(7)]

    async def run(manager: str) -> None:
        expected = kit.oracle_greedy(kit.oracle(kit.GOLDENS / model), prompts[0], 4)
        page_bytes = kv_layout(read_config(kit.GOLDENS / model)).page_bytes(PAGE, "float32")
        async with SGLangEngine(config(manager, model)) as engine:
            await kit.answer(engine, kit.greedy(prompts[0], 1))
            keys = PageChain(namespace_of(engine.config).root()).upto(prompts[0], 799, PAGE)
            with MemoryManagerClient(manager, name="test") as client:
                found, room = client.lookup("kv", keys), client.reserve("kv", len(keys), tier=L2)
                upper, lower = (client.arena(f"kv/{tier}", write=True).pages(page_bytes, 220) for tier in ("l1", "l2"))
                lower[room.slots] = upper[found.slots]
                client.commit("kv", room.token, keys)
                client.unpin("kv", found.lease)
                for prompt in prompts[1:]:
                    await kit.answer(engine, kit.greedy(prompt, 1))
                assert set(client.probe("kv", keys).tolist()) == {L2}
                before = (await engine.stats())["loaded_pages"]
                with kit.stopped(kit.mover(client, "copy mover")):
                    again = await kit.beside(engine, kit.greedy(prompts[0], 4, logits=True))
            got = await again
            kit.check_answer(got, *expected)
            assert got.end.hits == (0, 784, 0)
            stats = await engine.stats()
            assert stats["loaded_pages"] - before >= 784 // PAGE
            assert stats["loading"] == 0

    with serving(str(tmp_path / "memory.sock"), (("copy",),), l1_pages=220, l2_pages=400, staging=8) as manager:
        asyncio.run(run(manager))


async def refusal(config: EngineConfig) -> ComputeError:
    """What an engine is refused with at its start."""
    with pytest.raises(ComputeError) as caught:
        async with SGLangEngine(config):
            raise AssertionError("started")
    return caught.value


def test_an_engine_that_does_not_fit_its_pool_says_so(manager: str) -> None:
    async def run() -> None:
        wrong, missing = await asyncio.gather(
            refusal(msgspec.structs.replace(config(manager), page_size=32)),
            refusal(msgspec.structs.replace(config(manager), pool="other")),
        )
        # Alone: the numbers count what others hold, were it only while they start.
        large = await refusal(msgspec.structs.replace(config(manager), max_tokens=2 * PAGES * PAGE))
        assert re.search(r"pages of \d+ bytes", wrong.message)
        assert "no pool 'other'" in missing.message
        assert re.search(rf"quota of {2 * PAGES + LOT} pages in pool kv, {PAGES - 1} of {PAGES - 1}", large.message)

    asyncio.run(run())


def test_an_engine_refuses_a_checkpoint_that_does_not_fit_and_names_the_tensor(tmp_path: Path) -> None:
    norm, head = "model.norm.weight", "lm_head.weight"
    whole = load_file(FOLDER / "model.safetensors")
    spoilt: dict[str, dict[str, Any]] = {
        f"missing: {norm}": {name: tensor for name, tensor in whole.items() if name != norm},
        "unknown: model.extra.weight": whole | {"model.extra.weight": whole[norm]},
        f"misshaped: {head} is (255, 64), not (256, 64)": whole | {head: whole[head][:-1].copy()},
        f"of wrong dtype: {norm} is I32": whole | {norm: whole[norm].astype(np.int32)},
    }

    async def run() -> None:
        configs = []
        for at, tensors in enumerate(spoilt.values()):
            folder = tmp_path / str(at)
            folder.mkdir()
            shutil.copy(FOLDER / "config.json", folder)
            save_file(tensors, folder / "model.safetensors")
            configs.append(EngineConfig(model=str(folder)))
        refused = await asyncio.gather(*map(refusal, configs))
        for words, error in zip(spoilt, refused, strict=True):
            assert isinstance(error, BadCheckpoint)
            assert words in error.message

    asyncio.run(run())
