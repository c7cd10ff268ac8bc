"""The role's end of a fixed-row session."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from omni_flow.compute.engine import Floats
from omni_flow.compute.errors import BadRequest, ComputeError
from omni_flow.compute.sglang.wire import FixedOpened, FixedOut, FixedStep, ToEngine

Answer = FixedOpened | FixedOut | ComputeError


class FixedSession:
    """See `omni_flow.compute.engine.FixedRows`. One step at a time."""

    def __init__(
        self,
        number: int,
        rows: int,
        hidden: int,
        send: Callable[[ToEngine], Awaitable[None]],
        answers: asyncio.Queue[Answer],
    ) -> None:
        self.number = number
        self.cached = 0
        self._shape = (rows, hidden)
        self._send = send
        self._answers = answers

    async def open(self, message: ToEngine) -> None:
        """Send the opening message and wait for the answer."""
        await self._send(message)
        answer = await self._answers.get()
        if isinstance(answer, ComputeError):
            raise answer
        assert isinstance(answer, FixedOpened)
        self.cached = answer.cached

    async def step(self, rows: Floats, causal: Sequence[bool] | None = None) -> Floats:
        if rows.shape != self._shape or rows.dtype != np.float32:
            raise BadRequest(f"rows are {rows.dtype} of shape {rows.shape}", f"give float32 {self._shape}")
        if causal is not None and len(causal) != len(rows):
            raise BadRequest(f"{len(causal)} flags for {len(rows)} rows", "give one per row")
        flags = b"" if causal is None else bytes(map(bool, causal))
        await self._send(FixedStep(self.number, np.ascontiguousarray(rows).tobytes(), flags))
        answer = await self._answers.get()
        if isinstance(answer, ComputeError):
            raise answer
        assert isinstance(answer, FixedOut)
        return np.frombuffer(answer.hidden, np.float32).reshape(self._shape)
