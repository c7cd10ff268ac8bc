"""Fixed-row forwards against plain PyTorch with a mask: many steps over the same pages, next to ordinary decoding."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import engine_kit as kit
import numpy as np
import pytest
import rows_kit
import step_hooks
import torch

from omni_flow.compute.engine import Embeddings, Floats, Tokens
from omni_flow.compute.errors import BadRequest, EngineDied, EngineFull, ForwardFailed, SessionClosed
from omni_flow.compute.sglang.config import EngineConfig
from omni_flow.compute.sglang.kernel import SGLangEngine
from omni_flow.data.identity import media_digest
from omni_flow.testing import tiny_checkpoint

HIDDEN, PAGE, WINDOW = 64, 16, 24
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def tiny_olmo(folder: Path) -> Any:
    """An Olmo3: every other layer sees `WINDOW` tokens only."""
    from transformers import Olmo3Config, Olmo3ForCausalLM

    torch.manual_seed(0)
    config = Olmo3Config(
        vocab_size=256, hidden_size=HIDDEN, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=False, sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2, attn_implementation="eager",
        rope_parameters=ROPE, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = rows_kit.written(Olmo3ForCausalLM(config), folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_scaling": ROPE}))  # the name that SGLang reads
    return model


def noise(seed: int, rows: int) -> Floats:
    return rows_kit.noise(seed, rows, HIDDEN)


def test_steps_over_the_same_rows_equal_a_masked_forward_and_disturb_nobody(tmp_path: Path) -> None:
    oracle = rows_kit.tiny_qwen(tmp_path)
    embed = oracle.model.embed_tokens.weight.detach()
    random = np.random.default_rng(1)
    text = random.integers(0, 256, 70).tolist()
    other = random.integers(0, 256, 21).tolist()

    async def run() -> None:
        config = EngineConfig(model=str(tmp_path), page_size=PAGE, max_tokens=60 * PAGE, max_running=4)
        async with SGLangEngine(config) as engine:
            decoded = kit.oracle_greedy(oracle, other, 40)[0]
            decoding = asyncio.create_task(kit.answer(engine, kit.greedy(other, 40)))
            picture = Embeddings(noise(50, 20), media_digest(b"picture", "", "test", ""), placeholder=3)
            contexts = [[Tokens(text)], [Tokens(other[:5]), picture]]
            known = [embed[text], torch.cat((embed[other[:5]], torch.tensor(picture.rows)))]
            async with engine.fixed_rows(contexts[0], 37) as first, engine.fixed_rows(contexts[1], 12) as second:
                assert (first.cached, second.cached) == (0, 0)
                for step in range(4):
                    rows = [noise(step, 37), noise(step + 10, 12)]
                    causal = [at < 3 for at in range(12)]
                    got = await asyncio.gather(first.step(rows[0]), second.step(rows[1], causal))
                    for given, before, flags, hidden in zip(rows, known, (None, causal), got, strict=True):
                        wanted = rows_kit.states(oracle, torch.cat((before, torch.tensor(given))), len(given), flags)
                        np.testing.assert_allclose(hidden, wanted, rtol=1e-4, atol=1e-4)
                with pytest.raises(BadRequest, match="shape"):
                    await first.step(noise(0, 36))
                # another session finds the context in the cache, and text that goes on behind it as well
                async with engine.fixed_rows(contexts[0], 5) as third:
                    assert third.cached == 64
                    hidden = await third.step(noise(7, 5))
                    wanted = rows_kit.states(oracle, torch.cat((known[0], torch.tensor(noise(7, 5)))), 5)
                    np.testing.assert_allclose(hidden, wanted, rtol=1e-4, atol=1e-4)
                goes_on = await kit.answer(engine, kit.greedy([*text, 9], 5))
                assert goes_on.end.cached_tokens == 64
                assert goes_on.tokens == kit.oracle_greedy(oracle, [*text, 9], 5)[0]
                counts = await engine.stats()
                assert counts["held"] > 0
            assert (await decoding).tokens == decoded
            counts = await engine.stats()
            assert counts["held"] == counts["locked"] == 0
            assert counts["available"] + counts["pinned"] == counts["quota"]
            # what does not fit is refused, and nothing of it stays
            with pytest.raises(BadRequest, match="2000 rows"):
                async with engine.fixed_rows(contexts[0], 2000):
                    pass
            async with engine.fixed_rows(contexts[0], 500), engine.fixed_rows(contexts[1], 300):
                with pytest.raises(EngineFull, match="pages left"):
                    async with engine.fixed_rows(contexts[1], 300):
                        pass
            assert (await engine.stats())["held"] == 0

    asyncio.run(run())


def test_in_layers_with_a_sliding_window_rows_see_each_other_and_the_window_of_the_context(tmp_path: Path) -> None:
    oracle = tiny_olmo(tmp_path)
    embed = oracle.model.embed_tokens.weight.detach()
    text = np.random.default_rng(1).integers(3, 256, 70).tolist()

    async def run() -> None:
        async with SGLangEngine(EngineConfig(model=str(tmp_path), page_size=PAGE, max_tokens=60 * PAGE)) as engine:
            decoded = kit.oracle_greedy(oracle, text, 40)[0]
            assert (await kit.answer(engine, kit.greedy(text, 40, tenant=b"other"))).tokens == decoded
            # more rows than the window is wide; the context is new at first and then cached
            for rows, causal in ((37, None), (37, [at % 3 == 0 for at in range(37)]), (1, None), (5, [True] * 5)):
                async with engine.fixed_rows([Tokens(text)], rows) as session:
                    for step in range(2):
                        given = noise(step + rows, rows)
                        got = await session.step(given, causal)
                        wanted = rows_kit.states(
                            oracle, torch.cat((embed[text], torch.tensor(given))), rows, causal, WINDOW
                        )
                        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)

    asyncio.run(run())


def test_rows_over_mla_equal_a_masked_forward(tmp_path: Path) -> None:
    folder = tiny_checkpoint("deepseek_v2", tmp_path)
    oracle = kit.oracle(folder)
    embed = oracle.model.embed_tokens.weight.detach()
    text = np.random.default_rng(1).integers(0, 256, 70).tolist()

    async def run() -> None:
        config = EngineConfig(model=str(folder), page_size=PAGE, max_tokens=60 * PAGE, rows_at_start=(40,))
        async with SGLangEngine(config) as engine:
            assert (await engine.stats())["row_sizes"] == 1
            for rows, causal, context in (
                (37, None, text),
                (37, [at % 2 == 0 for at in range(37)], text),
                (3, None, [5]),
            ):
                async with engine.fixed_rows([Tokens(context)], rows) as session:
                    for step in range(2):
                        given = noise(step + rows, rows)
                        got = await session.step(given, causal)
                        wanted = rows_kit.states(oracle, torch.cat((embed[context], torch.tensor(given))), rows, causal)
                        np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-4)
            counts = await engine.stats()
            # 37 rows run in the forward that was made at the start, of 48
            assert (counts["row_sizes"], counts["row_forwards"]) == (2, 6)

    asyncio.run(run())


def test_a_forward_that_raises_refuses_its_steps_and_the_next_one_runs(tmp_path: Path) -> None:
    oracle = rows_kit.tiny_qwen(tmp_path)
    embed = oracle.model.embed_tokens.weight.detach()
    text = np.random.default_rng(1).integers(0, 256, 40).tolist()
    once = Embeddings(np.full((3, HIDDEN), step_hooks.ONCE, np.float32), media_digest(b"x", "", "test", ""), 3)
    said = r"fixed-row forward of Qwen3ForCausalLM raised ArithmeticError: rows as large as 1e\+0\d \(step_hooks\.py:"

    async def run() -> None:
        config = EngineConfig(model=str(tmp_path), page_size=PAGE, max_tokens=60 * PAGE)
        async with SGLangEngine(config, step_hook=step_hooks.Breaks) as engine:
            decoding = asyncio.create_task(kit.answer(engine, kit.greedy(text, 40)))
            async with engine.fixed_rows([Tokens(text), once], 5) as two, engine.fixed_rows([Tokens(text)], 7) as one:
                with pytest.raises(ForwardFailed, match=said):
                    await two.step(noise(2, 5))
                for _ in range(2):  # with the context, and behind it
                    with pytest.raises(ForwardFailed, match=said):
                        await one.step(noise(1, 7) + np.float32(step_hooks.ALWAYS))
                    given = noise(1, 7)
                    wanted = rows_kit.states(oracle, torch.cat((embed[text], torch.tensor(given))), 7)
                    np.testing.assert_allclose(await one.step(given), wanted, rtol=1e-4, atol=1e-4)
                # what a context is made of raises once, and is computed with the next step
                before = torch.cat((embed[text], torch.tensor(once.rows), torch.tensor(noise(2, 5))))
                for _ in range(2):
                    wanted = rows_kit.states(oracle, before, 5)
                    np.testing.assert_allclose(await two.step(noise(2, 5)), wanted, rtol=1e-3, atol=1e-3)
            assert (await decoding).tokens == kit.oracle_greedy(oracle, text, 40)[0]
            counts = await engine.stats()
            assert counts["held"] == counts["locked"] == counts["running"] == 0
            assert counts["available"] + counts["pinned"] == counts["quota"]

    asyncio.run(run())


def test_a_session_that_was_left_and_one_whose_engine_is_gone_refuse_steps(tmp_path: Path) -> None:
    rows_kit.tiny_qwen(tmp_path)

    async def run() -> None:
        engine = SGLangEngine(EngineConfig(model=str(tmp_path), page_size=PAGE, max_tokens=60 * PAGE))
        await engine.start()
        async with engine.fixed_rows([Tokens([1, 2, 3])], 4) as session:
            alone = [await session.step(noise(seed, 4)) for seed in range(3)]
            # a step that nobody waits for any more leaves its answer to nobody; steps at once run one after the other
            left = asyncio.create_task(session.step(noise(0, 4)))
            await asyncio.sleep(0)
            left.cancel()
            again = await asyncio.gather(*(session.step(noise(seed, 4)) for seed in range(3)))
            np.testing.assert_allclose(again, alone, rtol=1e-5, atol=1e-5)
            waiting = asyncio.create_task(session.step(noise(0, 4)))
            await asyncio.sleep(0)
        for step in (waiting, session.step(noise(0, 4))):
            with pytest.raises(SessionClosed, match="was left"):
                await step
        async with engine.fixed_rows([Tokens([1, 2, 3])], 4) as session:
            await engine.close()
            with pytest.raises(EngineDied, match="closed"):
                await session.step(noise(0, 4))
        for ask in (engine.stats(), kit.answer(engine, kit.greedy([1], 1))):
            with pytest.raises(EngineDied, match="closed"):
                await ask

    asyncio.run(run())
