"""TempBuffers between real processes: hand-over, fan-out, death, lies."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

import numpy as np
import pytest

from omni_flow.data.errors import BadArgument, BadToken, Refused, StaleDescriptor
from omni_flow.data.ledger import PUBLISHED, TOP
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


def test_a_buffer_discarded_after_it_was_published_stays_its_readers(manager: Make) -> None:
    with manager(**TEMP).client() as client:
        temp = TempClient(client)
        buffer = temp.alloc(5000)
        ref = temp.publish(buffer, "uint8", (5000,))
        temp.buffers.discard(buffer)
        share = temp.adopt(ref)
        assert ref.offset not in {temp.alloc(5000).offset for _ in range(20)}
        assert share.valid()


def test_a_discarded_buffer_is_had_once_and_never_published(manager: Make) -> None:
    with manager(**TEMP).client() as client:
        temp = TempClient(client)
        buffer = temp.alloc(5000)
        temp.buffers.discard(buffer)
        temp.buffers.discard(buffer)
        with pytest.raises(StaleDescriptor, match="not leased"):
            temp.publish(buffer, "uint8", (5000,))
        assert len({temp.alloc(5000).slot for _ in range(20)}) == 20
        temp.trim()
        client.ping()
        assert client.check() == []


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
