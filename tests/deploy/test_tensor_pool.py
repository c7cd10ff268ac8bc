"""Arrays between roles leave nothing in the pool, whatever happens to requests, roles and the memory manager."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack

import numpy as np
import pytest

from omni_flow import Graph, InvalidInput, Json, RequestFailed, Tensor, launch
from omni_flow.deploy.launchers import LocalLauncher
from omni_flow.deploy.memory import Memory

from .conftest import Events, alive, deployed, pid_of
from .tensor_roles import (
    MIB,
    Echo,
    Firsts,
    Holds,
    InPlace,
    Where,
    all_running,
    one,
    streamed,
    until_counted,
)


def test_what_was_computed_in_place_is_handed_over_and_what_was_dropped_is_free() -> None:
    async def body() -> None:
        async with deployed(one(InPlace, "make")) as app:
            for _ in range(10):
                for n in (10, 100_000, 4_000_000):
                    y = (await (await app.submit(n=n)).result())["y"]
                    assert y.shape == (n,)
                    assert float(y[n // 2]) == 7
                    del y
            await until_counted(app, "temp_published", 0)
        async with deployed(one(InPlace, "drop"), memory=Memory(temp_bytes=16 * MIB)) as app:
            assert (await (await app.submit(n=200)).result())["y"] == 200

    asyncio.run(body())


def test_a_stream_many_times_the_pool_passes_to_two_readers() -> None:
    async def body() -> None:
        async with deployed(streamed(Firsts, "first"), memory=Memory(temp_bytes=32 * MIB), credit=8) as app:
            result = await (await app.submit(n=200)).result()
            assert result == {"y0": list(range(200)), "y1": list(range(200))}
            await until_counted(app, "temp_published", 0)

    asyncio.run(body())


def test_a_cancelled_request_gives_back_what_its_readers_held() -> None:
    async def body() -> None:
        async with deployed(streamed(Holds, "hold"), credit=8) as app:
            for _ in range(3):
                request = await app.submit(n=100)
                await all_running(app)
                assert await request.cancel()
            await until_counted(app, "temp_published", 0)

    asyncio.run(body())


def test_a_killed_forwarder_leaves_nothing_in_the_pool() -> None:
    async def body() -> None:
        events = Events()
        graph = Graph("held")
        x = graph.placeholder("x", Tensor())
        echo = graph.role("echo", Echo).interface("run", inputs=[[x]], outputs=["y"])
        hold = graph.role("hold", Holds).interface("hold", inputs=[[{"frame": echo.y}]], outputs=["y"])
        graph.output(y=hold.y, x=echo.y)
        async with deployed(graph, events) as app:
            request = await app.submit(x=np.zeros(16 * MIB, np.uint8))
            async with asyncio.timeout(20):
                while not any(held["running"] for held in (await app.census()).values()):
                    pass
            os.kill(pid_of(app, "echo/0"), signal.SIGKILL)
            await request.cancel()
            del request
            await until_counted(app, "temp_published", 0)

    asyncio.run(body())


def test_a_killed_reader_leaves_nothing_in_the_pool() -> None:
    async def body() -> None:
        events = Events()
        async with deployed(streamed(Holds, "hold"), events, credit=8) as app:
            request = await app.submit(n=100)
            await all_running(app)
            os.kill(pid_of(app, "read0/0"), signal.SIGKILL)
            with pytest.raises(RequestFailed):
                await request.result()
            await until_counted(app, "temp_published", 0)

    asyncio.run(body())


def test_an_array_of_a_value_that_cannot_travel_is_not_sent_with_the_next() -> None:
    async def body() -> None:
        async with deployed(one(Echo, "run", Json)) as app:
            with pytest.raises(InvalidInput, match="not valid Unicode"):
                await app.submit(x=[np.zeros(MIB), "\ud800"])
            assert type(app.gateway.encode_input("x", "small")[0]) is bytes

    asyncio.run(body())


def test_a_full_pool_sends_arrays_in_messages() -> None:
    with launch(one(Echo, "run", Tensor()), memory=Memory(temp_bytes=MIB)) as app:
        array = np.arange(MIB, dtype=np.float32)
        assert np.array_equal(app.submit(x=array).result(20)["y"], array)


def test_without_a_memory_manager_arrays_travel_in_messages() -> None:
    with launch(one(Where, "look", Tensor()), memory=None) as app:
        assert app.submit(x=np.zeros(MIB, np.uint8)).result(20)["y"]["shared"] is False


def test_a_killed_memory_manager_is_started_anew_and_requests_go_on() -> None:
    async def body() -> None:
        events = Events()
        async with deployed(one(Where, "look", Tensor()), events) as app:
            launcher = app.launcher
            assert isinstance(launcher, LocalLauncher)
            assert launcher.memory is not None
            assert launcher.memory.pid is not None
            os.kill(launcher.memory.pid, signal.SIGKILL)
            array = np.zeros(MIB, np.uint8)
            assert (await (await app.submit(x=array)).result())["y"]["writable"] is False
            await events.until("the memory manager is up again")
            for _ in range(3):
                shared = (await (await app.submit(x=array)).result())["y"]["shared"]
            assert shared

    asyncio.run(body())


def test_a_memory_manager_that_does_not_end_by_itself_is_killed() -> None:
    async def body() -> None:
        async with deployed(one(Where, "look", Tensor())) as app:
            launcher = app.launcher
            assert isinstance(launcher, LocalLauncher)
            assert launcher.memory is not None
            pid = launcher.memory.pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
        assert not alive(pid)

    asyncio.run(body())


def test_many_deployments_beside_each_other_do_not_wait_for_one_another() -> None:
    async def body() -> None:
        async with AsyncExitStack() as stack:
            small = Memory(temp_bytes=MIB)
            apps = [
                await stack.enter_async_context(deployed(one(Echo, "run", Tensor()), memory=small)) for _ in range(9)
            ]
            for app in apps:
                assert (await (await app.submit(x=np.zeros(4))).result())["y"].shape == (4,)

    asyncio.run(body())
