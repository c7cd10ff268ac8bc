"""The KV of sessions in an engine: kept between turns, moved down after its time, dropped at the end; hits by tier."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import engine_kit as kit
import numpy as np
import pytest
from test_engine_pool import PAGE, PAGES, config, serving

from omni_flow.compute.errors import EngineDied
from omni_flow.compute.prefix import marks
from omni_flow.compute.sglang.kernel import SGLangEngine
from omni_flow.compute.sglang.pages import PageBook, Part
from omni_flow.compute.sglang.pagesource import LocalPages
from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.identity import PageHash
from omni_flow.data.messages import L1, L2


async def until(true: Callable[[], bool]) -> None:
    """Ask until it is so; the test's own time is the limit."""
    while not true():  # noqa: ASYNC110 - another process changes it
        await asyncio.sleep(0.05)


def test_marks_are_spaced_evenly_and_end_with_the_last_page() -> None:
    keys = [PageHash(bytes([n]) * 32) for n in range(40)]
    assert marks([], PAGE) == []
    assert marks(keys[:2], PAGE) == [(16, keys[0]), (32, keys[1])]
    found = marks(keys, PAGE, most=16)
    assert len(found) <= 16
    assert found[-1] == (40 * PAGE, keys[39])
    assert all(key == keys[tokens // PAGE - 1] for tokens, key in found)
    assert {b[0] - a[0] for a, b in pairwise(found)} == {3 * PAGE}


def test_a_book_lets_go_of_a_chain_but_not_of_what_others_use_or_go_on_from() -> None:
    book = PageBook(LocalPages(16))
    keys = [PageHash(bytes([n]) * 32) for n in range(6)]
    (one,) = book.seal(Part(book.root, keys[:4], book.take(4)))()
    (branch,) = book.seal(Part(book.match(keys[:2]), keys[4:], book.take(2)))()
    book.lock(branch.node)
    assert one.node.depth == 4
    assert book.let_go(keys[:4]) == 2
    assert book.let_go([*keys[:2], *keys[4:]]) == 0
    book.unlock(branch.node)
    assert book.let_go([*keys[:2], *keys[4:]]) == 4
    assert book.let_go(keys) == 0
    assert (book.pinned, book.check()) == (0, [])


def test_a_sessions_pages_are_kept_then_moved_down_then_found_there_and_dropped_at_its_end(tmp_path: Path) -> None:
    prompt = np.random.default_rng(5).integers(3, 256, 200).tolist()

    async def run(manager: str) -> None:
        async with SGLangEngine(config(manager, session_ttl=1.0)) as engine:
            first = await kit.answer(engine, kit.greedy(prompt, 9, session="s"))
            assert (first.end.hits, first.end.cached_tokens) == ((0, 0, 0), 0)
            assert first.end.marks[-1][0] == 192
            with MemoryManagerClient(manager, name="viewer", role="viewer") as viewer:

                def lies(l1: int, l2: int) -> Callable[[], bool]:
                    return lambda: [(row.l1, row.l2) for row in viewer.session_tiers("s")] == [(l1, l2)]

                # 208 tokens have KV: the last one made has none
                await until(lies(13, 0))
                assert viewer.session_tiers("s")[0].kept == 13
                assert (viewer.probe("kv", [first.end.marks[-1][1]]) == L1).all()
                # the engine gives its pins back, the manager moves the pages down
                await until(lies(0, 13))
                assert (await engine.stats())["pinned"] == 0
                assert (viewer.probe("kv", [first.end.marks[-1][1]]) == L2).all()
                turn = [*prompt, *first.tokens, *prompt[:30]]
                second = await kit.answer(engine, kit.greedy(turn, 4, session="s"))
                assert second.end.hits == (0, 208, 0)
                third = await kit.answer(engine, kit.greedy(turn, 4, session="s"))
                assert third.end.hits == (224, 0, 0)
                assert third.tokens == second.tokens
                # what belongs to another session too stays
                await kit.answer(engine, kit.greedy(prompt[:40], 1, session="t"))
                await engine.end_session("s")
                await until(lambda: not viewer.session_tiers("s") and viewer.stats()["pool_objects/kv"] == 2)
                assert viewer.session_tiers("t")[0].l1 == 2
                await engine.end_session("t")
                await until(lambda: not viewer.stats()["pool_objects/kv"])
                assert (await engine.stats())["sessions"] == 0

    with serving(str(tmp_path / "m.sock"), movers=(("copy",),), l1_pages=PAGES, l2_pages=PAGES) as manager:
        asyncio.run(run(manager))


def test_an_engine_that_is_killed_leaves_no_lease_and_its_pages_to_everybody(tmp_path: Path) -> None:
    prompt = np.random.default_rng(6).integers(3, 256, 100).tolist()

    async def run(manager: str) -> None:
        with MemoryManagerClient(manager, name="viewer", role="viewer") as viewer:
            engine = SGLangEngine(config(manager))
            await engine.start()
            await kit.answer(engine, kit.greedy(prompt, 4, session="s"))
            await until(lambda: bool(viewer.session_tiers("s")))
            os.kill(engine.pid, signal.SIGKILL)
            await until(lambda: not viewer.session_tiers("s"))
            assert viewer.stats()["pool_session_kept_pages/kv"] == 0
            assert viewer.stats()["pool_objects/kv"] == 6
            with pytest.raises(EngineDied):
                await engine.stats()
            await engine.close()

    with serving(str(tmp_path / "m.sock"), l1_pages=PAGES) as manager:
        asyncio.run(run(manager))
