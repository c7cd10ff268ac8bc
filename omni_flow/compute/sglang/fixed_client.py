"""The role's end of a fixed-row session."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from omni_flow.compute.engine import Floats
from omni_flow.compute.errors import ComputeError
from omni_flow.compute.sglang.admission import admit_step
from omni_flow.compute.sglang.shared_rows import SharedRows
from omni_flow.compute.sglang.wire import FixedOpened, FixedOut, FixedStep, ToEngine

Answer = FixedOpened | FixedOut | ComputeError


class FixedSession:
    """See `omni_flow.compute.engine.FixedRows`. Steps that are asked for at once run one after the other.

    Args:
        shared: where its rows lie.
        post: sends to the engine, which answers each message of the session.
        drain: waits while too much is unsent.
    """

    def __init__(
        self,
        number: int,
        shared: SharedRows,
        post: Callable[[ToEngine], None],
        drain: Callable[[], Awaitable[None]],
    ) -> None:
        self.number = number
        self.cached = 0
        self._shared = shared
        self._post = post
        self._drain = drain
        self._turn = asyncio.Lock()
        self._asked: asyncio.Future[Answer] | None = None
        self._over: ComputeError | None = None

    async def open(self, message: ToEngine) -> None:
        """Send the opening message and wait for the answer."""
        answer = await self._ask(message)
        assert isinstance(answer, FixedOpened)
        self.cached = answer.cached

    async def step(self, rows: Floats, causal: Sequence[bool] | None = None) -> Floats:
        flags = admit_step(rows, causal, self._shared.given.shape)
        async with self._turn:
            if self._asked is not None:  # a step that nobody waits for any more: the engine still reads its rows
                await asyncio.wait((self._asked,))
            if self._over is not None:
                raise self._over
            self._shared.given[:] = rows
            await self._ask(FixedStep(self.number, flags))
            if self._over is not None:  # left since the engine answered, which may have given the memory back by now
                raise self._over
            made: Floats = self._shared.made.copy()
            return made

    async def _ask(self, message: ToEngine) -> Answer:
        self._post(message)
        self._asked = asyncio.get_running_loop().create_future()
        await self._drain()
        answer = await asyncio.shield(self._asked)
        if isinstance(answer, ComputeError):
            raise answer
        return answer

    def answered(self, answer: Answer) -> None:
        """The engine's answer to the last message."""
        if self._asked is not None and not self._asked.done():
            self._asked.set_result(answer)

    def end(self, why: ComputeError) -> None:
        """Nothing comes any more: who waits, and who asks later, gets this error."""
        self._over = why
        self.answered(why)
