"""Every pool filled to the last page and held there: who waits is told in time, nobody spins, nothing wears out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from omni_flow.data.aio_client import AsyncMemoryManagerClient
from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.errors import PoolFull
from omni_flow.data.messages import L1, L2, L3
from omni_flow.data.pool_spec import PoolSpec
from omni_flow.data.temp_aio import AsyncTempClient
from omni_flow.data.temp_arrays import TempBuffer
from omni_flow.data.temp_client import TempClient

from .conftest import Make, keys, poll_timeout

PAGE = 4096
MIB = 1 << 20
TWO_TIERS = PoolSpec(name="kv", page_bytes=64, l1_pages=64, l2_pages=64, staging=4)
THREE_TIERS = PoolSpec(name="kv", page_bytes=PAGE, l1_pages=16, l2_pages=32, l3_pages=1000, staging=2)


def wait_until_asleep(pid: int, least: int, most: int) -> None:
    """Wait until a process is in an epoll_wait of so many milliseconds; one that spins never is."""
    while (timeout := poll_timeout(pid)) is None or not least <= timeout <= most:
        pass


def written(client: MemoryManagerClient, names: np.ndarray, page: int) -> None:
    """Store pages in L1 that repeat the first byte of their key."""
    pages = client.arena("kv/l1", write=True).pages(page, client.welcome.pools[0].l1_pages)
    for at in range(0, len(names), 8):
        part = names[at : at + 8]
        room = client.reserve("kv", len(part), timeout=20)
        pages[room.slots] = part[:, :1]
        client.commit("kv", room.token, part)


def allocated(temp: TempClient, nbytes: int) -> Iterator[TempBuffer]:
    """Buffers until there is no room for another."""
    with contextlib.suppress(PoolFull):
        while True:
            yield temp.alloc(nbytes, timeout=0.0)


def test_while_requests_wait_at_full_pools_the_server_sleeps(manager: Make) -> None:
    server = manager(pools=(TWO_TIERS,), temp_bytes=MIB)
    pid = server.process.pid

    async def main() -> None:
        async with (
            await AsyncMemoryManagerClient.connect(server.path) as holder,
            await AsyncMemoryManagerClient.connect(server.path) as late,
        ):
            rooms = [await holder.reserve("kv", 64, least=1, tier=tier) for tier in (L1, L2)]
            wanted = [asyncio.create_task(late.reserve("kv", 1, timeout=60, tier=tier)) for tier in (L1, L2)]
            while [(await holder.stats())[f"pool_{tier}_waiting/kv"] for tier in ("l1", "l2")] != [1, 1]:
                pass
            wait_until_asleep(pid, 30_000, 60_000)

            held = AsyncTempClient(holder)
            buffer = await held.alloc(MIB)
            wanted.append(asyncio.create_task(AsyncTempClient(late).alloc(MIB, timeout=60)))
            while (await holder.stats())["temp_waiting"] != 1:
                pass
            # Releases are written into ledgers without a message, so here the server looks now and then.
            wait_until_asleep(pid, 5, 10)

            for room in rooms:
                await holder.abort("kv", room.token)
            held.buffers.discard(buffer)
            await held.trim()
            await asyncio.gather(*wanted)

    asyncio.run(main())


def test_thousands_of_refusals_leave_a_pool_as_it_was(manager: Make) -> None:
    server = manager(pools=(TWO_TIERS,), temp_bytes=MIB)
    with server.client() as holder, server.client() as late:
        out, temp = TempClient(holder), TempClient(late)
        whole = late.stats()
        for turn in range(3):
            names = keys(30)
            room = holder.reserve("kv", 30)
            pins = holder.commit("kv", room.token, names, pin=True).lease
            rest = [holder.reserve("kv", 64, least=1, tier=tier) for tier in (L1, L2)]
            # Small and large blocks by turns, so that the arena is cut up when it is full.
            refs = [out.put(np.zeros(size, np.uint8)) for size in (4096, 65536) * 7]
            filler = list(allocated(out, 4096))
            for _ in range(700):
                for tier in (L1, L2):
                    with pytest.raises(PoolFull):
                        late.reserve("kv", 1 + turn, tier=tier)
                with pytest.raises(PoolFull):
                    temp.alloc(4096, timeout=0.0)
            holder.unpin("kv", pins)
            for one in rest:
                holder.abort("kv", one.token)
            for ref in refs:
                temp.adopt(ref).release()
            for buffer in filler:
                out.buffers.discard(buffer)
            temp.flush()
            out.trim()
            holder.drop("kv", names)
        after = late.stats()
        for name in ("pool_l1_free/kv", "pool_l2_free/kv", "temp_free_bytes", "temp_largest_free"):
            assert after[name] == whole[name], name
        assert late.check() == []


def test_pages_come_from_disk_while_clients_hold_all_that_is_theirs(manager: Make, tmp_path: Path) -> None:
    ssd = ("{python}", "-m", "omni_flow.data.ssd.mover", "{path}", str(tmp_path), str(4 * MIB), "--segment", "262144")
    server = manager(pools=(THREE_TIERS,), movers=(("copy",), ssd))
    with server.client() as client:
        while not client.stats().get("pool_l3_on/kv") or client.stats()["job_movers"] < 2:
            client.wait_end(0.01)
        names = keys(120)
        written(client, names, PAGE)
        deep = names[client.probe("kv", names) == L3][:2]
        held = [client.reserve("kv", pages, least=1, tier=tier, timeout=20) for tier, pages in ((L1, 14), (L2, 30))]
        assert [len(room.slots) for room in held] == [14, 30]
        with pytest.raises(PoolFull):
            client.reserve("kv", 1, tier=L2, timeout=0.05)
        assert client.fetch("kv", deep, tier=L2, timeout=30).tolist() == [1, 1]
        found = client.lookup("kv", deep, tiers=L2, pin=False)
        assert found.pages == 2
        pages = client.arena("kv/l2").pages(PAGE, 32)
        assert (pages[found.slots] == deep[:, :1]).all()
        for room, tier in zip(held, (L1, L2), strict=True):
            client.abort("kv", room.token)
            assert client.reserve("kv", 1, tier=tier, timeout=20).token


def test_copies_of_pages_that_are_pinned_above_make_room_below(manager: Make) -> None:
    with manager(pools=(TWO_TIERS,), movers=(("copy",),)).client() as client:
        while not client.stats()["job_movers"]:
            client.wait_end(0.01)
        names = keys(50)
        written(client, names, 64)
        assert client.fetch("kv", names, tier=L2).all()
        pins = client.lookup("kv", names, tiers=L1)
        assert pins.pages == 50
        assert client.probe("kv", names).tolist() == [L1 | L2] * 50
        room = client.reserve("kv", 60, tier=L2)
        assert len(room.slots) == 60
        assert (client.probe("kv", names) & L1).all()
        pages = client.arena("kv/l1").pages(64, 64)
        assert (pages[pins.slots] == names[:, :1]).all()
        client.unpin("kv", pins.lease)
