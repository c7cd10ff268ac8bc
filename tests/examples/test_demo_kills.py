"""Each replica of the demo is killed in turn while requests are under way."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import pytest
from voice_vision_chat.graph import graph

from omni_flow import RequestFailed, alaunch
from omni_flow.deploy.local import AsyncDeployment

QUESTION = "What is the capital of France?"
PAGE = 16
PLACES = ["asr/0", "ocr/0", "llm/0", "tts/0", "tts/1"]


async def outcome(app: AsyncDeployment, text: str) -> dict[str, Any] | RequestFailed:
    async with asyncio.timeout(120):
        try:
            return await (await app.submit(text=text)).result()
        except RequestFailed as failed:
            return failed


async def up_again(app: AsyncDeployment, place: str, killed: int) -> float:
    """Seconds from now until the place is up as another process, less what its role took to load."""
    begun = time.monotonic()
    async with asyncio.timeout(120):
        while True:
            [now] = [r for r in app.status()[place.partition("/")[0]].replicas if r.place == place]
            if now.state == "up" and now.pid != killed:
                return time.monotonic() - begun - now.load_s
            await app.census()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_requests_end_with_the_right_answer_or_the_cause_and_the_replica_comes_again() -> None:
    async def body() -> None:
        async with alaunch(graph, on_event=print) as app:
            first = await outcome(app, QUESTION)
            assert isinstance(first, dict)
            said = "".join(first["text"])
            assert "Paris" in said
            for place in PLACES:
                role = place.partition("/")[0]
                pid = next(r.pid for r in app.status()[role].replicas if r.place == place)
                requests = [asyncio.create_task(outcome(app, f"Say hello to guest {k}.")) for k in range(4)]
                while not any(held["running"] for held in (await app.census()).values()):
                    pass
                os.kill(pid, signal.SIGKILL)
                back = await up_again(app, place, pid)
                for done in await asyncio.gather(*requests):
                    if isinstance(done, RequestFailed):
                        assert place in str(done)
                    else:
                        assert "".join(done["text"]).strip()
                print(f"{place}: back {back:.2f} s after its load time")
                after = await outcome(app, QUESTION)
                assert isinstance(after, dict)
                assert "".join(after["text"]) == said
                usage = after["usage"]  # a new engine finds in the pool what the killed one computed
                assert usage["cached_tokens"] == (usage["prompt_tokens"] - 1) // PAGE * PAGE
                async with asyncio.timeout(20):
                    while any(any(held.values()) for held in (await app.census()).values()):
                        pass

    asyncio.run(body())
