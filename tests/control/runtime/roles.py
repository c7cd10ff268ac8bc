"""Small real roles for the tests of the runtime."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import numpy as np

from omni_flow import ABSENT, Context, emit


class Echo:
    async def run(self, x: Any) -> Any:
        return x


class Busy:
    """Says how far it is, async and plain."""

    async def run(self, ctx: Context, x: int) -> int:
        ctx.progress(0.5, "half of it")
        ctx.progress(1.0, f"all of {x}")
        return x

    def in_thread(self, ctx: Context, x: int) -> Iterator[int]:
        yield x
        ctx.progress(1.0, f"{x} in a thread")


class Keeper:
    """Keeps what sessions say until they are over."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, str | None], list[int]] = {}

    async def keep(self, ctx: Context, x: int) -> int:
        kept = self.kept.setdefault((ctx.tenant, ctx.session), [])
        kept.append(x)
        return len(kept)

    async def end_session(self, session: str, tenant: str) -> None:
        del self.kept[tenant, session]


class PlainKeeper:
    """A `Keeper` without async."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, str | None], list[int]] = {}

    def keep(self, ctx: Context, x: int) -> int:
        kept = self.kept.setdefault((ctx.tenant, ctx.session), [])
        kept.append(x)
        return len(kept)

    def end_session(self, session: str, tenant: str) -> None:
        del self.kept[tenant, session]


class Odd:
    """Raises the error of a number: what is no `Exception`, or that futures and generators take amiss."""

    errors = (asyncio.CancelledError, KeyboardInterrupt, StopIteration, GeneratorExit)

    def _check(self, x: int) -> int:
        if x >= 0:
            raise self.errors[x]
        return x

    async def on_loop(self, x: int) -> int:
        return self._check(x)

    def in_thread(self, x: int) -> int:
        return self._check(x)

    async def stream_on_loop(self, x: int) -> AsyncIterator[int]:
        yield self._check(x)

    def stream_in_thread(self, x: int) -> Iterator[int]:
        yield self._check(x)

    async def batch_on_loop(self, x: list[int]) -> list[int]:
        return [self._check(item) for item in x]

    def batch_in_thread(self, x: list[int]) -> list[int]:
        return [self._check(item) for item in x]


class Upper:
    def run(self, x: Any) -> Any:
        return x.upper()


class Counter:
    """Streams the numbers below n, async and plain."""

    async def count(self, n: int) -> AsyncIterator[int]:
        for k in range(n):
            yield k

    def count_in_thread(self, n: int) -> Iterator[int]:
        yield from range(n)

    def both(self, n: int) -> Iterator[Any]:
        for k in range(n):
            yield emit(frame=k)
        yield emit(total=n)


class Double:
    async def run(self, x: int) -> int:
        await asyncio.sleep(0)
        return 2 * x


class Pair:
    async def run(self, a: Any, b: Any = "none") -> Any:
        return [a, b]


class Total:
    async def run(self, xs: Sequence[int]) -> int:
        return sum(xs)


class Wrong:
    """Each way to break a rule of outputs."""

    async def raises(self, x: Any) -> Any:
        raise ValueError(f"no {x}")

    async def unknown(self, x: Any) -> Any:
        return {"a": 1, "nope": 2}

    async def no_dict(self, x: Any) -> Any:
        return 5

    async def wrong_type(self, x: Any) -> Any:
        return 5

    async def wrong_shape(self, x: Any) -> Any:
        return np.zeros((2, 3), np.float32)

    def twice(self, x: Any) -> Iterator[Any]:
        yield emit(y=1, total=1)
        yield emit(total=2)

    async def torn(self, x: Any) -> AsyncIterator[int]:
        yield 1
        yield 2
        raise RuntimeError("half way")

    async def absent(self, x: Any) -> Any:
        return ABSENT


class Slow:
    """Runs until it is cancelled, and says so."""

    cancelled = threading.Semaphore(0)
    polling = threading.Event()

    async def wait(self, x: Any) -> Any:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            Slow.cancelled.release()
            raise

    async def forever(self, x: Any) -> AsyncIterator[int]:
        k = 0
        while True:
            yield k
            k += 1

    def polls(self, ctx: Context, x: Any) -> Any:
        Slow.polling.set()
        while not ctx.cancelled:
            time.sleep(0.001)
        Slow.cancelled.release()
        return x


class Where:
    """Tells about its call."""

    def thread(self, x: Any) -> bool:
        return threading.current_thread() is threading.main_thread()

    async def context(self, ctx: Context, x: Any) -> Any:
        return {
            "session": ctx.session,
            "n": ctx.params.n,
            "seed": ctx.seed,
            "path": ctx.path,
            "retries": ctx.retries,
            "deadline": ctx.deadline is not None and 0 < ctx.deadline <= 60,
        }

    async def step(self, ctx: Context, entry: int = 0, back: int = 0) -> Any:
        return {"value": entry + back + 1, "seen": [ctx.iteration, ctx.last_iteration]}


class Batched:
    """Squares lists; refuses 13."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    async def square(self, x: list[int]) -> list[int]:
        self.sizes.append(len(x))
        if 13 in x:
            raise ValueError("13")
        return [v * v for v in x]

    def square_in_thread(self, x: list[int]) -> list[int]:
        return [v * v for v in x]

    async def too_few(self, x: list[int]) -> list[int]:
        return x[:-1]


class Gate:
    """Counts how many frames its stream was allowed to make; the reader is held by an event."""

    def __init__(self) -> None:
        self.made = 0
        self.open = asyncio.Event()

    async def make(self, n: int) -> AsyncIterator[int]:
        for k in range(n):
            self.made += 1
            yield k

    async def take(self, frame: int) -> int:
        await self.open.wait()
        return frame
