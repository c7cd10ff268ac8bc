"""Room in the TempBuffer pool: bounds, waits, and who gets what comes free."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from omni_flow.data.aio_client import AsyncMemoryManagerClient
from omni_flow.data.errors import NeverFits, PoolFull
from omni_flow.data.ledger import HELD_ENTRIES
from omni_flow.data.temp_aio import AsyncTempClient
from omni_flow.data.temp_client import TempClient

from .conftest import TRANSPORTS, Make, Puppet

pytestmark = pytest.mark.parametrize("transport", TRANSPORTS)

MIB = 1 << 20
TEMP = {"pools": (), "temp_bytes": 4 * MIB, "node": "n"}


def test_releases_are_found_when_room_is_short_without_a_bell(manager: Make) -> None:
    server = manager(**TEMP)
    with server.client() as producer, server.client() as consumer:
        out, into = TempClient(producer), TempClient(consumer)
        for i in range(40):
            ref = out.put(np.full(MIB // 8, i), timeout=5)
            share = into.adopt(ref)
            assert share.numpy()[0] == i
            share.release()


def test_a_full_pool_ends_a_wait_with_the_names_of_the_holders(manager: Make) -> None:
    server = manager(**TEMP)
    with server.client(name="hoarder") as one, server.client() as two:
        hoarder, late = TempClient(one), TempClient(two)
        refs = [hoarder.put(np.zeros(MIB // 8)) for _ in range(4)]
        with pytest.raises(PoolFull) as full:
            late.alloc(4096, timeout=0.1)
        assert full.value.holders[0].name == "hoarder"
        with pytest.raises(NeverFits):
            late.alloc(5 * MIB, timeout=10)
        hoarder.adopt(refs[0]).release()
        late.alloc(4096, timeout=10)


def test_a_waiter_gets_the_room_that_comes_free(manager: Make) -> None:
    server = manager(**TEMP)

    async def main() -> None:
        async with (
            await AsyncMemoryManagerClient.connect(server.address) as one,
            await AsyncMemoryManagerClient.connect(server.address) as two,
        ):
            holder, waiter = AsyncTempClient(one), AsyncTempClient(two)
            refs = [await holder.put(np.zeros(MIB // 8)) for _ in range(4)]
            waiting = asyncio.create_task(waiter.alloc(MIB, timeout=30))
            while not (await one.stats())["temp_waiting"]:
                pass
            (await holder.adopt(refs[2])).release()
            buffer = await waiting
            assert buffer.offset == refs[2].offset
            assert buffer.generation == refs[2].generation + 1

    asyncio.run(main())


def test_one_client_is_bounded_and_the_others_are_not_held_up(manager: Make) -> None:
    server = manager(**TEMP, temp_client_bytes=2 * MIB)
    with server.client() as one, server.client() as two:
        greedy, modest = TempClient(one), TempClient(two)
        refs = [greedy.put(np.zeros(MIB // 8)) for _ in range(2)]
        with pytest.raises(PoolFull, match="consumers must release"):
            greedy.alloc(4096, timeout=0.1)
        modest.put(np.zeros(MIB // 8))
        with pytest.raises(NeverFits):
            modest.alloc(4 * MIB)
        modest.adopt(refs[0]).release()
        greedy.alloc(4096, timeout=10)


def test_who_is_killed_while_it_waits_at_its_own_bound_is_leased_nothing_more(
    manager: Make, puppet: Callable[[str], Puppet]
) -> None:
    server = manager(**TEMP, temp_client_bytes=2 * MIB)
    with server.client() as client:
        doll = puppet(server.address)
        doll.do("t = TempClient(c); held = [t.alloc(1) for _ in range(512)]")  # so many that reclaiming takes turns
        doll.send("t.alloc(1, timeout=60)")
        while not client.stats()["temp_waiting"]:
            pass
        doll.kill()
        server.settle()
        assert client.check() == []
        assert client.stats()["temp_slots"] == 0


def test_larger_than_the_largest_block_goes_to_the_large_area(manager: Make) -> None:
    server = manager(**TEMP, temp_large_bytes=8 * MIB)
    with server.client() as client:
        temp = TempClient(client)
        buffer = temp.alloc(5 * MIB)
        assert buffer.offset >= 4 * MIB
        buffer.view()[5 * MIB - 1] = 3
        share = temp.adopt(temp.publish(buffer, "uint8", (5 * MIB,)))
        assert share.view()[5 * MIB - 1] == 3
        share.release()
        temp.alloc(8 * MIB, timeout=5)


def test_more_shares_than_the_ledger_has_entries_is_a_typed_error(manager: Make) -> None:
    server = manager(**TEMP)
    with server.client() as client:
        temp = TempClient(client)
        ref = temp.put(np.zeros(8), consumers=HELD_ENTRIES + 1)
        shares = [temp.adopt(ref) for _ in range(HELD_ENTRIES)]
        with pytest.raises(PoolFull, match="release some"):
            temp.adopt(ref)
        shares.pop().release()
        temp.flush()
        temp.adopt(ref).release()
        shares.clear()
        temp.flush()
        assert client.check() == []


def test_what_an_event_loop_has_released_makes_room_for_what_it_adopts(manager: Make) -> None:
    server = manager(**TEMP)

    async def main() -> None:
        async with await AsyncMemoryManagerClient.connect(server.address) as client:
            temp = AsyncTempClient(client)
            ref = await temp.put(np.zeros(8), consumers=HELD_ENTRIES + 1)
            shares = [await temp.adopt(ref) for _ in range(HELD_ENTRIES)]
            with pytest.raises(PoolFull, match="release some"):
                await temp.adopt(ref)
            shares.pop().release()
            shares.append(await temp.adopt(ref))

    asyncio.run(main())


def test_slots_that_lie_idle_elsewhere_come_back_when_room_is_short(manager: Make) -> None:
    server = manager(**TEMP)

    async def main() -> None:
        async with await AsyncMemoryManagerClient.connect(server.address) as idle:
            rich = AsyncTempClient(idle)
            for size in (4096, 16384, 65536):
                rich.buffers.discard(await rich.alloc(size))
            with server.client() as other:
                poor = TempClient(other)

                def take_all() -> None:
                    held = [poor.alloc(MIB // 4, timeout=20) for _ in range(16)]
                    assert len(held) == 16

                await asyncio.get_running_loop().run_in_executor(None, take_all)

    asyncio.run(main())
