"""Large arrays between roles: they go through the memory manager by themselves, and nothing of it leaks."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import pytest
import torch

from omni_flow import Context, Graph, InvalidInput, Json, RequestFailed, Tensor, collect, launch, stream
from omni_flow.data.client import MemoryManagerClient
from omni_flow.deploy.launchers import LocalLauncher
from omni_flow.deploy.memory import Memory

from .conftest import Events, alive, deployed, pid_of

MIB = 1 << 20


class Echo:
    async def run(self, x: Any) -> Any:
        return x


class Keeps:
    """Gives on what it was given by the request before."""

    def __init__(self) -> None:
        self.kept: Any = None

    async def run(self, x: Any) -> Any:
        before, self.kept = self.kept, x
        return x if before is None else before


class Where:
    """Tells whether an array lies in the arena, and whether it may be written."""

    async def look(self, x: Any) -> Any:
        array = np.asarray(x)
        owner = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        return {"shared": type(owner.base).__name__ == "Share", "writable": bool(array.flags.writeable)}

    async def kind(self, x: Any) -> str:
        return f"{type(x).__name__} {x.dtype} {tuple(x.shape)} {float(x.sum())}"


class Views:
    """Gives on what it was given, or has made in place, as a view that is not the bytes below it."""

    async def conjugate(self, x: Any) -> Any:
        return x.conj()

    async def reversed(self, x: Any) -> Any:
        return x.view(x.dtype.newbyteorder())

    async def foreign(self, ctx: Context, x: Any) -> Any:
        array = ctx.empty(x.shape, ">f4")
        array[:] = x
        return array


class Sums:
    async def sum(self, n: int) -> float:
        return float((torch.ones(n) + 1).sum())


class InPlace:
    def make(self, ctx: Context, n: int) -> Any:
        array = ctx.empty((n,), "float32")
        array[:] = 7
        return array

    async def stream(self, ctx: Context, n: int) -> AsyncIterator[Any]:
        for k in range(n):
            array = ctx.empty((MIB // 4,), "float32")
            array[:] = k
            yield array

    def head(self, ctx: Context, n: int) -> Any:
        array = ctx.empty((2 * n,), "float32")
        array[:] = 7
        return array[:n]

    def view(self, ctx: Context, n: int) -> Any:
        """A part of an array whose whole is forgotten meanwhile."""
        part = ctx.empty((2 * n,), "float32")[n:]
        part[:] = 7
        for _ in range(64):
            ctx.empty((2 * n,), "float32")[:] = 1
        return part

    async def drop(self, ctx: Context, n: int) -> int:
        for _ in range(n):
            ctx.empty((MIB,), "uint8")[:] = 1
        return n


class Firsts:
    async def first(self, frame: Any) -> float:
        return float(frame[0])


class Holds:
    async def hold(self, frame: Any) -> float:
        await asyncio.Event().wait()
        return float(frame[0])


def one(cls: type, method: str, placeholder: Any = None) -> Graph:
    graph = Graph("one")
    name = "n" if cls is InPlace else "x"
    field = graph.placeholder(name, placeholder or int)
    graph.output(y=graph.role("r", cls).interface(method, inputs=[[field]], outputs=["y"]).y)
    return graph


def temp_of(app: Any) -> dict[str, int | float]:
    """Counters of the deployment's TempBuffer pool, after all that clients released was taken back."""
    launcher = app.launcher
    assert isinstance(launcher, LocalLauncher)
    assert launcher.memory is not None
    with MemoryManagerClient(launcher.memory.address, name="test", role="viewer") as client:
        stats = client.stats()
        assert client.check() == []
    return {k: v for k, v in stats.items() if k.startswith("temp_")}


async def all_running(app: Any) -> None:
    """Until each replica runs something; asking takes its time."""
    async with asyncio.timeout(20):
        while min(held["running"] for held in (await app.census()).values()) == 0:
            pass


async def published(app: Any) -> float:
    """How many arrays are still in somebody's hands once what is under way has been taken back."""
    left = 0.0
    for _ in range(500):
        left = temp_of(app)["temp_published"]
        if not left:
            break
        await asyncio.sleep(0.01)
    return left


def test_a_large_array_lies_in_the_arena_at_its_reader_who_may_not_write_it() -> None:
    with launch(one(Where, "look", Tensor())) as app:
        assert app.submit(x=np.zeros(MIB, np.uint8)).result(20)["y"] == {"shared": True, "writable": False}
        assert app.submit(x=np.zeros(64, np.uint8)).result(20)["y"] == {"shared": False, "writable": False}


@pytest.mark.parametrize("dtype", ["uint8", "float32", "float64", "int64", "float16"])
def test_arrays_come_back_equal_whatever_their_type(dtype: str) -> None:
    array = (np.arange(3 * 5000) % 100).astype(dtype).reshape(3, 5000)
    with launch(one(Echo, "run", Tensor())) as app:
        back = app.submit(x=array).result(20)["y"]
        assert back.dtype == array.dtype
        assert np.array_equal(back, array)
        back = app.submit(x=array[:, ::2]).result(20)["y"]
        assert np.array_equal(back, array[:, ::2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_arrive_as_tensors(dtype: torch.dtype) -> None:
    with launch(one(Where, "kind", Tensor())) as app:
        seen = app.submit(x=torch.ones((128, 128), dtype=dtype)).result(20)["y"]
        assert seen == f"Tensor {dtype} (128, 128) 16384.0"


def test_what_was_computed_in_place_is_handed_over_and_what_was_dropped_is_free() -> None:
    async def body() -> None:
        async with deployed(one(InPlace, "make")) as app:
            for _ in range(10):
                for n in (10, 100_000, 4_000_000):
                    y = (await (await app.submit(n=n)).result())["y"]
                    assert y.shape == (n,)
                    assert float(y[n // 2]) == 7
                    del y
            assert await published(app) == 0
        async with deployed(one(InPlace, "drop"), memory=Memory(temp_bytes=16 * MIB)) as app:
            assert (await (await app.submit(n=200)).result())["y"] == 200

    asyncio.run(body())


def row(length: int, placeholder: Any = None) -> Graph:
    """Roles in a row that give on what they are given; each is read by a bystander, too."""
    graph = Graph("row")
    field = graph.placeholder("x", placeholder or Tensor())
    for k in range(length):
        field = graph.role(f"e{k}", Echo).interface("run", inputs=[[{"x": field}]], outputs=["y"]).y
        side = graph.role(f"side{k}", Firsts).interface("first", inputs=[[{"frame": field}]], outputs=["y"])
        graph.output(**{f"first{k}": side.y})
    graph.output(y=field)
    return graph


@pytest.mark.parametrize("torched", [False, True])
def test_what_is_given_on_as_it_was_received_is_never_copied(torched: bool) -> None:
    async def body() -> None:
        async with deployed(row(3)) as app:
            for turn in range(5):
                array = np.full(MIB // 4, turn, np.float32)
                result = await (await app.submit(x=torch.from_numpy(array) if torched else array)).result()
                assert np.array_equal(np.asarray(result["y"]), array)
                assert [result[f"first{k}"] for k in range(3)] == [turn] * 3
                del result
            assert await published(app) == 0
            stats = temp_of(app)
            assert stats["temp_forwarded"] == 15
            assert stats["temp_bad_releases"] == stats["temp_bad_forwards"] == 0

    asyncio.run(body())


def test_an_array_kept_from_an_earlier_request_is_given_on_unharmed() -> None:
    async def body() -> None:
        async with deployed(one(Keeps, "run", Tensor())) as app:
            for turn in range(6):
                y = (await (await app.submit(x=np.full(MIB, turn, np.uint8))).result())["y"]
                assert (y == max(0, turn - 1)).all()
                await asyncio.sleep(0.3)  # until the earlier request's arrays are settled

    asyncio.run(body())


@pytest.mark.parametrize("method", ["head", "view"])
def test_a_part_of_what_was_computed_in_place_keeps_its_bytes(method: str) -> None:
    with launch(one(InPlace, method)) as app:
        for _ in range(3):
            y = app.submit(n=MIB).result(20)["y"]
            assert y.shape == (MIB,)
            assert (y == 7).all()


def test_arrays_of_foreign_byte_order_arrive_with_their_values() -> None:
    array = np.arange(50_000, dtype=">f4")
    with launch(one(Echo, "run", Tensor())) as app:
        assert np.array_equal(app.submit(x=array).result(20)["y"], array)


@pytest.mark.parametrize("method", ["reversed", "foreign"])
def test_arrays_given_on_in_foreign_byte_order_arrive_with_their_values(method: str) -> None:
    array = np.arange(50_000, dtype=np.float32)
    with launch(one(Views, method, Tensor())) as app:
        y = app.submit(x=array).result(20)["y"]
        assert np.array_equal(y, array.view(">f4") if method == "reversed" else array, equal_nan=True)


def test_a_conjugated_tensor_arrives_conjugated() -> None:
    tensor = torch.complex(torch.arange(20_000.0), torch.ones(20_000))
    with launch(one(Views, "conjugate", Tensor())) as app:
        assert torch.equal(app.submit(x=tensor).result(20)["y"], tensor.conj())


def test_roles_use_the_threads_of_torch_after_their_launcher_did() -> None:
    graph = Graph("sums")
    n = graph.placeholder("n", int)
    graph.output(y=graph.role("r", Sums).interface("sum", inputs=[[n]], outputs=["y"]).y)
    assert float((torch.ones(MIB) + 1).sum()) == 2 * MIB
    with launch(graph, start="fork") as app:
        assert app.submit(n=MIB).result(20)["y"] == 2 * MIB


def streamed(reader: type, method: str) -> Graph:
    graph = Graph("streamed")
    n = graph.placeholder("n", int)
    frames = graph.role("make", InPlace).interface("stream", inputs=[[n]], outputs=[stream("frame")])
    for k in range(2):
        read = graph.role(f"read{k}", reader).interface(method, inputs=[[frames.frame]], outputs=["y"])
        graph.output(**{f"y{k}": collect(read.y)})
    return graph


def test_a_stream_many_times_the_pool_passes_to_two_readers() -> None:
    async def body() -> None:
        async with deployed(streamed(Firsts, "first"), memory=Memory(temp_bytes=32 * MIB), credit=8) as app:
            result = await (await app.submit(n=200)).result()
            assert result == {"y0": list(range(200)), "y1": list(range(200))}
            assert await published(app) == 0

    asyncio.run(body())


def test_a_cancelled_request_gives_back_what_its_readers_held() -> None:
    async def body() -> None:
        async with deployed(streamed(Holds, "hold"), credit=8) as app:
            for _ in range(3):
                request = await app.submit(n=100)
                await all_running(app)
                assert await request.cancel()
            assert await published(app) == 0

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
            assert await published(app) == 0

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
            assert await published(app) == 0

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
