"""The role's end of a fixed-row session."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from omni_flow.compute.engine import Floats
from omni_flow.compute.errors import ComputeError
from omni_flow.compute.sglang.admission import admit_step
from omni_flow.compute.sglang.wire import FixedOpened, FixedOut, FixedStep, ToEngine

Answer = FixedOpened | FixedOut


class FixedSession:
    """See `omni_flow.compute.engine.FixedRows`. Steps that are asked for at once run one after the other.

    Args:
        post: sends to the engine, which answers each message of the session, in their order.
        drain: waits while too much is unsent.
    """

    def __init__(
        self,
        number: int,
        rows: int,
        hidden: int,
        post: Callable[[ToEngine], None],
        drain: Callable[[], Awaitable[None]],
    ) -> None:
        self.number = number
        self.cached = 0
        self._shape = (rows, hidden)
        self._post = post
        self._drain = drain
        self._asked: deque[asyncio.Future[Answer]] = deque()
        self._over: ComputeError | None = None

    async def open(self, message: ToEngine) -> None:
        """Send the opening message and wait for the answer."""
        answer = await self._ask(message)
        assert isinstance(answer, FixedOpened)
        self.cached = answer.cached

    async def step(self, rows: Floats, causal: Sequence[bool] | None = None) -> Floats:
        given, flags = admit_step(rows, causal, self._shape)
        answer = await self._ask(FixedStep(self.number, given, flags))
        assert isinstance(answer, FixedOut)
        return np.frombuffer(answer.hidden, np.float32).reshape(self._shape)

    async def _ask(self, message: ToEngine) -> Answer:
        if self._over is not None:
            raise self._over
        self._post(message)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        try:
            await self._drain()
            return await answer
        finally:
            answer.cancel()

    def answered(self, answer: Answer | ComputeError) -> None:
        """The engine's answer to the oldest message that has none; whoever asked may have gone."""
        asked = self._asked.popleft()
        if asked.done():
            return
        if isinstance(answer, ComputeError):
            asked.set_exception(answer)
        else:
            asked.set_result(answer)

    def end(self, why: ComputeError) -> None:
        """Nothing comes any more: who waits, and who asks later, gets this error."""
        self._over = why
        while self._asked:
            self.answered(why)
