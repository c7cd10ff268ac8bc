"""DeepSeek-V2 through SGLang on a CPU against the goldens and transformers: tokens equal, logits within 1e-4."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import engine_kit as kit
import numpy as np
import pytest

from omni_flow.compute.sglang.config import EngineConfig
from omni_flow.compute.sglang.kernel import SGLangEngine

PAGE = 16


@asynccontextmanager
async def engine_of(model: str, page_size: int = PAGE, **more: Any) -> AsyncIterator[SGLangEngine]:
    config = EngineConfig(model=str(kit.GOLDENS / model), page_size=page_size, max_tokens=2048, **more)
    async with SGLangEngine(config) as engine:
        yield engine


def prompts(*lengths: int, seed: int = 5) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(3, 256, length).tolist() for length in lengths]


@pytest.mark.parametrize("model", kit.MODELS)
def test_tokens_and_logits_equal_the_goldens_and_the_oracle_in_every_way_to_the_same_prefix(model: str) -> None:
    asyncio.run(_every_way(model))


async def _every_way(model: str) -> None:
    case = kit.golden(model)
    prompt = case["in.input_ids"][0].tolist()
    wanted = case["out.greedy_tokens"][0].tolist()
    oracle = kit.oracle(kit.GOLDENS / model)
    async with engine_of(model, chunk=PAGE) as engine:
        # monolithic, in chunks of one page
        got = await kit.answer(engine, kit.greedy(prompt, len(wanted), logits=True))
        assert got.tokens == wanted
        assert got.end.cached_tokens == 0
        np.testing.assert_allclose(got.logits[0], case["out.prefill_logits"][0, -1], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(got.logits[1:], case["out.decode_logits"][0], rtol=1e-4, atol=1e-4)
        # a longer one in 19 chunks; `test_a_whole_prefill` asks an engine without chunks for it
        long = prompts(300)[0]
        got = await kit.answer(engine, kit.greedy(long, 5, logits=True))
        kit.check_answer(got, *kit.oracle_greedy(oracle, long, 5))
        # every split into cached and new: a prompt is cached up to the last whole page before its end
        long = prompts(5 * PAGE)[0]
        tokens, logits = kit.oracle_greedy(oracle, long, 3)
        for cached in range(0, len(long) + 1, PAGE):
            other = prompts(5 * PAGE, seed=100 + cached)[0]
            start = long[:cached] + other
            await kit.answer(engine, kit.greedy(start, 1, tenant=bytes([cached])))
            for hit in (min(cached, len(long) - PAGE), len(long) - PAGE):
                got = await kit.answer(engine, kit.greedy(long, 3, logits=True, tenant=bytes([cached])))
                assert got.end.cached_tokens == hit
                kit.check_answer(got, tokens, logits)
        # lengths around a page's end, mixed in one batch, cold and then cached
        mixed = prompts(PAGE - 1, PAGE, PAGE + 1, 1, 3 * PAGE, 40, 7, 2 * PAGE + 1)
        expected = [kit.oracle_greedy(oracle, one, 12) for one in mixed]
        for round_ in range(2):
            many = await asyncio.gather(*(kit.answer(engine, kit.greedy(one, 12, logits=True)) for one in mixed))
            for one, wanted_of_one in zip(many, expected, strict=True):
                kit.check_answer(one, *wanted_of_one)
            assert [one.end.cached_tokens for one in many] == [
                round_ * ((len(one) - 1) // PAGE) * PAGE for one in mixed
            ]
        stats = await engine.stats()
        assert stats["running"] == stats["held"] == stats["locked"] == 0
        assert stats["available"] + stats["pinned"] == stats["quota"]


@pytest.mark.parametrize("model", [kit.MODELS[0], pytest.param(kit.MODELS[1], marks=pytest.mark.long)])
def test_a_whole_prefill_gives_the_oracles_logits_cold_cached_and_after_eviction(model: str) -> None:
    long = prompts(300)[0]
    ask = kit.greedy(long, 5, logits=True)

    async def run() -> None:
        expected = kit.oracle_greedy(kit.oracle(kit.GOLDENS / model), long, 5)
        async with engine_of(model) as engine:
            whole = await kit.answer(engine, ask)
            again = await kit.answer(engine, ask)
            assert (whole.end.cached_tokens, again.end.cached_tokens) == (0, 288)
            for other in prompts(*[900] * 4, seed=9):
                await kit.answer(engine, kit.greedy(other, 2))
            evicted = await kit.answer(engine, ask)
            assert evicted.end.cached_tokens == 0
            for got in (whole, again, evicted):
                kit.check_answer(got, *expected)

    asyncio.run(run())


@pytest.mark.long
def test_a_prompt_may_be_cached_up_to_any_of_its_tokens() -> None:
    page = 2

    async def run() -> None:
        oracle = kit.oracle(kit.GOLDENS / "deepseek_v2_lite")
        long, other = prompts(40)[0], prompts(40, seed=6)[0]
        tokens, logits = kit.oracle_greedy(oracle, long, 4)
        async with engine_of("deepseek_v2_lite", page) as engine:
            for cached in range(len(long) + 1):
                tenant = bytes([cached])
                await kit.answer(engine, kit.greedy(long[:cached] + other, 1, tenant=tenant))
                for hit in (cached // page * page, len(long) - page):
                    got = await kit.answer(engine, kit.greedy(long, 4, logits=True, tenant=tenant))
                    kit.check_answer(got, tokens, logits)
                    assert got.end.cached_tokens == min(hit, len(long) - page)

    asyncio.run(run())
