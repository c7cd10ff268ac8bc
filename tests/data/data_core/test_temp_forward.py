"""What a consumer gives on: counted exactly, whoever dies when."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from omni_flow.data.errors import BadToken, PoolFull, StaleDescriptor
from omni_flow.data.ledger import FORWARDS, FORWARDS_AT, MADE
from omni_flow.data.temp_client import TempClient, decode_ref, encode_ref
from omni_flow.refs import TensorRef

from .conftest import TRANSPORTS, Make, Puppet
from .temp_rig import MIB, TEMP, all_free

pytestmark = pytest.mark.parametrize("transport", TRANSPORTS)


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("direct", [False, True])
def test_who_forwards_goes_on_reading_when_the_others_are_done(read_only: bool, direct: bool, manager: Make) -> None:
    server = manager(**TEMP)
    with server.client() as a, server.client(read_only=read_only) as b, server.client() as c:
        out, via, end = TempClient(a, direct=direct), TempClient(b), TempClient(c)
        ref = out.put(np.full(MIB, 7, np.uint8))
        share = via.adopt(ref)
        via.forward(share)
        end.adopt(ref).release()
        end.flush()
        others = [out.put(np.full(MIB, 9, np.uint8)) for _ in range(3)]
        assert ref.offset not in {other.offset for other in others}
        assert (share.numpy() == 7).all()
        share.release()
        via.flush()
        assert a.stats()["temp_bad_releases"] == 0
        out.settle([ref, *others])
    all_free(server)


def test_who_may_only_read_settles_what_it_has_forwarded(manager: Make) -> None:
    server = manager(**TEMP)
    with server.client() as a, server.client(read_only=True) as b:
        out, via = TempClient(a, direct=True), TempClient(b)
        ref = out.put(np.full(MIB, 7, np.uint8))
        share = via.adopt(ref)
        via.forward(share)
        share.release()
        via.settle([ref])
        b.ping()
        out.settle([ref])
        while a.stats()["temp_slots"]:
            pass
    all_free(server)


def test_a_forwarded_buffer_lives_until_its_last_reader_is_done(manager: Make) -> None:
    server = manager(**TEMP)
    with server.client() as a, server.client() as b, server.client() as c:
        out, via, end = TempClient(a), TempClient(b), TempClient(c)
        ref = out.put(np.full(MIB, 7, np.uint8))
        got = via.adopt(ref)
        via.forward(got, 2)
        got.release()
        via.flush()
        first, second = end.adopt(ref), end.adopt(ref)
        first.release()
        end.flush()
        assert (second.numpy() == 7).all()
        assert second.valid()
        second.release()
        end.flush()
        assert not second.valid()
        with pytest.raises(StaleDescriptor):
            end.adopt(ref)
        assert a.stats()["temp_forwarded"] == 1
        assert a.stats()["temp_bad_releases"] == 0


def test_a_chain_of_forwards_that_is_released_from_its_end_keeps_its_bytes(manager: Make) -> None:
    server = manager(**TEMP)
    clients = [server.client() for _ in range(6)]
    temps = [TempClient(client) for client in clients]
    ref = temps[0].put(np.arange(MIB // 8))
    shares = []
    for temp in temps:
        shares.append(temp.adopt(ref))
        temp.forward(shares[-1])
    last = temps[0].adopt(ref)
    for temp, share in reversed(list(zip(temps, shares, strict=True))):
        share.release()
        temp.flush()
        assert (last.numpy() == np.arange(MIB // 8)).all()
    last.release()
    temps[0].flush()
    assert not last.valid()
    for client in clients:
        client.close()
    all_free(server)


def test_readers_may_see_a_forwarded_buffer_in_another_shape(manager: Make) -> None:
    server = manager(**TEMP)
    with server.client() as client:
        temp = TempClient(client)
        ref = temp.put(np.arange(12, dtype=np.int32))
        share = temp.adopt(ref)
        temp.forward(share)
        raw = encode_ref(ref).replace(b"\xa5int32", b"\xa6uint32")
        assert temp.adopt(decode_ref(raw)).numpy().dtype == np.uint32


def test_what_is_no_longer_held_is_not_forwarded(manager: Make) -> None:
    server = manager(**TEMP)
    with server.client() as one, server.client() as other:
        temp, stranger = TempClient(one), TempClient(other)
        ref = temp.put(np.zeros(1000))
        share = temp.adopt(ref)
        with pytest.raises(StaleDescriptor):
            stranger.forward(share)
        share.release()
        with pytest.raises(StaleDescriptor):
            temp.forward(share)


STEPS = [
    "t = TempClient(c); s = t.adopt(decode_ref(raw))",
    "t.forward(s, 2)",
    "s.release()",
    "t.flush()",
]


def forwarder(doll: Puppet, ref: TensorRef, steps: Sequence[str] = STEPS) -> Puppet:
    """A process that takes these steps of giving `ref` on."""
    doll.do(f"raw = {encode_ref(ref)!r}")
    for line in steps:
        doll.do(line)
    return doll


@pytest.mark.parametrize("step", range(len(STEPS) + 1))
@pytest.mark.parametrize("adopted", [False, True])
def test_a_forwarder_killed_between_two_steps_takes_nothing_from_others_and_leaves_nothing(
    step: int, adopted: bool, manager: Make, puppet: Callable[[str], Puppet]
) -> None:
    server = manager(**TEMP, orphan_s=0.2)
    with server.client() as client:
        temp = TempClient(client)
        ref = temp.put(np.full(MIB, 5, np.uint8), consumers=2)
        mine = temp.adopt(ref)
        doll = forwarder(puppet(server.address), ref, STEPS[:step])
        theirs = temp.adopt(ref) if adopted and step > 1 else None
        doll.kill()
        server.settle()
        assert mine.valid()
        assert (mine.numpy() == 5).all()
        mine.release()
        temp.flush()
        if theirs is not None:
            assert not client.wait_end(0.5)
            assert theirs.valid()
            assert (theirs.numpy() == 5).all()
            theirs.release()
        if step == 0:
            temp.retract(ref)
        temp.settle([ref])
        temp.flush()
        temp.trim()
    all_free(server)


def test_what_a_dead_forwarders_readers_never_took_goes_when_the_producer_settles(
    manager: Make, puppet: Callable[[str], Puppet]
) -> None:
    server = manager(**TEMP, orphan_s=3600)
    with server.client() as client:
        temp = TempClient(client)
        ref = temp.put(np.full(MIB, 5, np.uint8), consumers=2)
        direct = temp.adopt(ref)
        doll = forwarder(puppet(server.address), ref)
        doll.kill()
        server.settle()
        direct.release()
        temp.flush()
        late = temp.adopt(ref)
        temp.settle([ref])
        temp.flush()
        assert (late.numpy() == 5).all()
        assert late.valid()
        late.release()
        temp.trim()
        all_free(server)


def test_a_dead_forwarder_costs_the_readers_of_a_living_producer_nothing_however_late_they_come(
    manager: Make, puppet: Callable[[str], Puppet]
) -> None:
    server = manager(**TEMP, orphan_s=0.05)
    with server.client() as client:
        temp = TempClient(client)
        ref = temp.put(np.full(MIB, 5, np.uint8), consumers=2)
        doll = forwarder(puppet(server.address), ref)
        doll.kill()
        server.settle()
        assert not client.wait_end(0.5)
        late = temp.adopt(ref)
        assert (late.numpy() == 5).all()
        assert late.valid()


@pytest.mark.parametrize("orphan_s", [0.2, 3600])
def test_messages_of_a_dead_forwarder_whose_producer_has_settled_are_good_for_a_while(
    orphan_s: float, manager: Make, puppet: Callable[[str], Puppet]
) -> None:
    server = manager(**TEMP, orphan_s=orphan_s)
    with server.client() as client:
        temp = TempClient(client)
        ref = temp.put(np.full(MIB, 5, np.uint8))
        doll = puppet(server.address)
        doll.do(f"raw = {encode_ref(ref)!r}")
        doll.do(STEPS[0])
        temp.settle([ref])
        temp.flush()
        for line in STEPS[1:]:
            doll.do(line)
        doll.kill()
        server.settle()
        if orphan_s < 1:
            all_free(server)
            with pytest.raises(StaleDescriptor):
                temp.adopt(ref)
        else:
            assert not client.wait_end(1.5)
            got = temp.adopt(ref)
            assert (got.numpy() == 5).all()
            assert got.valid()


@pytest.mark.parametrize("step", range(1, len(STEPS) + 1))
def test_a_producer_killed_after_the_forwarding_changes_nothing_for_the_readers(
    step: int, manager: Make, puppet: Callable[[str], Puppet]
) -> None:
    server = manager(**TEMP, orphan_s=0.2)
    producer = puppet(server.address)
    raw = producer.do("t = TempClient(c); r = encode_ref(t.put(np.full(1 << 20, 5, np.uint8)))")
    with server.client() as one, server.client() as two:
        space = {"TempClient": TempClient, "decode_ref": decode_ref, "c": one, "raw": eval(raw)}
        for line in STEPS[:step]:
            exec(line, space)
        reader = TempClient(two)
        got = reader.adopt(decode_ref(space["raw"])) if step > 1 else space["s"]
        producer.kill()
        server.settle()
        assert not two.wait_end(0.5)
        assert (got.numpy() == 5).all()
        assert got.valid()
    all_free(server)


def test_a_forward_in_a_later_request_outlives_the_settling_of_the_first(manager: Make) -> None:
    server = manager(**TEMP)
    with server.client() as a, server.client() as b, server.client() as c:
        out, via, end = TempClient(a), TempClient(b), TempClient(c)
        ref = out.put(np.full(MIB, 3, np.uint8), consumers=2)
        kept = via.adopt(ref)
        out.settle([ref])
        out.flush()
        via.forward(kept)
        kept.release()
        via.flush()
        while not a.stats()["temp_orphans"]:
            pass
        assert not c.wait_end(1.5)
        got = end.adopt(ref)
        assert (got.numpy() == 3).all()
        via.settle([ref])
        via.flush()
        assert got.valid()
        got.release()
        end.flush()
        while a.stats()["temp_orphans"]:
            pass
        assert not got.valid()


def test_liars_forward_only_what_they_hold(manager: Make) -> None:
    server = manager(**TEMP)
    with server.client() as honest, server.client() as other:
        out, lying = TempClient(honest), TempClient(other)
        ref = out.put(np.zeros(1000))
        mine = out.adopt(ref)
        share = lying.adopt(lying.put(np.zeros(1000)))
        cells = np.frombuffer(lying.buffers._cells, np.uint32).reshape(-1, 4)
        slot = ref.offset // 4096
        for at, record in enumerate(([share.entry // 4, 9, slot, ref.generation], [0, 1, slot, 1], [1 << 31] * 4)):
            cells[FORWARDS_AT + at] = record
        lying.buffers._cells[MADE] = 3
        share.release()
        lying.flush()
        assert honest.stats()["temp_bad_forwards"] == 3
        lying.adopt(lying.put(np.zeros(1000))).release()
        lying.buffers._cells[MADE] = 3 + 2 * FORWARDS
        lying.flush()
        assert honest.stats()["temp_bad_forwards"] == 4
        mine.release()
        out.flush()
        assert not mine.valid()


def test_more_forwards_than_the_ledger_has_room_for_are_taken_in_on_the_way(manager: Make) -> None:
    server = manager(**TEMP)
    with server.client() as client:
        temp = TempClient(client)
        ref = temp.put(np.zeros(1000), consumers=2)
        share, spare = temp.adopt(ref), temp.adopt(ref)
        for _ in range(FORWARDS):
            temp.buffers.forward(share)
        with pytest.raises(PoolFull, match="flush"):
            temp.buffers.forward(share)
        spare.release()
        temp.forward(share)
        assert client.stats()["temp_forwarded"] == FORWARDS


def test_who_has_released_nothing_may_forward_without_end(manager: Make) -> None:
    server = manager(**TEMP)
    with server.client() as client:
        temp = TempClient(client)
        share = temp.adopt(temp.put(np.zeros(1000)))
        for _ in range(3 * FORWARDS):
            temp.forward(share)
        temp.flush()
        assert client.stats()["temp_forwarded"] == 3 * FORWARDS


def test_a_producer_may_retract_no_share_that_others_forwarded(manager: Make) -> None:
    server = manager(**TEMP)
    with server.client() as client, server.client() as other:
        out, via = TempClient(client), TempClient(other)
        ref = out.put(np.zeros(1000), consumers=2)
        via.forward(share := via.adopt(ref), 5)
        share.release()
        via.flush()
        with pytest.raises(BadToken):
            out.retract(ref, 3)
        out.retract(ref, 2)
        assert out.adopt(ref).valid()
