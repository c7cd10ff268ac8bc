"""Slots that an only reader gives back to their owner directly: no call, no second reader, whoever dies when."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from omni_flow.data.errors import DataError, StaleDescriptor
from omni_flow.data.ledger import BACK_AT, BLOCK, CELLS, FORWARDS_AT, HELD, LEASED, OWNED, ROW, SOLE, TOP
from omni_flow.data.temp_client import TempClient, decode_ref, encode_ref
from omni_flow.refs import TensorRef

from .conftest import TRANSPORTS, Make, Puppet
from .temp_rig import MIB, TEMP, all_free

pytestmark = pytest.mark.parametrize("transport", TRANSPORTS)


@pytest.mark.parametrize("nbytes", [5000, MIB])
def test_slots_go_to_and_fro_without_the_server(nbytes: int, manager: Make) -> None:
    server = manager(**TEMP)
    with server.client() as producer, server.client() as consumer:
        out, into = TempClient(producer, direct=True), TempClient(consumer)
        old = out.put(np.zeros(nbytes, np.uint8))
        into.adopt(old).release()
        before = producer.stats()
        offsets = set()
        for turn in range(300):
            ref = out.put(np.full(nbytes, turn % 256, np.uint8))
            offsets.add(ref.offset)
            share = into.adopt(ref)
            assert (share.numpy() == turn % 256).all()
            assert share.valid()
            share.release()
        assert offsets == {old.offset}
        assert producer.stats()["requests"] == before["requests"] + 1
        with pytest.raises(StaleDescriptor, match="generation"):
            into.adopt(old)
        assert producer.stats()["temp_bad_releases"] == 0


def test_an_only_share_is_adopted_once(manager: Make) -> None:
    server = manager(**TEMP)
    with server.client() as producer, server.client() as one, server.client() as two:
        out = TempClient(producer, direct=True)
        ref = out.put(np.full(MIB, 7, np.uint8))
        share = TempClient(one).adopt(ref)
        with pytest.raises(StaleDescriptor, match="adopted before"):
            TempClient(two).adopt(ref)
        assert (share.numpy() == 7).all()


@pytest.mark.parametrize("read_only", [False, True])
def test_what_is_forwarded_is_not_its_owners_before_all_are_done(read_only: bool, manager: Make) -> None:
    server = manager(**TEMP)
    with server.client() as a, server.client() as b, server.client(read_only=read_only) as c:
        out, via, end = TempClient(a, direct=True), TempClient(b), TempClient(c)
        ref = out.put(np.full(MIB, 7, np.uint8))
        share = via.adopt(ref)
        via.forward(share, 2)
        share.release()
        via.flush()
        first, second = end.adopt(ref), end.adopt(ref)
        first.release()
        end.flush()
        others = [out.put(np.full(MIB, 9, np.uint8)) for _ in range(3)]
        assert (second.numpy() == 7).all()
        assert ref.offset not in {other.offset for other in others}
        second.release()
        end.flush()
        assert not second.valid()
        assert a.stats()["temp_bad_releases"] == 0


def test_a_reader_that_may_not_write_is_counted_by_the_server(manager: Make) -> None:
    server = manager(**TEMP)
    with server.client() as producer, server.client(read_only=True) as consumer:
        out, into = TempClient(producer, direct=True), TempClient(consumer)
        ref = out.put(np.full(MIB, 7, np.uint8))
        share = into.adopt(ref)
        assert (share.numpy() == 7).all()
        share.release()
        into.flush()
        assert producer.stats()["temp_renewed"] == 1
        assert out.put(np.zeros(MIB, np.uint8)).offset == ref.offset


@pytest.mark.parametrize("end", ["holding", "between"])
def test_a_killed_reader_gives_back(end: str, manager: Make, puppet: Callable[[str], Puppet]) -> None:
    """`between`: its owner may lease the slot anew, and its ledger still says that it holds it."""
    server = manager(**TEMP)
    with server.client() as producer:
        out = TempClient(producer, direct=True)
        ref = out.put(np.full(MIB, 7, np.uint8))
        doll = puppet(server.address)
        doll.do("t = TempClient(c)")
        doll.do(f"s = t.adopt(decode_ref({encode_ref(ref)!r}))")
        if end == "between":
            out.buffers._table[ref.offset // BLOCK * ROW + BACK_AT] = ref.generation
            again = out.put(np.full(MIB, 9, np.uint8))
            assert again.offset == ref.offset
        doll.kill()
        server.settle()
        if end == "between":
            share = out.adopt(again)
            assert (share.numpy() == 9).all()
            share.release()
        assert out.put(np.zeros(MIB, np.uint8)).offset == ref.offset
        stats = producer.stats()
        assert stats["temp_bad_releases"] == stats["temp_renewed"] == 0
        assert stats["temp_published"] == 1


def test_a_liar_that_dies_takes_nothing_from_an_only_reader(manager: Make) -> None:
    server = manager(**TEMP)
    with server.client() as producer, server.client() as consumer, server.client() as liar:
        out, into, lying = TempClient(producer, direct=True), TempClient(consumer), TempClient(liar)
        ref = out.put(np.full(MIB, 7, np.uint8))
        share = into.adopt(ref)
        cells = np.frombuffer(lying.buffers._cells, np.uint32).reshape(-1, CELLS)
        cells[OWNED] = [SOLE, 1, ref.offset // BLOCK, ref.generation]
        lying.buffers._cells[TOP] = 1
        liar.close()
        server.settle()
        assert out.put(np.full(MIB, 9, np.uint8)).offset != ref.offset
        assert (share.numpy() == 7).all()


PRODUCER = (
    "t = TempClient(c, direct=True); b = t.alloc(1 << 20); b.view()[:] = bytes([7]) * (1 << 20)",
    "ref = t.publish(b, 'uint8', (1 << 20,)); r = encode_ref(ref).hex()",
)


@pytest.mark.parametrize("adopted", [False, True])
@pytest.mark.parametrize("released", [False, True])
def test_a_killed_producer_costs_its_only_reader_nothing(
    adopted: bool, released: bool, manager: Make, puppet: Callable[[str], Puppet]
) -> None:
    """And what the reader gives back after that is found without a word, long before `orphan_s`."""
    server = manager(**TEMP, orphan_s=3600.0)
    doll = puppet(server.address)
    ref = published(doll)
    with server.client() as consumer:
        into = TempClient(consumer)
        share = into.adopt(ref) if adopted else None
        if share is not None and released:
            share.release()
        doll.kill()
        server.settle()
        if share is None:
            share = into.adopt(ref)
        if not (adopted and released):
            assert (share.numpy() == 7).all()
            assert share.valid()
            share.release()
        while consumer.stats()["temp_slots"]:
            consumer.ping()
        assert consumer.stats()["temp_bad_releases"] == 0
    all_free(server)


def published(doll: Puppet) -> TensorRef:
    for line in PRODUCER:
        raw = doll.do(line)
    return decode_ref(bytes.fromhex(raw.strip("'")))


@pytest.mark.parametrize("written", ["state", "table", "entry"])
def test_an_owner_killed_while_it_leases_anew_leaves_a_free_slot(
    written: str, manager: Make, puppet: Callable[[str], Puppet]
) -> None:
    server = manager(**TEMP)
    doll = puppet(server.address)
    ref = published(doll)
    at, row = "b.entry * 4", f"{ref.offset // BLOCK * ROW}"
    with server.client() as consumer:
        into = TempClient(consumer)
        into.adopt(ref).release()
        doll.do(f"t.buffers._cells[{at}] = {LEASED}")
        if written != "state":
            doll.do(f"t.buffers._table[{row}] = {ref.generation + 1}")
        if written == "entry":
            doll.do(f"t.buffers._cells[{at} + 3] = {ref.generation + 1}")
        assert consumer.check() == []
        doll.kill()
        all_free(server)
        with pytest.raises(StaleDescriptor):
            into.adopt(ref)
        fresh = into.put(np.full(MIB, 9, np.uint8))
        assert fresh.offset == ref.offset
        assert (fresh.generation - ref.generation) % (1 << 32) in (1, 2)


@pytest.mark.parametrize("taken", [False, True])
def test_a_settled_slot_is_its_owners_no_more(taken: bool, manager: Make) -> None:
    server = manager(**TEMP, orphan_s=2.0)
    with server.client() as producer, server.client() as consumer:
        out, into = TempClient(producer, direct=True), TempClient(consumer)
        ref = out.put(np.full(MIB, 7, np.uint8))
        share = into.adopt(ref) if taken else None
        out.settle([ref])
        producer.ping()
        if share is not None:
            assert out.put(np.full(MIB, 9, np.uint8)).offset != ref.offset
            assert (share.numpy() == 7).all()
            share.release()
        while not _stale(into, ref):
            producer.ping()
        assert producer.check() == []
    all_free(server)


def _stale(client: TempClient, ref: TensorRef) -> bool:
    return client.buffers.generation_of(ref.offset // BLOCK) != ref.generation


def test_settling_what_has_come_back_tells_the_server_nothing(manager: Make) -> None:
    server = manager(**TEMP)
    with server.client() as producer, server.client() as consumer:
        out, into = TempClient(producer, direct=True), TempClient(consumer)
        refs = []
        for _ in range(20):
            refs.append(out.put(np.zeros(MIB, np.uint8)))
            into.adopt(refs[-1]).release()
        before = producer.stats()["requests"]
        out.settle(refs)
        assert producer.stats()["requests"] == before + 1
        assert out.put(np.zeros(MIB, np.uint8)).offset == refs[-1].offset


def test_a_slot_leased_again_after_its_settling_comes_back_directly(manager: Make) -> None:
    """What its owner noted of it before, when it had another size, is not taken for this time."""
    server = manager(**TEMP)
    with server.client() as producer, server.client() as consumer:
        out, into = TempClient(producer, direct=True), TempClient(consumer)
        settled = out.put(np.zeros(5000, np.uint8))
        out.settle([settled])
        producer.ping()
        buffers = [out.alloc(1)]
        while buffers[-1].offset != settled.offset:
            buffers.append(out.alloc(1))
        ref = out.publish(buffers[-1], "uint8", (1,))
        out.put(np.zeros(5000, np.uint8))  # looks for what became of the slot that was settled
        into.adopt(ref).release()
        assert out.put(np.zeros(1, np.uint8)).offset == ref.offset


def test_a_settled_slot_is_anybodys_as_soon_as_its_only_reader_is_done(manager: Make) -> None:
    server = manager(**TEMP)
    with server.client() as producer, server.client() as consumer:
        out, into = TempClient(producer, direct=True), TempClient(consumer)
        ref = out.put(np.full(MIB, 7, np.uint8))
        share = into.adopt(ref)
        out.settle([ref])
        producer.ping()
        share.release()
        assert into.alloc(16 * MIB, timeout=0).size == 16 * MIB


def test_slots_that_came_back_are_others_when_the_server_asks(manager: Make) -> None:
    server = manager(**TEMP)
    with server.client() as producer, server.client() as consumer:
        out, into = TempClient(producer, direct=True), TempClient(consumer)
        refs = [out.put(np.zeros(MIB // 4, np.uint8)) for _ in range(30)]
        for ref in refs:
            into.adopt(ref).release()
        with pytest.raises(DataError):
            into.alloc(16 * MIB, timeout=0)
        producer.ping()
        assert into.alloc(16 * MIB, timeout=10).nbytes == 16 * MIB


def test_a_part_of_the_pool_at_most_comes_back_directly(manager: Make) -> None:
    """The rest is anybody's as soon as it has been released."""
    server = manager(**TEMP)
    with server.client() as producer, server.client() as consumer:
        out, into = TempClient(producer, direct=True), TempClient(consumer)
        shares = [into.adopt(out.put(np.zeros(MIB, np.uint8))) for _ in range(10)]
        held = into.buffers._cells[OWNED * CELLS : FORWARDS_AT * CELLS : CELLS].tolist()
        assert (held.count(SOLE), held.count(HELD)) == (2, 8)
        for share in shares:
            share.release()
        assert into.alloc(8 * MIB, timeout=0).size == 8 * MIB
