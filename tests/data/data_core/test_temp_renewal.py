"""Slots that come back to who leased them are leased anew without being asked for, as long as nobody needs them."""

from __future__ import annotations

import numpy as np
import pytest

from omni_flow.data.errors import PoolFull
from omni_flow.data.ledger import CELLS
from omni_flow.data.temp_client import TempClient

from .conftest import TRANSPORTS, Make
from .temp_rig import MIB, TEMP, used

pytestmark = pytest.mark.parametrize("transport", TRANSPORTS)


def test_a_producer_that_goes_on_as_before_asks_for_nothing(manager: Make) -> None:
    server = manager(**TEMP)
    with server.client() as producer, server.client() as consumer:
        out, into = TempClient(producer), TempClient(consumer)
        offsets = set()
        for turn in range(50):
            ref = out.put(np.full(2 * MIB, turn, np.uint8))
            offsets.add(ref.offset)
            share = into.adopt(ref)
            assert (share.numpy() == turn).all()
            share.release()
            into.flush()
        stats = producer.stats()
        assert stats["temp_leased"] == len(offsets) == 1
        assert stats["temp_renewed"] == 50


def test_who_runs_low_of_slots_has_the_server_look_for_those_that_came_back(manager: Make) -> None:
    server = manager(**TEMP)
    with server.client() as producer, server.client() as consumer:
        out, into = TempClient(producer), TempClient(consumer)
        for turn in range(50):
            into.adopt(out.put(np.full(MIB, turn, np.uint8))).release()
            producer.ping()
        stats = producer.stats()
        assert stats["temp_leased"] <= 4
        assert stats["temp_renewed"] >= 46


def test_an_owner_that_looks_while_its_slot_is_leased_anew_finds_it_later(manager: Make) -> None:
    server = manager(**TEMP)
    with server.client() as client:
        temp = TempClient(client)
        ref = temp.put(np.zeros(MIB, np.uint8))
        (entry, slot, generation, _) = temp.buffers._stocks[8].published[-1]
        at = entry * CELLS
        temp.buffers._cells[at + 3] = generation + 1  # the server's two steps, and a look between them
        others = [temp.alloc(MIB) for _ in range(2)]
        temp.trim()
        temp.buffers._cells[at + 3] = generation
        assert slot not in {other.slot for other in others}
        temp.adopt(ref).release()
        temp.flush()
        temp.trim()
        client.ping()
        assert used(client) == 2 * MIB


def test_slots_kept_unused_come_back_for_those_who_need_them(manager: Make) -> None:
    server = manager(**TEMP)
    with server.client() as producer, server.client() as needy:
        out = TempClient(producer)
        for size in (1 << 16, 1 << 18, MIB):
            out.adopt(out.put(np.zeros(size, np.uint8))).release()
            out.flush()
        assert used(producer) > 0
        poor = TempClient(needy)
        with pytest.raises(PoolFull):
            poor.alloc(16 * MIB, timeout=0)
        producer.ping()
        assert poor.alloc(16 * MIB, timeout=10).nbytes == 16 * MIB


def test_slots_of_a_size_not_asked_for_lately_are_given_back(manager: Make) -> None:
    server = manager(**TEMP)
    with server.client() as client:
        temp = TempClient(client)
        temp.buffers.discard(temp.alloc(MIB))
        temp.trim(idle=True)
        assert used(client) > 0
        temp.trim(idle=True)
        assert used(client) == 0


def test_nothing_is_renewed_near_ones_own_bound(manager: Make) -> None:
    server = manager(**TEMP, temp_client_bytes=4 * MIB)
    with server.client() as client:
        temp = TempClient(client)
        shares = [temp.adopt(temp.put(np.zeros(MIB, np.uint8))) for _ in range(4)]
        for share in shares:
            share.release()
        assert temp.alloc(4 * MIB, timeout=5).size == 4 * MIB


def test_a_stale_record_of_a_published_slot_is_never_a_second_lease(manager: Make) -> None:
    server = manager(**TEMP)
    with server.client() as client:
        temp = TempClient(client)
        for turn in range(200):
            buffers = [temp.alloc(1 << (12 + turn % 5)) for _ in range(70)]
            assert len({buffer.slot for buffer in buffers}) == 70
            assert len({buffer.entry for buffer in buffers}) == 70
            refs = [temp.publish(buffer, "uint8", (1,)) for buffer in buffers]
            for ref in refs:
                temp.adopt(ref).release()
            if turn % 3:
                temp.flush()
            if not turn % 7:
                temp.trim()
        assert client.check() == []
