"""Random kills and scaling under load: right answers or a cause, never a hang, nothing left."""

from __future__ import annotations

import asyncio
import os
import random
import signal

import pytest

from omni_flow import Outcome, RequestFailed
from omni_flow.control.runtime.errors import NoReplica
from omni_flow.deploy.local import AsyncDeployment

from .conftest import Events, deployed
from .roles import diamond

WORDS = ["a", "bc", "def", "the whole of it", "longer than the credit of a stream"]
ROLES = ["letters", "upper", "lower", "join", "bystander"]


async def one_request(app: AsyncDeployment, rng: random.Random, retried: bool, found: dict[str, int]) -> None:
    word = rng.choice(WORDS)
    try:
        request = await app.submit(text=word, other="o", deadline=rng.choice([None, None, 0.05]))
    except NoReplica:
        found["refused"] = found.get("refused", 0) + 1
        await asyncio.sleep(0.005)
        return
    if rng.random() < 0.05:
        await request.cancel()
    try:
        async with asyncio.timeout(30):
            result = await request.result()
    except RequestFailed as failed:
        assert failed.outcome in (Outcome.FAILED, Outcome.CANCELLED, Outcome.DEADLINE)
        assert failed.outcome is not Outcome.FAILED or "died" in str(failed) or "left" in str(failed)
        each = failed.partial["each"]
        assert each == list(word.upper())[: len(each)]
        found[str(failed.outcome)] = found.get(str(failed.outcome), 0) + 1
        return
    assert result == {"both": word.upper() + word.lower(), "each": list(word.upper()), "same": "o"}
    found["done"] = found.get("done", 0) + 1


async def chaos(seed: int, transport: str, retries: int, kills: int) -> dict[str, int]:
    rng = random.Random(seed)
    events = Events()
    found: dict[str, int] = {}
    backoff = [0.0] * 1000
    graph = diamond(retries=retries)
    async with deployed(graph, events, transport=transport, credit=8, backoff_s=backoff, log_level="CRITICAL") as app:
        over = False

        async def load() -> None:
            while not over:
                await one_request(app, rng, retries > 0, found)

        async with asyncio.TaskGroup() as group:
            for _ in range(12):
                group.create_task(load())
            for _ in range(kills):
                done = found.get("done", 0)
                if rng.random() < 0.2:
                    await app.scale(rng.choice(["upper", "lower"]), rng.randint(1, 3), drain_s=rng.choice([0.0, 20.0]))
                else:
                    role = "upper" if retries else rng.choice(ROLES)
                    living = [r.pid for r in app.status()[role].replicas if r.pid]
                    for pid in rng.sample(living, min(len(living), rng.choice([1, 1, 2]))):
                        os.kill(pid, signal.SIGKILL)
                while found.get("done", 0) < done + 10:
                    await asyncio.sleep(0.01)
            over = True
    return found


@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.parametrize("transport", ["unix", "ipc", "tcp"])
@pytest.mark.parametrize("retries", [0, 1000])
def test_random_kills_and_scaling_under_load(transport: str, retries: int) -> None:
    for seed in range(2):
        found = asyncio.run(chaos(seed, transport, retries, kills=20))
        assert found["done"] > 0
