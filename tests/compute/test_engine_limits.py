"""An engine at the limits of its room: the longest prompts, fixed rows that have nearly all, a queue that is full."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engine_kit as kit
import numpy as np
import pytest
import rows_kit
from engine_kit import Serving
from step_hooks import GATE, GATED, Gate

from omni_flow.compute.engine import Embeddings, Request, Tokens
from omni_flow.compute.errors import BadRequest, EngineDied, EngineFailed, EngineFull, PromptTooLong
from omni_flow.compute.sampling import Sampling
from omni_flow.compute.sglang import kernel
from omni_flow.compute.sglang.batch_sampling import end_tokens
from omni_flow.compute.sglang.cache import written
from omni_flow.compute.sglang.config import EngineConfig
from omni_flow.compute.sglang.kernel import SGLangEngine
from omni_flow.compute.sglang.worker import namespace_of
from omni_flow.data.identity import media_digest

PAGE, QUOTA, HIDDEN = 16, 24, 64


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """The model takes far more than the quota; it has no tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    rows_kit.tiny_qwen(folder)
    config = EngineConfig(model=str(folder), page_size=PAGE, max_tokens=QUOTA * PAGE, max_running=4, max_waiting=2)
    engine = SGLangEngine(config)
    with asyncio.Runner() as loop:
        loop.run(engine.start())
        yield Serving(engine, folder, loop)
        loop.run(engine.close())


def prompt_of(length: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 256, length)]


@asynccontextmanager
async def at_once(engine: SGLangEngine, pages: int, *more: Coroutine[Any, Any, Any]) -> AsyncIterator[list[Any]]:
    """Fixed rows of so many pages and one, which come together with `more` requests: the engine stands still until all
    are written."""
    with kit.stopped(engine.pid):
        begun = [asyncio.create_task(one) for one in more]
        rows = engine.fixed_rows([Tokens([1])], pages * PAGE)
        opening = asyncio.create_task(rows.__aenter__())
        for _ in range(2):
            await asyncio.sleep(0)
    await opening
    try:
        yield begun
    finally:
        await rows.__aexit__(None, None, None)


async def until(engine: SGLangEngine, name: str, least: int) -> None:
    """Until this count is so large."""
    async with asyncio.timeout(60):
        while (await engine.stats())[name] < least:
            pass  # each look is a round trip to the engine


def test_the_longest_prompts_that_are_taken_are_answered_and_longer_ones_are_refused_with_numbers(
    serving: Serving,
) -> None:
    engine = serving.engine
    longest = engine.ready.max_prompt
    assert longest == (QUOTA - 2) * PAGE

    async def run() -> None:
        for length in (longest - PAGE, longest - PAGE + 1, longest - 1, longest):
            one = await kit.answer(engine, kit.greedy(prompt_of(length, length), 40, logits=True))
            assert 1 <= len(one.tokens) < 2 * PAGE
            assert one.logits.shape[0] == len(one.tokens)
        with pytest.raises(PromptTooLong, match=f"{longest + 1} tokens; model and pool take {longest}"):
            await kit.answer(engine, kit.greedy(prompt_of(longest + 1, 1), 1))
        assert len((await kit.answer(engine, kit.greedy([5], 3))).tokens) == 3

    serving.run(run())


def test_who_waits_for_room_that_fixed_rows_have_is_answered_when_they_are_left(serving: Serving) -> None:
    engine = serving.engine

    async def run() -> None:
        prompt = prompt_of(100, 3)
        alone = (await kit.answer(engine, kit.greedy(prompt, 5))).tokens
        async with engine.fixed_rows([Tokens([1])], (QUOTA - 4) * PAGE):
            waiting = asyncio.create_task(kit.answer(engine, kit.greedy(prompt, 5)))
            await until(engine, "waiting", 1)
        assert (await asyncio.wait_for(waiting, 60)).tokens == alone
        assert (await serving.idle())["held"] == 0

    serving.run(run())


def test_a_running_request_whose_room_fixed_rows_take_waits_for_them_and_is_answered(serving: Serving) -> None:
    engine = serving.engine

    async def run() -> None:
        asked = kit.greedy(prompt_of(20, 4), 300)
        alone = (await kit.answer(engine, asked)).tokens
        events = engine.generate(asked)
        tokens = [(await anext(events)).token]
        async with at_once(engine, 8):
            await until(engine, "waiting", 1)
        tokens += [event.token async for event in events if hasattr(event, "token")]
        assert tokens == alone
        assert (await serving.idle())["held"] == 0

    serving.run(run())


def test_who_goes_back_to_wait_is_not_refused_where_the_queue_is_full(serving: Serving) -> None:
    engine = serving.engine

    async def run() -> None:
        asked = [kit.greedy(prompt_of(20, seed), 120) for seed in (5, 6)]
        alone = [(await kit.answer(engine, one)).tokens for one in asked]
        running = [asyncio.create_task(kit.answer(engine, one)) for one in asked]
        await until(engine, "running", 2)
        more = [kit.answer(engine, kit.greedy(prompt_of(300, seed), 1)) for seed in (7, 8)]
        async with at_once(engine, 11, *more) as queued:
            await until(engine, "waiting", 3)
        assert [one.tokens for one in await asyncio.wait_for(asyncio.gather(*running), 60)] == alone
        await asyncio.wait_for(asyncio.gather(*queued), 60)
        assert (await serving.idle())["held"] == 0

    serving.run(run())


def picture(rows: int, name: bytes = b"picture") -> Embeddings:
    return Embeddings(np.zeros((rows, HIDDEN), np.float32), media_digest(name, "", "test", ""), placeholder=3)


@pytest.mark.parametrize(
    ("request_", "match"),
    [
        (Request(spans=[picture(3), picture(4)]), "embeddings of 3 and of 4 rows have one digest"),
        (Request(spans=[Tokens([1])], session="x" * 513), "session has 513 characters"),
        (Request(spans=[Tokens([1])], sampling=Sampling(stop=("a",))), "no tokenizer"),
    ],
)
def test_what_would_end_the_engine_is_refused_and_it_serves_on(serving: Serving, request_: Request, match: str) -> None:
    async def run() -> None:
        with pytest.raises(BadRequest, match=match):
            await kit.answer(serving.engine, request_)
        await kit.answer(serving.engine, kit.greedy([5], 1))

    serving.run(run())


def test_the_end_of_a_session_without_a_name_is_nobodys_and_a_long_name_is_refused(serving: Serving) -> None:
    async def run() -> None:
        await serving.engine.end_session("")
        with pytest.raises(BadRequest, match="session has 600 characters"):
            await serving.engine.end_session("x" * 600)
        await kit.answer(serving.engine, kit.greedy([5], 1))

    serving.run(run())


def test_an_engine_that_hangs_with_unsent_requests_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows_kit.tiny_qwen(tmp_path, max_position_embeddings=1 << 18)
    monkeypatch.setattr(kernel, "CLOSE_GRACE_S", 0.2)
    large = Embeddings(np.zeros((100_000, HIDDEN), np.float32), media_digest(b"", "", "test", ""), placeholder=3)

    async def run() -> None:
        config = EngineConfig(model=str(tmp_path), page_size=PAGE, max_tokens=1 << 17)
        engine = SGLangEngine(config)
        await engine.start()
        os.kill(engine.pid, signal.SIGSTOP)
        request = asyncio.create_task(kit.answer(engine, Request(spans=[large])))
        await asyncio.wait((request,), timeout=0.5)
        assert engine._writer.transport.get_write_buffer_size() > 0
        await engine.close()
        with pytest.raises(EngineDied):
            await request

    asyncio.run(run())


@pytest.fixture
def gated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[SGLangEngine, Path]:
    """An engine that waits at a pipe in the second chunk of a prompt; not started."""
    rows_kit.tiny_qwen(tmp_path)
    monkeypatch.setenv(GATE, str(tmp_path / "pipe"))
    os.mkfifo(tmp_path / "pipe")
    config = EngineConfig(
        model=str(tmp_path), page_size=PAGE, max_tokens=QUOTA * PAGE, chunk=len(GATED), extra={"watchdog_timeout": 40.0}
    )
    return SGLangEngine(config, step_hook=Gate), tmp_path / "pipe"


def test_fixed_rows_do_not_take_what_a_prompt_still_needs_of_which_some_chunks_are_computed(
    gated: tuple[SGLangEngine, Path],
) -> None:
    engine, pipe = gated

    async def run() -> None:
        async with engine:
            prompt = prompt_of(5 * len(GATED), 8)
            prefill = asyncio.create_task(kit.answer(engine, kit.greedy(prompt, 3)))
            gate = await asyncio.to_thread(pipe.open, "w")
            sessions = [engine.fixed_rows([Tokens([1])], pages * PAGE) for pages in (QUOTA - 5, 8)]
            opening = [asyncio.create_task(session.__aenter__()) for session in sessions]
            for _ in range(2):  # they are written in the turn of the loop behind the next
                await asyncio.sleep(0)
            gate.close()
            with pytest.raises(EngineFull, match="pages left"):
                await opening[0]
            await opening[1]
            tokens = (await prefill).tokens
            await sessions[1].__aexit__(None, None, None)
            pipe.unlink()
            assert (await kit.answer(engine, kit.greedy(prompt, 3))).tokens == tokens

    asyncio.run(run())


@pytest.mark.long
@pytest.mark.timeout(600)
def test_an_engine_that_hangs_in_a_forward_ends_itself_and_not_its_role(gated: tuple[SGLangEngine, Path]) -> None:
    engine, _ = gated

    async def run() -> None:
        async with engine:
            with pytest.raises(EngineDied, match=r"(?s)status -9.*watchdog timeout"):
                await kit.answer(engine, kit.greedy(prompt_of(5 * len(GATED), 8), 3))

    asyncio.run(run())


def test_a_page_in_which_the_last_step_still_writes_is_not_sealed() -> None:
    """With overlap SGLang counts the token that the step behind the last one writes: 32 here."""
    request = SimpleNamespace(origin_input_ids=[1] * 30, output_ids=[2, 3])
    assert written(request) == 31
    assert written(SimpleNamespace(origin_input_ids=[1] * 30, output_ids=[])) == 30


def test_engines_share_pages_only_where_their_further_arguments_make_the_same_kv() -> None:
    def space(**extra: object) -> object:
        return namespace_of(EngineConfig(model=str(kit.GOLDENS / "deepseek_v2"), extra=extra))

    assert space(quantization="fp8") == space(quantization="fp8", attention_backend="triton") != space()
    assert space(json_model_override_args="{}") not in (space(), space(quantization="fp8"))
    assert space(max_prefill_tokens=100) == space(kv_cache_dtype=None) == space()


def test_before_min_tokens_no_end_token_of_the_checkpoint_or_of_its_tokenizer_is_chosen() -> None:
    tokenizer = SimpleNamespace(eos_token_id=7, additional_stop_token_ids={8})
    assert end_tokens(SimpleNamespace(eos_token_ids={5}, tokenizer=tokenizer)) == {5, 7, 8}
    assert end_tokens(SimpleNamespace(eos_token_ids=None, tokenizer=None)) == set()


def test_an_engine_that_finds_no_descriptor_says_so_and_may_be_started_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows_kit.tiny_qwen(tmp_path)

    def none_left() -> None:
        raise OSError(24, "Too many open files")

    async def run() -> None:
        before = len(os.listdir("/proc/self/fd"))
        engine = SGLangEngine(EngineConfig(model=str(tmp_path), page_size=PAGE, max_tokens=QUOTA * PAGE))
        with monkeypatch.context() as patch:
            patch.setattr(kernel, "RowsFile", none_left)
            with pytest.raises(EngineFailed, match="Too many open files"):
                await engine.start()
        assert len(os.listdir("/proc/self/fd")) == before
        await engine.close()
        async with engine:
            await kit.answer(engine, kit.greedy([5], 1))

    asyncio.run(run())
