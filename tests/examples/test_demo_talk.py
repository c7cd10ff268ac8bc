"""Several turns of one session of the demo in its real processes: what they find in the KV cache and what they say."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from voice_vision_chat.graph import graph
from voice_vision_chat.llm import SmolLM2

from omni_flow import launch
from omni_flow.compute.engine import EndEvent, Tokens
from omni_flow.deploy.local import Deployment
from omni_flow.models.conversation import Conversation

PAGE = 16
QUESTIONS = ("What is the capital of France?", "Which river flows through it?", "Name three things to see there.")
PARAMS = {"max_tokens": 24}

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def app() -> Iterator[Deployment]:
    with launch(graph) as running:
        yield running


def without_a_cache() -> list[tuple[str, int, int]]:
    """What the model says to the questions when nothing is cached: text, tokens of prompt and answer, of each turn."""

    async def body() -> list[tuple[str, int, int]]:
        role, talk, said = SmolLM2(), Conversation(), []
        await role.setup()
        try:
            for number, question in enumerate(QUESTIONS):
                # no two tenants share a page
                turn: Any = SimpleNamespace(
                    session=None,
                    tenant=f"nobody {number}",
                    params=SimpleNamespace(**PARAMS),
                    seed=0,
                    prefix=lambda *_: None,
                )
                prompt = talk.prompt({"role": "user", "content": question}, role.processor, 4000)
                *answer, end = [one async for one in role.tokens(turn, Tokens(prompt.ids), role.sampling(turn))]
                assert isinstance(end, EndEvent)
                assert end.cached_tokens == 0
                tokens = [token for token in answer if isinstance(token, int)]
                said.append((role.processor.decode(tokens), end.prompt_tokens, end.tokens))
                talk.answered(prompt, tokens, role.processor)
        finally:
            await role.close()
        return said

    return asyncio.run(body())


def test_each_turn_finds_the_kv_of_all_before_it_and_says_what_it_says_without_a_cache(app: Deployment) -> None:
    expected = without_a_cache()
    before = 0
    with app.session() as session:
        for question, (text, prompt, made) in zip(QUESTIONS, expected, strict=True):
            request = session.submit(text=question, params=PARAMS, timeline=True)
            result = request.result(timeout=120)
            usage = result["usage"]
            assert ("".join(result["text"]), usage["prompt_tokens"], usage["completion_tokens"]) == (text, prompt, made)
            # all full pages; of the last token of an answer there is no KV. The first turn shares the warm-up's page.
            assert usage["cached_tokens"] == before // PAGE * PAGE or (before == 0 and usage["cached_tokens"] == PAGE)
            [note] = [span.note for span in request.timeline() if span.interface == "llm.chat"]
            assert note == f"{prompt} prompt tokens, {usage['cached_tokens']} cached; {made} made"
            before = prompt + made - 1
    assert before > 100


def test_what_one_tenant_said_is_neither_found_nor_known_by_another(app: Deployment) -> None:
    async def ask(tenant: str, question: str) -> dict[str, Any]:
        gateway = app._app.gateway
        return await gateway.submit({"text": question}, session="s", tenant=tenant, params=PARAMS).result()

    def usage(tenant: str, question: str) -> dict[str, int]:
        found: dict[str, int] = app._call(ask(tenant, question))["usage"]
        return found

    first, again = usage("ada", QUESTIONS[0]), usage("ada", QUESTIONS[1])
    other = usage("bob", QUESTIONS[0])
    assert first["cached_tokens"] == other["cached_tokens"] == 0
    assert first["prompt_tokens"] == other["prompt_tokens"]
    assert again["cached_tokens"] > 0


def test_a_session_that_is_closed_begins_anew_and_a_cancelled_turn_is_no_part_of_one(app: Deployment) -> None:
    def prompt_tokens(question: str) -> int:
        tokens: int = session.submit(text=question, params=PARAMS).result(timeout=120)["usage"]["prompt_tokens"]
        return tokens

    session = app.session()
    alone = prompt_tokens(QUESTIONS[0])
    session.close()
    assert prompt_tokens(QUESTIONS[0]) == alone
    second = prompt_tokens(QUESTIONS[0])
    assert second > alone
    session.close()
    assert prompt_tokens(QUESTIONS[0]) == alone
    cancelled = session.submit(text=QUESTIONS[2])
    next(iter(cancelled))
    assert cancelled.cancel()
    assert prompt_tokens(QUESTIONS[0]) == second
