"""Arrays between roles leave nothing in the pool, whatever happens to requests, roles and the memory manager."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from omni_flow import Graph, InvalidInput, Json, RequestFailed, Tensor, launch
from omni_flow.data.pool_spec import PoolSpec
from omni_flow.deploy.launchers import LocalLauncher
from omni_flow.deploy.local import AsyncDeployment
from omni_flow.deploy.memory import Memory, MemoryProcess

from .conftest import WAIT_S, Events, alive, deployed, pid_of
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


def manager_of(app: AsyncDeployment) -> tuple[MemoryProcess, int]:
    """The memory manager of a deployment, and its process."""
    launcher = app.launcher
    assert isinstance(launcher, LocalLauncher)
    assert launcher.memory is not None
    assert launcher.memory.pid is not None
    return launcher.memory, launcher.memory.pid


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
            _, pid = manager_of(app)
            os.kill(pid, signal.SIGKILL)
            array = np.zeros(MIB, np.uint8)
            assert (await (await app.submit(x=array)).result())["y"]["writable"] is False
            await events.until("the memory manager is up again")
            for _ in range(3):
                shared = (await (await app.submit(x=array)).result())["y"]["shared"]
            assert shared

    asyncio.run(body())


def lock_of(memory: MemoryProcess) -> BinaryIO:
    """The file that a manager locks for as long as it lives."""
    return open(memory.address + ".lock", "rb")


def until_there(memory: MemoryProcess) -> None:
    """Wait until a manager that is being started has made its lock."""
    until = time.monotonic() + WAIT_S
    while not os.path.exists(memory.address + ".lock"):
        assert time.monotonic() < until


def test_a_memory_manager_that_cannot_be_started_anew_is_tried_again_until_it_can() -> None:
    async def body() -> None:
        events = Events()
        async with deployed(one(Where, "look", Tensor()), events) as app:
            memory, pid = manager_of(app)
            with lock_of(memory) as lock:
                os.kill(pid, signal.SIGKILL)
                fcntl.flock(lock, fcntl.LOCK_EX)  # as another manager would
                assert "already serves" in await events.until("could not be started anew, it is tried again")
            await events.until("the memory manager is up again")

    asyncio.run(body())


def test_a_memory_manager_whose_start_was_given_up_has_gone_when_it_is_closed(tmp_path: Path) -> None:
    async def body() -> None:
        memory = MemoryProcess(Memory(temp_bytes=MIB).config(f"{tmp_path}/memory.sock", "one", 0), Events())
        starting = asyncio.create_task(memory.start())
        await asyncio.to_thread(until_there, memory)
        starting.cancel()
        await asyncio.wait([starting])
        await memory.close()
        with lock_of(memory) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    tmp_path.chmod(0o700)
    asyncio.run(body())


def test_several_memory_managers_leave_nothing_of_their_run_directory(run_directories: Path) -> None:
    pool = PoolSpec(name="kv", page_bytes=64, l1_pages=16)
    with launch(one(Echo, "run", Tensor()), memory=Memory(temp_bytes=MIB, pools=(pool,), managers=3)):
        pass
    assert list(run_directories.iterdir()) == []


def test_while_a_memory_manager_stands_still_arrays_travel_in_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with deployed(one(Where, "look", Tensor())) as app:
            _, pid = manager_of(app)
            assert (await (await app.submit(x=np.zeros(MIB, np.uint8))).result())["y"]["shared"]
            os.kill(pid, signal.SIGSTOP)
            try:
                other_size = np.zeros(3 * MIB, np.uint8)
                assert not (await (await app.submit(x=other_size)).result())["y"]["shared"]
            finally:
                os.kill(pid, signal.SIGCONT)

    monkeypatch.setattr("omni_flow.deploy.tensors.ANSWER_S", 0.3)
    asyncio.run(body())


def test_a_memory_manager_that_does_not_end_by_itself_is_killed() -> None:
    async def body() -> None:
        async with deployed(one(Where, "look", Tensor())) as app:
            _, pid = manager_of(app)
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
