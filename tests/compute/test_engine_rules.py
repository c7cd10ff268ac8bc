"""A family's rule reaches the prefix cache: where a match would end inside media it ends before, answers stay right."""

from __future__ import annotations

import asyncio
from pathlib import Path

import engine_kit as kit
import numpy as np

from omni_flow.compute.engine import Embeddings, Request, Span, Tokens
from omni_flow.compute.sampling import Sampling
from omni_flow.compute.sglang.config import EngineConfig
from omni_flow.compute.sglang.kernel import SGLangEngine
from omni_flow.data.identity import media_digest
from omni_flow.testing import tiny_checkpoint

PAGE, START = 16, 20


class WholeMediaEngine(SGLangEngine):
    program = "whole_media_engine"


def test_a_match_that_would_end_inside_media_ends_before_it(tmp_path: Path) -> None:
    folder = tiny_checkpoint("deepseek_v2", tmp_path)
    oracle = kit.oracle(folder)
    table = oracle.model.embed_tokens.weight.detach().numpy()
    random = np.random.default_rng(8)
    head, picture, *tails = (random.integers(0, 256, length).tolist() for length in (START, 50, 70, 70))

    def spans(rows: int, tail: list[int]) -> list[Span]:
        """Text, the first rows of the picture as embeddings of their own digest, text."""
        digest = media_digest(b"picture", f"{rows}", "test", "")
        return [Tokens(head), Embeddings(table[picture[:rows]], digest, placeholder=0), Tokens(tail)]

    async def ask(engine: SGLangEngine, rows: int, tail: list[int]) -> int:
        """Tokens that were cached; the answer is the oracle's, which knows no media."""
        request = Request(spans=spans(rows, tail), sampling=Sampling(max_tokens=4, ignore_eos=True), logits=True)
        got = await kit.answer(engine, request)
        kit.check_answer(got, *kit.oracle_greedy(oracle, [*head, *picture[:rows], *tail], 4))
        return got.end.cached_tokens

    async def run() -> None:
        async with WholeMediaEngine(EngineConfig(model=str(folder), page_size=PAGE, max_tokens=1024)) as engine:
            assert await ask(engine, 50, tails[0]) == 0
            # the picture ends at 70, the last whole page of what is shared at 64: what precedes the picture is left
            assert await ask(engine, 50, tails[1]) == START // PAGE * PAGE
            # beyond the picture any page will do
            assert await ask(engine, 50, tails[1]) == (START + 50 + 70 - 1) // PAGE * PAGE
            # a picture that ends with a page is matched whole
            assert await ask(engine, 44, tails[0]) == START // PAGE * PAGE
            assert await ask(engine, 44, tails[1]) == START + 44
            # fixed rows see the same
            async with engine.fixed_rows(spans(50, tails[0])[:2], 4) as session:
                assert session.cached == START // PAGE * PAGE
            counts = await engine.stats()
            assert counts["available"] + counts["pinned"] == counts["quota"]

    asyncio.run(run())
