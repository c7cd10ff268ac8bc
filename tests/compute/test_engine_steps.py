"""Step hooks against plain PyTorch: codes from heads of their own, embeddings fed back, next to ordinary requests."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import engine_kit as kit
import numpy as np
import pytest
import step_hooks

from omni_flow.compute.engine import Request, Tokens
from omni_flow.compute.errors import BadRequest, ForwardFailed
from omni_flow.compute.sampling import Sampling
from omni_flow.compute.sglang.config import EngineConfig
from omni_flow.compute.sglang.kernel import SGLangEngine
from omni_flow.testing import tiny_checkpoint


def reference(model: Any, prompt: list[int], codes: int, count: int) -> tuple[list[int], list[bytes | None]]:
    """Tokens and emitted bytes of `count` steps, the whole sequence computed anew each time."""
    import torch

    heads, embeddings = step_hooks.heads(model.config.hidden_size)
    with torch.inference_mode():
        rows = model.model.embed_tokens(torch.tensor(prompt))
        tokens: list[int] = []
        emitted: list[bytes | None] = []
        for step in range(count):
            state = model.model(inputs_embeds=rows[None], use_cache=False).last_hidden_state[0, -1]
            if step < codes:
                chosen = [int((heads[book] @ state).argmax()) for book in range(step_hooks.BOOKS)]
                emitted.append(bytes(chosen))
                tokens.append(step_hooks.MARK)
                row = sum(embeddings[book][code] for book, code in enumerate(chosen))
            else:
                tokens.append(int(model.lm_head(state).argmax()))
                emitted.append(None)
                row = model.model.embed_tokens.weight[tokens[-1]]
            rows = torch.cat((rows, row[None]))
    return tokens, emitted


def asked(prompt: list[int], codes: int | None, count: int) -> Request:
    steps = None if codes is None else {"codes": codes}
    return Request(spans=[Tokens(prompt)], sampling=Sampling(max_tokens=count, ignore_eos=True), steps=steps)


def test_codes_and_text_equal_plain_pytorch_in_mixed_batches_and_after_retraction(tmp_path: Path) -> None:
    folder = tiny_checkpoint("deepseek_v2", tmp_path)
    oracle = kit.oracle(folder)
    random = np.random.default_rng(3)

    def prompt(length: int) -> list[int]:
        return [int(token) for token in random.integers(0, 256, length)]

    async def run() -> None:
        config = EngineConfig(model=str(folder), page_size=16, max_tokens=320, chunk=32)
        async with SGLangEngine(config, step_hook=step_hooks.Codes) as engine:
            cases = [(prompt(70), 6, 12), (prompt(5), 3, 12), (prompt(33), None, 12), (prompt(16), 0, 12)]
            for _ in range(2):  # cold, then with the prompts cached
                got = await asyncio.gather(*(kit.answer(engine, asked(*case)) for case in cases))
                for (given, codes, count), one in zip(cases, got, strict=True):
                    tokens, emitted = reference(oracle, given, codes or 0, count)
                    assert one.tokens == tokens
                    assert [event.emitted for event in one.events] == emitted
            # too much for the pool: requests are retracted in mid-codes and computed again
            cases = [(prompt(40), 60, 80) for _ in range(4)]
            got = await asyncio.gather(*(kit.answer(engine, asked(*case)) for case in cases))
            for (given, codes, count), one in zip(cases, got, strict=True):
                tokens, emitted = reference(oracle, given, codes or 0, count)
                assert one.tokens == tokens
                assert [event.emitted for event in one.events] == emitted
            assert (await engine.stats())["held"] == 0

    asyncio.run(run())


def test_what_an_engine_process_warns_of_while_it_starts_is_in_the_log_of_its_role(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_checkpoint("deepseek_v2", tmp_path)

    async def run() -> int:
        async with SGLangEngine(EngineConfig(model=str(folder)), step_hook=step_hooks.Warns) as engine:
            return engine.pid

    pid = asyncio.run(run())
    assert f"engine {pid}: made of 2 codebooks" in caplog.messages


def test_steps_without_a_hook_are_refused() -> None:
    async def run() -> None:
        engine = SGLangEngine(EngineConfig(model="nowhere"))
        await anext(engine.generate(asked([1], 1, 1)))

    with pytest.raises(BadRequest, match="no step hook"):
        asyncio.run(run())
    with pytest.raises(ValueError, match="can't be imported"):
        SGLangEngine(EngineConfig(model="nowhere"), step_hook=lambda model: step_hooks.Codes(model))


def test_a_hook_that_raises_ends_its_requests_with_its_name_and_nobody_elses(tmp_path: Path) -> None:
    folder = tiny_checkpoint("deepseek_v2", tmp_path)
    oracle = kit.oracle(folder)

    def breaks(how: str, after: int = 0) -> Request:
        steps = {"breaks": how, "after": after}
        return Request(spans=[Tokens([5, 6, 7])], sampling=Sampling(max_tokens=9, ignore_eos=True), steps=steps)

    async def run() -> None:
        config = EngineConfig(model=str(folder), page_size=16, max_tokens=320, chunk=32)
        async with SGLangEngine(config, step_hook=step_hooks.Breaks) as engine:
            plain = kit.oracle_greedy(oracle, [5, 6, 7], 60)[0]
            other = asyncio.create_task(kit.answer(engine, kit.greedy([5, 6, 7], 60)))
            for how, said in (
                ("begin", "LookupError: no such voice"),
                ("step", "LookupError: no such code"),
                ("tokens", "ValueError: tokens has shape"),
                ("emitted", "ValueError: emitted is not bytes"),
                ("nothing", "AttributeError"),
            ):
                for after in (0, 3):
                    with pytest.raises(ForwardFailed, match=rf"step_hooks:Breaks raised {said}.*\.py:\d+ in"):
                        await kit.answer(engine, breaks(how, after))
            both = await asyncio.gather(
                kit.answer(engine, breaks("step", 2)), kit.answer(engine, breaks("never")), return_exceptions=True
            )
            assert isinstance(both[0], ForwardFailed)
            fine = await kit.answer(engine, breaks("never"))
            assert [event.emitted for event in fine.events] == [b"fine"] * 9
            assert fine.tokens == plain[:9]
            assert (await other).tokens == plain
            counts = await engine.stats()
            assert counts["held"] == counts["locked"] == counts["running"] == 0

    asyncio.run(run())
