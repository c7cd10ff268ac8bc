"""Threads that run role code."""

from __future__ import annotations

import asyncio
import weakref

from omni_flow.control.runtime.threads import Threads


def test_an_idle_thread_holds_nothing_of_what_it_ran() -> None:
    async def body() -> None:
        loop = asyncio.get_running_loop()
        threads = Threads(loop, 1, "test")
        gone = asyncio.Event()

        class Given:
            def job(self) -> None:
                return

        given = Given()
        watch = weakref.finalize(given, loop.call_soon_threadsafe, gone.set)
        threads.submit(given.job)
        del given
        async with asyncio.timeout(20):
            await gone.wait()
        assert not watch.alive
        threads.close()

    asyncio.run(body())
