"""TempBuffers between real processes: hand-over, fan-out, death, bounds."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable

import numpy as np
import pytest

from omni_flow.data.aio_client import AsyncMemoryManagerClient
from omni_flow.data.errors import BadArgument, BadToken, NeverFits, PoolFull, Refused, StaleDescriptor
from omni_flow.data.ledger import HELD_ENTRIES, PUBLISHED, TOP
from omni_flow.data.temp_aio import AsyncTempClient
from omni_flow.data.temp_client import TempClient, decode_ref, encode_ref
from omni_flow.refs import TensorRef

from .conftest import TRANSPORTS, Make, Manager, Puppet

pytestmark = pytest.mark.parametrize("transport", TRANSPORTS)

MIB = 1 << 20
TEMP = {"pools": (), "temp_bytes": 4 * MIB, "node": "n"}


def used(server: Manager) -> int:
    """Bytes in slots, all ledgers looked at."""
    with server.client() as client:
        temp = TempClient(client)
        temp.flush()
        stats = client.stats()
        return int(stats["temp_bytes"] - stats["temp_free_bytes"])


def test_what_is_published_is_read_without_a_copy(manager: Make) -> None:
    server = manager(**TEMP)
    with server.client() as producer, server.client(read_only=True) as consumer:
        out, into = TempClient(producer), TempClient(consumer)
        buffer = out.alloc(4000)
        values = buffer.numpy((10, 100), np.float32)
        values[:] = np.arange(1000).reshape(10, 100)
        raw = encode_ref(out.publish(buffer, "float32", (10, 100)))
        assert len(raw) <= 128
        seen = into.adopt(decode_ref(raw)).numpy()
        assert (seen == values).all()
        assert not seen.flags.writeable
        values[0, 0] = 7
        assert seen[0, 0] == 7
        with pytest.raises(Refused):
            into.alloc(10)


def test_who_cannot_reach_the_managers_socket_is_refused_its_memory_by_name(manager: Make, transport: str) -> None:
    server = manager(**TEMP)
    with server.client() as client:
        os.rename(server.path, server.path + ".away")  # as on another machine
        if transport == "unix":  # descriptors come by the connection itself
            temp = TempClient(client)
            assert temp.adopt(temp.put(np.ones(8))).numpy().sum() == 8
        else:
            with pytest.raises(Refused, match=r"arena temp of node n can't be mapped here: .* carries no descriptors"):
                TempClient(client)
        client.ping()
        os.rename(server.path + ".away", server.path)


def test_torch_reads_the_same_bytes(manager: Make) -> None:
    torch = pytest.importorskip("torch")
    server = manager(**TEMP)
    with server.client() as client:
        temp = TempClient(client)
        buffer = temp.alloc(64)
        buffer.torch((32,), torch.bfloat16)[:] = torch.arange(32)
        seen = temp.adopt(temp.publish(buffer, "bfloat16", (4, 8))).torch()
        assert seen.shape == (4, 8)
        assert seen.dtype == torch.bfloat16
        assert seen.sum().item() == 496.0
        assert np.from_dlpack(seen.view(torch.uint16)).shape == (4, 8)


def test_a_share_lasts_as_long_as_any_view_of_it(manager: Make) -> None:
    server = manager(**TEMP)
    with server.client() as client:
        temp = TempClient(client)
        ref = temp.put(np.arange(1000))
        whole = temp.adopt(ref).numpy()
        part = whole[10:20].reshape(2, 5)
        del whole
        gc.collect()
        temp.flush()
        assert part[0, 0] == 10
        temp.adopt(ref)
        del part
        gc.collect()
        temp.flush()
        with pytest.raises(StaleDescriptor):
            temp.adopt(ref)


def test_a_slot_is_free_when_the_last_consumer_has_released(manager: Make) -> None:
    server = manager(**TEMP)
    with server.client() as producer, server.client() as one, server.client() as other:
        out, a, b = TempClient(producer), TempClient(one), TempClient(other)
        ref = out.put(np.zeros(MIB // 8), consumers=2)
        first, second = a.adopt(ref), b.adopt(ref)
        first.release()
        a.flush()
        assert second.valid()
        assert used(server) >= MIB
        second.release()
        assert not second.valid()
        b.flush()
        out.trim()
        assert used(server) == 0
        assert producer.check() == []


def test_releases_are_found_when_room_is_short_without_a_bell(manager: Make) -> None:
    server = manager(**TEMP)
    with server.client() as producer, server.client() as consumer:
        out, into = TempClient(producer), TempClient(consumer)
        for i in range(40):
            ref = out.put(np.full(MIB // 8, i), timeout=5)
            share = into.adopt(ref)
            assert share.numpy()[0] == i
            share.release()


@pytest.mark.parametrize("published", [False, True])
def test_a_killed_producer_takes_only_what_it_had_not_published(
    published: bool, manager: Make, puppet: Callable[[str], Puppet]
) -> None:
    server = manager(**TEMP)
    doll = puppet(server.address)
    doll.do("t = TempClient(c); b = t.alloc(1 << 20); b.numpy((1 << 20,), np.uint8)[:] = 9")
    if published:
        raw = doll.do("r = encode_ref(t.publish(b, 'uint8', (1 << 20,)))")
    doll.kill()
    server.settle()
    if not published:
        assert used(server) == 0
        return
    with server.client() as client:
        temp = TempClient(client)
        share = temp.adopt(decode_ref(eval(raw)))
        assert (share.numpy() == 9).all()
        share.release()
    server.settle()
    assert used(server) == 0


@pytest.mark.parametrize("released", [False, True])
def test_a_killed_consumer_gives_its_share_back_once(
    released: bool, manager: Make, puppet: Callable[[str], Puppet]
) -> None:
    server = manager(**TEMP)
    with server.client() as producer:
        out = TempClient(producer)
        ref = out.put(np.zeros(MIB // 8), consumers=2)
        doll = puppet(server.address)
        doll.do(f"t = TempClient(c); s = t.adopt(decode_ref({encode_ref(ref)!r}))")
        if released:
            doll.do("s.release()")
        doll.kill()
        server.settle()
        assert used(server) >= MIB
        mine = out.adopt(ref)
        assert mine.valid()
        mine.release()
        out.flush()
        out.trim()
        assert used(server) == 0


def test_shares_of_a_dead_producer_that_nobody_adopts_are_dropped(
    manager: Make, puppet: Callable[[str], Puppet]
) -> None:
    server = manager(**TEMP, orphan_s=0.2)
    with server.client() as client:
        temp = TempClient(client)
        doll = puppet(server.address)
        raw = doll.do("t = TempClient(c); r = encode_ref(t.put(np.arange(1 << 17), consumers=3))")
        ref = decode_ref(eval(raw))
        held = temp.adopt(ref)
        doll.kill()
        server.settle()
        while client.stats()["temp_orphaned"] < 1:
            pass
        assert not client.wait_end(0.5)
        assert held.valid()
        assert (held.numpy() == np.arange(1 << 17)).all()
        held.release()
        while client.stats()["temp_orphans"]:
            pass
        with pytest.raises(StaleDescriptor):
            temp.adopt(ref)
        assert used(server) == 0


def test_a_producer_can_take_back_what_nobody_will_read(manager: Make) -> None:
    server = manager(**TEMP)
    with server.client() as producer, server.client() as other:
        out, stranger = TempClient(producer), TempClient(other)
        ref = out.put(np.zeros(MIB // 8), consumers=3)
        with pytest.raises(BadToken):
            stranger.retract(ref)
        with pytest.raises(BadToken):
            out.retract(ref, 4)
        out.retract(ref, 2)
        stranger.adopt(ref).release()
        stranger.flush()
        with pytest.raises(StaleDescriptor):
            out.adopt(ref)


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
            holder.adopt(refs[2]).release()
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


def test_liars_harm_only_themselves(manager: Make) -> None:
    server = manager(**TEMP)
    with server.client() as honest, server.client() as liar:
        out, lying = TempClient(honest), TempClient(liar)
        mine = out.alloc(4096)
        cells = np.frombuffer(lying.buffers._cells, np.uint32).reshape(-1, 4)
        cells[4096:4100] = [[2, 1, mine.slot, mine.generation], [2, 9, 1 << 30, 1], [2, 0, 0, 0], [7, 7, 7, 7]]
        cells[:10] = [PUBLISHED, 1 << 31, mine.slot, mine.generation]
        lying.buffers._cells[TOP] = 4
        lying.flush()
        with pytest.raises(BadToken):
            liar.call(0x32, None, (np.array([5], np.uint32),))
        for ref in (
            TensorRef("n", 0, mine.offset, 4096, mine.generation + 1, "uint8", (4096,)),
            TensorRef("n", 0, 100 * MIB, 4096, 1, "uint8", (4096,)),
            TensorRef("n", 0, 100, 4096, 1, "uint8", (4096,)),
            TensorRef("n", 0, 0, 100 * MIB, 1, "uint8", (4096,)),
        ):
            with pytest.raises(StaleDescriptor):
                lying.adopt(ref)
        assert honest.stats()["temp_bad_releases"] >= 3
        assert honest.check() == []
        ref = out.publish(mine, "uint8", (4096,))
        with pytest.raises(StaleDescriptor):
            out.publish(mine, "uint8", (4096,))
        out.adopt(ref).release()
        with pytest.raises(BadArgument):
            out.publish(out.alloc(10), "uint8", (10,), consumers=0)


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


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_a_tensor_of_a_type_that_numpy_lacks_is_read(manager: Make, name: str) -> None:
    torch = pytest.importorskip("torch")
    server = manager(**TEMP)
    with server.client() as client:
        temp = TempClient(client)
        values = torch.arange(8).to(getattr(torch, name))
        buffer = temp.alloc(8)
        buffer.torch((8,), values.dtype).copy_(values)
        seen = temp.adopt(temp.publish(buffer, name, (2, 4))).torch()
        assert seen.dtype == values.dtype
        assert seen.float().tolist() == values.float().reshape(2, 4).tolist()


def test_an_array_of_the_other_byte_order_is_read_with_its_values(manager: Make) -> None:
    server = manager(**TEMP)
    with server.client() as client:
        temp = TempClient(client)
        values = np.arange(6, dtype=np.dtype("f4").newbyteorder()).reshape(2, 3)
        assert (temp.adopt(temp.put(values)).numpy() == values).all()


def test_arrays_of_objects_texts_and_records_are_refused(manager: Make) -> None:
    server = manager(**TEMP)
    with server.client() as client:
        temp = TempClient(client)
        for values in (np.array([object()]), np.array(["a"]), np.array([b"a"]), np.zeros(2, [("a", "i4")])):
            with pytest.raises(BadArgument, match="no byte form"):
                temp.put(values)
        lie = temp.publish(temp.alloc(8), "object", (1,))
        with pytest.raises(BadArgument, match="no byte form"):
            temp.adopt(lie).numpy()


def test_an_array_larger_than_its_buffer_is_refused_to_its_reader(manager: Make) -> None:
    server = manager(**TEMP)
    with server.client() as client:
        temp = TempClient(client)
        share = temp.adopt(temp.publish(temp.alloc(4096), "float32", (1025,)))
        with pytest.raises(BadArgument, match="in 4096 bytes"):
            share.numpy()


def test_after_a_restart_buffers_are_new_and_old_descriptors_stale(manager: Make) -> None:
    server = manager(**TEMP)
    with server.client() as client:
        temp = TempClient(client)
        ref = temp.put(np.zeros(8))
        share = temp.adopt(ref)
        server.kill()
        server.again()
        with pytest.raises(Exception, match="started again"):
            temp.flush()
        share.release()
        with pytest.raises(StaleDescriptor):
            temp.adopt(TensorRef("n", 0, ref.offset, ref.nbytes, ref.generation + 5, ref.dtype, ref.shape))
        assert temp.adopt(temp.put(np.ones(8))).numpy().sum() == 8


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
