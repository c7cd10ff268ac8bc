"""The tiers below L1 of a deployment: when there are any, where they lie, what becomes of the movers between them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from omni_flow import Graph, launch
from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.identity import PageHash
from omni_flow.data.messages import L3
from omni_flow.data.pool_spec import PoolSpec
from omni_flow.deploy.errors import LaunchError
from omni_flow.deploy.launchers import LocalLauncher
from omni_flow.deploy.local import AsyncDeployment
from omni_flow.deploy.memory import Memory

from .conftest import Events, alive, deployed, ended

PAGE = 4096
SSD_BYTES = 64 << 20


class Deep:
    """A role with a pool of `l1` and `l2` pages, in which it does nothing."""

    @classmethod
    def kv_pools(cls, l1: int = 8, l2: int = 32) -> tuple[PoolSpec, ...]:
        return (PoolSpec(name="kv", page_bytes=PAGE, l1_pages=l1, l2_pages=l2),)

    def __init__(self, l1: int = 8, l2: int = 32) -> None:
        pass

    async def run(self, x: int) -> int:
        return x + 1


def graph(**init: Any) -> Graph:
    g = Graph("deep")
    x = g.placeholder("x", int)
    g.output(y=g.role("r", Deep, init=init).interface("run", [[x]], ["y"]).y)
    return g


def ssd(folder: Path, **more: Any) -> Memory:
    return Memory(temp_bytes=1 << 20, ssd=str(folder), ssd_bytes=SSD_BYTES, **more)


def client_of(app: AsyncDeployment, number: int = 0) -> MemoryManagerClient:
    assert isinstance(app.launcher, LocalLauncher)
    return MemoryManagerClient(app.launcher.memories[number].address, name="test")


def movers(client: MemoryManagerClient) -> dict[str, int]:
    """The process of each mover."""
    return {row["name"]: row["pid"] for row in client.inspect() if row["role"] == "mover"}


async def until(client: MemoryManagerClient, true: Callable[[], Any]) -> None:
    """Wait until something is true of a memory manager; the loop turns meanwhile. The test's own limit ends it."""

    def wait() -> None:
        while not true():
            assert not client.wait_end(0.02)

    await asyncio.to_thread(wait)


async def until_up(client: MemoryManagerClient) -> dict[str, int]:
    """Wait until both movers are there and L3 is on; their processes."""
    await until(client, lambda: len(movers(client)) == 2 and client.stats()["pool_l3_on/kv"])
    return movers(client)


async def until_on_disk(client: MemoryManagerClient, names: list[PageHash]) -> None:
    """Have pages written, and others, until the first four of them are on the disk and only there."""

    def write(name: PageHash) -> None:
        room = client.reserve("kv", 1, timeout=60)
        client.commit("kv", room.token, [name])

    def push_down() -> None:
        for name in names:
            write(name)
        while set(client.probe("kv", names[:4]).tolist()) != {L3}:
            write(PageHash(os.urandom(32)))

    await asyncio.to_thread(push_down)


def names_of(count: int) -> list[PageHash]:
    return [PageHash(os.urandom(32)) for _ in range(count)]


def test_a_pool_without_an_l2_has_no_movers_and_one_with_an_l2_has_them_at_each_manager(tmp_path: Path) -> None:
    flat, deep = Deep.kv_pools(l2=0), Deep.kv_pools()
    assert Memory(pools=flat).config("/m.sock", "g", 0).movers == ()
    assert Memory(pools=deep).config("/m.sock", "g", 0).movers == (("copy",),)
    memory = ssd(tmp_path / "ssd", pools=deep, managers=2)
    first, second = [memory.config("/m.sock", "a/graph", number) for number in range(2)]
    for number, config in enumerate((first, second)):
        copy, disk = config.movers
        assert copy == ("copy",)
        assert disk[-2:] == (f"{tmp_path}/ssd/a%2Fgraph.{number}", str(SSD_BYTES // 2))
        assert Path(disk[-2]).is_dir()
        assert [pool.l3_pages for pool in config.pools] == [SSD_BYTES // 2 // (2 * PAGE)]


def test_half_of_an_ssd_tier_is_refused(tmp_path: Path) -> None:
    for half in ({"ssd": str(tmp_path)}, {"ssd_bytes": 1 << 30}, {"ssd": str(tmp_path), "ssd_bytes": -1}):
        with pytest.raises(ValueError, match="an SSD tier is a directory and a size"):
            Memory(**half)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("folder", "size", "l2", "said"),
    [
        ("file/ssd", SSD_BYTES, 32, r"file/ssd/deep\.0 can't be used: Not a directory; name one"),
        ("/proc/nowhere", SSD_BYTES, 32, r"/proc/nowhere/deep\.0 can't be used"),
        ("ssd", 1 << 20, 32, "a cap of 1048576 bytes holds .* raise the cap to"),
        ("ssd", SSD_BYTES, 0, "needs a pool with an L2; .* an engine role l2_tokens"),
    ],
)
def test_an_ssd_tier_that_cannot_be_is_refused_before_anything_starts(
    tmp_path: Path, run_directories: Path, folder: str, size: int, l2: int, said: str
) -> None:
    (tmp_path / "file").touch()
    memory = Memory(ssd=str(tmp_path / folder), ssd_bytes=size)
    with pytest.raises(LaunchError, match="the SSD tier of graph 'deep' can't be: .*" + said):
        launch(graph(l2=l2), memory=memory)
    assert list(run_directories.iterdir()) == []


def test_the_movers_of_a_deployment_end_with_it_even_one_that_stands_still(tmp_path: Path) -> None:
    async def body() -> None:
        async with deployed(graph(), memory=ssd(tmp_path / "ssd")) as app:
            with client_of(app) as client:
                there = await until_up(client)
            for pid in there.values():
                os.kill(pid, signal.SIGSTOP)
        assert [name for name, pid in there.items() if alive(pid)] == []

    asyncio.run(body())


def test_a_memory_manager_that_is_started_anew_has_movers_again_and_what_was_on_the_disk(tmp_path: Path) -> None:
    names = names_of(100)

    async def body() -> None:
        events = Events()
        async with deployed(graph(), events, memory=ssd(tmp_path / "ssd")) as app:
            assert isinstance(app.launcher, LocalLauncher)
            assert app.launcher.memory is not None
            assert app.launcher.memory.pid is not None
            with client_of(app) as client:
                before = await until_up(client)
                await until_on_disk(client, names)
            os.kill(app.launcher.memory.pid, signal.SIGKILL)
            for pid in before.values():
                await ended(pid)
            await events.until("the memory manager is up again")
            with client_of(app) as client:
                after = await until_up(client)
                assert not set(before.values()) & set(after.values())
                assert client.fetch("kv", names[:4]).all()
            assert (await (await app.submit(x=1)).result())["y"] == 2

    asyncio.run(body())


def test_movers_that_were_killed_are_started_anew_and_the_graph_goes_on(tmp_path: Path) -> None:
    names = names_of(100)

    async def body() -> None:
        async with deployed(graph(), memory=ssd(tmp_path / "ssd")) as app:
            with client_of(app) as client:
                before = await until_up(client)
                await until_on_disk(client, names)
                for pid in before.values():
                    os.kill(pid, signal.SIGKILL)
                assert (await (await app.submit(x=1)).result())["y"] == 2
                for pid in before.values():
                    await ended(pid)
                await until_up(client)
                assert client.fetch("kv", names[:4]).all()
                assert client.check() == []

    asyncio.run(body())


def test_what_is_on_the_disk_is_found_by_the_next_deployment_at_each_of_its_managers(tmp_path: Path) -> None:
    names = names_of(100)

    async def body() -> None:
        for time in range(2):
            async with deployed(graph(), replicas={"r": 2}, memory=ssd(tmp_path / "ssd", managers=2)) as app:
                for number in range(2):
                    mine = names[50 * number :][:50]
                    with client_of(app, number) as client:
                        await until_up(client)
                        if time == 0:
                            await until_on_disk(client, mine)
                        found = client.probe("kv", names) & L3
                    assert found[50 * number :][:4].all()
                    assert not found[50 * (1 - number) :][:50].any()

    asyncio.run(body())


def test_a_deployment_whose_place_on_the_disk_is_taken_says_so_and_has_it_when_it_is_free(tmp_path: Path) -> None:
    async def body() -> None:
        events = Events()
        async with AsyncExitStack() as after:
            async with deployed(graph(), memory=ssd(tmp_path / "ssd")) as first:
                with client_of(first) as client:
                    pid = (await until_up(client))["ssd mover"]
                second = await after.enter_async_context(deployed(graph(), events, memory=ssd(tmp_path / "ssd")))
                assert f"pid {pid}" in await events.until(f"{tmp_path}/ssd/deep.0/kv is in use")
                assert (await (await second.submit(x=1)).result())["y"] == 2
                with client_of(second) as client:
                    assert not client.stats()["pool_l3_on/kv"]
            with client_of(second) as client:
                await until_up(client)

    asyncio.run(body())
