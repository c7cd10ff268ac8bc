"""KV pages over a real server: the ordinary way, waits, quotas, lies."""

from __future__ import annotations

import asyncio
import os
import threading

import numpy as np
import pytest

from omni_flow.data.aio_client import AsyncMemoryManagerClient
from omni_flow.data.errors import BadArgument, BadToken, NeverFits, PoolFull, Refused, UnknownName
from omni_flow.data.messages import L1, Group
from omni_flow.data.pool_spec import PoolSpec

from .conftest import TRANSPORTS, Make, keys, store

pytestmark = pytest.mark.parametrize("transport", TRANSPORTS)


def test_a_page_written_by_one_is_read_by_another(manager: Make) -> None:
    server = manager()
    with server.client() as writer, server.client(read_only=True) as reader:
        names = keys(5)
        room = writer.reserve("kv", 5)
        pages = writer.arena("kv/l1", write=True).pages(64, 256)
        for i, slot in enumerate(room.slots):
            pages[slot] = i + 1
        assert reader.lookup("kv", names).pages == 0
        writer.commit("kv", room.token, names)
        found = reader.lookup("kv", names)
        assert found.pages == 5
        seen = reader.arena("kv/l1").pages(64, 256)
        assert [int(seen[slot][63]) for slot in found.slots] == [1, 2, 3, 4, 5]
        with pytest.raises(Refused):
            reader.arena("kv/l1", write=True)
        with pytest.raises(Refused):
            reader.reserve("kv", 1)
        reader.unpin("kv", found.lease)
        with pytest.raises(BadToken):
            reader.unpin("kv", found.lease)


def test_what_a_closed_client_held_comes_back(manager: Make) -> None:
    server = manager()
    with server.client() as watcher:
        client = server.client()
        store(client, keys(100), pin=True)
        client.reserve("kv", 100)
        client.close()
        room = watcher.reserve("kv", 256, timeout=10)
        watcher.abort("kv", room.token)


def test_the_longest_prefix_is_pinned_and_the_rest_is_not(manager: Make) -> None:
    with manager().client() as client:
        names = keys(10)
        store(client, np.delete(names, 6, axis=0))
        found = client.lookup("kv", names)
        assert found.pages == 6
        assert client.inspect()[0]["held"] == {"kv": [0, 6]}
        client.unpin("kv", found.lease, positions=[0, 5])
        with pytest.raises(BadArgument):
            client.unpin("kv", found.lease, positions=[0])
        with pytest.raises(BadArgument):
            client.unpin("kv", found.lease, positions=[1, 1])
        client.unpin("kv", found.lease)
        assert client.inspect()[0]["held"] == {"kv": [0, 0]}


def test_groups_with_a_window_need_only_their_last_pages(manager: Make) -> None:
    with manager().client() as client:
        full, window = keys(8), keys(8)
        store(client, full)
        store(client, window[5:])
        groups = [(Group("kv"), full), (Group("kv", window=2), window)]
        found = client.lookup_groups(groups)
        assert (found.pages, found.first) == (8, (0, 6))
        assert len(found.slots) == 10
        store(client, window[1:3])
        found = client.lookup_groups([(Group("kv"), full[:5]), (Group("kv", window=2), window[:5])])
        assert (found.pages, found.first) == (3, (0, 1))


def test_objects_of_a_page_count_only_together(manager: Make) -> None:
    with manager().client() as client:
        heads = keys(12)
        store(client, np.delete(heads, 7, axis=0))
        assert client.lookup_groups([(Group("kv", stride=4), heads)]).pages == 1
        with pytest.raises(BadArgument):
            client.lookup_groups([(Group("kv", stride=5), heads)])


def test_a_duplicate_page_gives_way_to_the_first(manager: Make) -> None:
    with manager().client() as client:
        names = keys(4)
        store(client, names)
        first = client.lookup("kv", names).slots
        room = client.reserve("kv", 4)
        stored = client.commit("kv", room.token, names, pin=True)
        assert stored.status.tolist() == [1, 1, 1, 1]
        assert stored.slots.tolist() == first.tolist()
        room = client.reserve("kv", 4)
        client.commit("kv", room.token, names, keep_duplicates=True)
        client.abort("kv", room.token)


def test_a_lot_is_sealed_piece_by_piece(manager: Make) -> None:
    with manager().client() as client:
        room = client.reserve("kv", 64)
        names = keys(3)
        client.commit("kv", room.token, names, positions=[5, 9, 63])
        assert client.lookup("kv", names).slots.tolist() == [room.slots[i] for i in (5, 9, 63)]
        with pytest.raises(BadArgument):
            client.commit("kv", room.token, keys(1), positions=[9])
        with pytest.raises(BadArgument):
            client.commit("kv", room.token, keys(1), positions=[64])
        client.abort("kv", room.token, positions=[0, 1])
        client.commit("kv", room.token, keys(59))
        with pytest.raises(BadToken):
            client.abort("kv", room.token)


def test_a_slot_given_back_has_another_generation(manager: Make) -> None:
    with manager().client() as client:
        room = client.reserve("kv", 1)
        before = int(room.generations[0])
        client.abort("kv", room.token)
        again = client.reserve("kv", 1)
        assert (again.slots[0], int(again.generations[0])) == (room.slots[0], before + 1)


def test_a_fenced_page_is_given_to_nobody_before_its_time(manager: Make) -> None:
    with manager(pools=(PoolSpec(name="kv", page_bytes=64, l1_pages=4),)).client() as client:
        soon, late = client.reserve("kv", 2), client.reserve("kv", 2)
        client.abort("kv", late.token, fence_ms=3_600_000)
        client.abort("kv", soon.token, fence_ms=300)
        assert sorted(client.reserve("kv", 2, timeout=10).slots) == sorted(soon.slots)
        with pytest.raises(PoolFull):
            client.reserve("kv", 1)


def test_tokens_of_others_are_worth_nothing(manager: Make) -> None:
    server = manager()
    with server.client() as one, server.client() as other:
        room = one.reserve("kv", 2)
        store(one, names := keys(2))
        lease = one.lookup("kv", names).lease
        for token in (room.token, lease, 0, 1 << 40):
            with pytest.raises(BadToken):
                other.commit("kv", token, keys(2))
            with pytest.raises(BadToken):
                other.abort("kv", token)
            with pytest.raises(BadToken):
                other.unpin("kv", token)
        with pytest.raises(BadToken):
            one.commit("kv", lease, keys(2))
        one.commit("kv", room.token, keys(2))


def test_nonsense_is_refused_and_changes_nothing(manager: Make) -> None:
    with manager().client() as client:
        room = client.reserve("kv", 2)
        for call in (
            lambda: client.reserve("kv", 0),
            lambda: client.reserve("kv", 5000),
            lambda: client.reserve("kv", 2, least=3),
            lambda: client.reserve("kv", 1, timeout=-1),
            lambda: client.commit("kv", room.token, keys(3)),
            lambda: client.lookup("kv", keys(1), tiers=8),
            lambda: client.hint("kv", keys(1), 9, 1),
        ):
            with pytest.raises(BadArgument):
                call()
        with pytest.raises(UnknownName):
            client.reserve("other", 1)
        with pytest.raises(UnknownName):
            client.arena("other/l1")
        with pytest.raises(Refused):
            client.reserve("kv", 1, tier=2)
        assert client.check() == []
        client.commit("kv", room.token, keys(2))


def test_a_full_pool_says_who_holds_what(manager: Make) -> None:
    server = manager()
    with server.client(name="greedy") as greedy, server.client(name="late") as late:
        store(greedy, keys(156), pin=True)
        greedy.reserve("kv", 100)
        with pytest.raises(PoolFull) as full:
            late.reserve("kv", 1, timeout=0.2)
        assert late.stats()["pool_waits/kv"] == 1
        assert [(h.name, h.pid, h.reserved, h.pinned) for h in full.value.holders] == [
            ("greedy", os.getpid(), 100, 156)
        ]
        with pytest.raises(NeverFits):
            late.reserve("kv", 257, timeout=60)


def test_waiters_are_served_in_order_when_room_comes(manager: Make) -> None:
    server = manager()

    async def main() -> None:
        holder = server.client()
        held = [holder.reserve("kv", 64) for _ in range(4)]
        async with await AsyncMemoryManagerClient.connect(server.address) as client:
            order: list[str] = []

            async def want(name: str, n: int) -> None:
                await client.reserve("kv", n, timeout=20)
                order.append(name)

            tasks = [asyncio.create_task(want("big", 100))]
            while (await client.stats())["pool_l1_waiting/kv"] < 1:
                pass
            tasks.append(asyncio.create_task(want("small", 1)))
            while (await client.stats())["pool_l1_waiting/kv"] < 2:
                pass
            holder.abort("kv", held[0].token)
            await client.ping()
            assert order == []
            holder.abort("kv", held[1].token)
            await asyncio.gather(*tasks)
            assert order == ["big", "small"]
        holder.close()

    asyncio.run(main())


def test_idle_pages_make_room_and_pinned_ones_stay(manager: Make) -> None:
    with manager().client() as client:
        pinned, idle = keys(56), keys(200)
        store(client, pinned, pin=True)
        store(client, idle)
        for _ in range(5):
            store(client, keys(100))
        assert client.probe("kv", pinned).tolist() == [L1] * 56
        assert client.check() == []


def test_a_quota_is_always_there(manager: Make) -> None:
    server = manager()
    with server.client(role="engine", quotas={"kv": 100}) as engine, server.client() as other:
        store(other, keys(156), pin=True)
        with pytest.raises(PoolFull):
            other.reserve("kv", 1)
        for _ in range(3):
            room = engine.reserve("kv", 64, least=1)
            engine.commit("kv", room.token, keys(64))
            room = engine.reserve("kv", 64, least=1)
            assert len(room.slots) == 64
            engine.abort("kv", room.token)
        lot = engine.reserve("kv", 64)
        rest = engine.reserve("kv", 64, least=8)
        assert len(rest.slots) == 36
        with pytest.raises(PoolFull):
            engine.reserve("kv", 1)
        with pytest.raises(NeverFits):
            engine.reserve("kv", 101, timeout=60)
        engine.abort("kv", lot.token)
        with pytest.raises(NeverFits):
            server.client(quotas={"kv": 1})


def test_a_match_is_cut_to_what_the_quota_can_pin(manager: Make) -> None:
    server = manager()
    with server.client(role="engine", quotas={"kv": 20}) as engine, server.client() as other:
        names = keys(40)
        store(other, names)
        engine.reserve("kv", 5)
        found = engine.lookup("kv", names)
        assert found.pages == 15
        again = engine.lookup("kv", names)
        assert again.pages == 15
        assert engine.lookup("kv", names[20:]).pages == 0


def test_a_quota_ends_with_its_session(manager: Make) -> None:
    server = manager()
    engine = server.client(quotas={"kv": 200})
    with server.client() as other:
        with pytest.raises(NeverFits):
            other.reserve("kv", 100, timeout=5)
        engine.close()
        server.settle()
        other.reserve("kv", 100, timeout=5)


def test_dropping_forgets_idle_pages_only(manager: Make) -> None:
    with manager().client() as client:
        names = keys(3)
        store(client, names)
        found = client.lookup("kv", names[:1])
        assert client.drop("kv", names).tolist() == [0, 1, 1]
        assert client.probe("kv", names).tolist() == [L1, 0, 0]
        client.unpin("kv", found.lease)
        assert client.drop("kv", names).tolist() == [1, 1, 1]


def test_hints_keep_pages_longer(manager: Make) -> None:
    with manager().client() as client:
        kept = keys(50)
        store(client, kept)
        client.hint("kv", kept, 2, 600)
        for _ in range(6):
            store(client, keys(100))
        assert client.probe("kv", kept).tolist() == [L1] * 50


def test_calls_of_one_async_client_overlap(manager: Make) -> None:
    server = manager()

    async def main() -> None:
        async with await AsyncMemoryManagerClient.connect(server.address) as client:
            names = [keys(8) for _ in range(16)]
            rooms = await asyncio.gather(*(client.reserve("kv", 8) for _ in names))
            await asyncio.gather(
                *(client.commit("kv", room.token, name) for room, name in zip(rooms, names, strict=True))
            )
            found = await asyncio.gather(*(client.lookup("kv", name) for name in names))
            assert [match.pages for match in found] == [8] * 16
            await asyncio.gather(*(client.unpin("kv", match.lease) for match in found))
            with pytest.raises(BadToken):
                await client.unpin("kv", 12345)
            assert await client.check() == []

    asyncio.run(main())


def test_a_waiting_async_call_does_not_hold_up_the_others(manager: Make) -> None:
    server = manager()

    async def main() -> None:
        async with await AsyncMemoryManagerClient.connect(server.address) as client:
            all_of_it = await client.reserve("kv", 256)
            waiting = asyncio.create_task(client.reserve("kv", 1, timeout=30))
            for _ in range(10):
                await client.ping()
            assert not waiting.done()
            await client.abort("kv", all_of_it.token)
            await waiting

    asyncio.run(main())


def test_many_clients_at_once_leave_a_sound_pool(manager: Make) -> None:
    server = manager()
    faults: list[BaseException] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            with server.client() as client:
                mine = [keys(8) for _ in range(10)]
                for _ in range(60):
                    names = mine[rng.integers(10)]
                    found = client.lookup("kv", names)
                    if found.pages < 8:
                        room = client.reserve("kv", 8 - found.pages, timeout=20)
                        client.commit("kv", room.token, names[found.pages :])
                    if found.lease:
                        client.unpin("kv", found.lease)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
