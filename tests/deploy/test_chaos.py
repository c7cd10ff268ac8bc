"""Random kills and scaling under load: right answers or a cause, never a hang, nothing left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from typing import Any

import pytest

from omni_flow import Outcome
from omni_flow.control.runtime.errors import NoReplica
from omni_flow.deploy.local import AsyncDeployment

from .conftest import bare, outcome_of
from .roles import diamond

WORDS = ["a", "bc", "def", "the whole of it", "longer than the credit of a stream"]
ROLES = ["letters", "upper", "lower", "join", "bystander"]


class Found:
    """How requests ended, counted."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._done = asyncio.Semaphore(0)

    def add(self, what: str) -> None:
        self.counts[what] += 1
        if what == "done":
            self._done.release()

    async def ten_done(self) -> None:
        """Wait until ten more requests are done."""
        while not self._done.locked():
            await self._done.acquire()
        for _ in range(10):
            await self._done.acquire()


async def one_request(app: AsyncDeployment, rng: random.Random, found: Found) -> None:
    word = rng.choice(WORDS)
    try:
        request = await app.submit(text=word, other="o", deadline=rng.choice([None, None, 0.05]))
    except NoReplica:
        found.add("refused")
        await asyncio.sleep(0.005)
        return
    if rng.random() < 0.05:
        await request.cancel()
    outcome = await outcome_of(request)
    if isinstance(outcome, dict):
        assert outcome == {"both": word.upper() + word.lower(), "each": list(word.upper()), "same": "o"}
        found.add("done")
        return
    assert outcome.outcome is not Outcome.FAILED or "died" in str(outcome) or "left" in str(outcome)
    each = outcome.partial["each"]
    assert each == list(word.upper())[: len(each)]
    found.add(str(outcome.outcome))


async def disturb(app: AsyncDeployment, rng: random.Random, retries: int) -> None:
    """Kill one or two replicas (of roles that retry, if any), or change how many there are."""
    if rng.random() < 0.2:
        # A place that is given up while its replica is dead fails the requests that wait for the next one.
        role, drain_s = ("lower", 20.0) if retries else (rng.choice(["upper", "lower"]), rng.choice([0.0, 20.0]))
        await app.scale(role, rng.randint(1, 3), drain_s=drain_s)
        return
    roles = ["upper"] if retries else ROLES
    living = [replica.pid for replica in app.status()[rng.choice(roles)].replicas if replica.pid]
    for pid in rng.sample(living, min(len(living), rng.choice([1, 1, 2]))):
        with contextlib.suppress(ProcessLookupError):  # it died by itself since: of the kill before
            os.kill(pid, signal.SIGKILL)


async def chaos(seed: int, transport: str, retries: int, disturbances: int) -> Counter[str]:
    rng = random.Random(seed)
    found = Found()
    options: dict[str, Any] = {"transport": transport, "credit": 8, "backoff_s": [0.0] * 1000, "log_level": "CRITICAL"}
    async with bare(diamond(retries=retries), **options) as app:
        over = False

        async def load() -> None:
            while not over:
                await one_request(app, rng, found)

        async with asyncio.TaskGroup() as group:
            for _ in range(12):
                group.create_task(load())
            for _ in range(disturbances):
                await disturb(app, rng, retries)
                await found.ten_done()
            over = True
    return found.counts


@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.parametrize("transport", ["unix", "ipc", "tcp"])
@pytest.mark.parametrize("retries", [0, 1000])
def test_random_kills_and_scaling_under_load(transport: str, retries: int) -> None:
    for seed in range(2):
        found = asyncio.run(chaos(seed, transport, retries, disturbances=20))
        assert found["done"] > 0
        assert not retries or found["failed"] == 0
