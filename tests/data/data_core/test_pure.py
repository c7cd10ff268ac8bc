"""The pure parts against simple oracles."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_flow.data.accounts import Account, Reservation
from omni_flow.data.buddy import MIN_BLOCK, Buddy, Extents
from omni_flow.data.digest_index import DigestIndex
from omni_flow.data.errors import DataError, PoolFull
from omni_flow.data.kv_pool import KvPool
from omni_flow.data.messages import L1, L3
from omni_flow.data.page_table import PageTable
from omni_flow.data.pool_spec import PoolSpec
from omni_flow.data.prefix import first_needed, longest_prefix
from omni_flow.data.waits import Waiter, WaitQueue


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.booleans(), st.lists(st.integers(0, 119), min_size=1, max_size=40, unique=True)), max_size=12
    ),
    st.integers(0, 2),
)
def test_the_index_answers_as_a_dictionary_does(steps: list[tuple[bool, list[int]]], crowding: int) -> None:
    keys = np.random.default_rng(7).integers(0, 256, (120, 32), np.uint8)
    if crowding:
        keys[:, :8] = 5
    if crowding == 2:
        keys[:, 8:12] = 9
    index = DigestIndex(keys)
    there: set[int] = set()
    for insert, rows in steps:
        chosen = [row for row in rows if (row not in there) == insert]
        (index.insert if insert else index.delete)(np.array(chosen, np.uint32))
        there = there | set(chosen) if insert else there - set(chosen)
        expected = [row if row in there else -1 for row in range(120)]
        assert index.find(keys).tolist() == expected
        assert [index.find_one(key.tobytes()) for key in keys] == expected
        assert index.check() == []
        assert len(index) == len(there)


def test_deleting_all_keys_leaves_the_index_as_it_was_made() -> None:
    keys = np.random.default_rng(1).integers(0, 256, (1000, 32), np.uint8)
    keys[:, :8] = keys[0, :8]
    index = DigestIndex(keys)
    for _ in range(3):
        index.insert(np.arange(1000, dtype=np.uint32))
        index.delete(np.random.default_rng(2).permutation(1000).astype(np.uint32))
    assert not index._passed.any()
    assert len(index) == 0


@given(st.lists(st.tuples(st.lists(st.booleans(), min_size=8, max_size=8), st.integers(0, 4)), min_size=1, max_size=3))
def test_the_longest_prefix_is_the_longest_every_group_can_serve(groups: list[tuple[list[bool], int]]) -> None:
    def usable(n: int) -> bool:
        return all(all(hit[first_needed(n, window) : n]) for hit, window in groups)

    expected = max(n for n in range(9) if usable(n))
    found = longest_prefix([np.array(hit) for hit, _ in groups], [window for _, window in groups])
    assert found == expected


@settings(deadline=None)
@given(st.integers(1, 70), st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=80))
def test_blocks_never_overlap_and_all_come_back(pages: int, steps: list[tuple[bool, int]]) -> None:
    buddy = Buddy(pages * MIN_BLOCK)
    taken: dict[int, int] = {}
    for take, number in steps:
        if take:
            at = buddy.take(number)
            if at is None:
                continue
            size = MIN_BLOCK << number
            assert at % size == 0
            assert at + size <= buddy.size
            assert all(at + size <= b or b + (MIN_BLOCK << k) <= at for b, k in taken.items())
            taken[at] = number
        elif taken:
            at = sorted(taken)[number % len(taken)]
            buddy.give(at, taken.pop(at))
        used = sum(MIN_BLOCK << k for k in taken.values())
        assert buddy.free_bytes == buddy.size - used
    for at, order in taken.items():
        buddy.give(at, order)
    assert buddy._free == Buddy(pages * MIN_BLOCK)._free


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=60))
def test_extents_join_again_when_they_come_back(steps: list[tuple[bool, int]]) -> None:
    area = Extents(MIN_BLOCK, 40 * MIN_BLOCK)
    taken: list[tuple[int, int]] = []
    for take, number in steps:
        if take:
            at = area.take(number * MIN_BLOCK)
            if at is not None:
                taken.append((at, number * MIN_BLOCK))
        elif taken:
            area.give(*taken.pop(number % len(taken)))
        assert area.free_bytes + sum(length for _, length in taken) == 40 * MIN_BLOCK
    for piece in taken:
        area.give(*piece)
    assert area._free == [(MIN_BLOCK, 40 * MIN_BLOCK)]


def test_nobody_overtakes_the_head_of_the_queue() -> None:
    queue, served, expired, room = WaitQueue(), [], [], [0]

    def waiter(name: str, want: int, deadline: float) -> Waiter:
        def attempt(_last: bool) -> bool:
            if room[0] < want:
                return False
            room[0] -= want
            served.append(name)
            return True

        return Waiter(1, want, deadline, attempt, lambda: expired.append(name))

    for one in (waiter("big", 5, 9.0), waiter("small", 1, 9.0), waiter("hasty", 1, 1.0)):
        queue.add(one)
    room[0] = 3
    queue.pump()
    assert served == []
    assert queue.tick(2.0) == 9.0
    assert (served, expired) == (["hasty"], [])
    room[0] = 6
    queue.pump()
    assert served == ["hasty", "big", "small"]
    assert not queue


def test_sealing_keeps_the_first_of_equal_keys() -> None:
    table = PageTable(8, 0)
    keys = np.random.default_rng(3).integers(0, 256, (3, 32), np.uint8)[[0, 1, 0, 2]]
    slots = table.l1.reserve(4)
    status, final = table.seal(1, slots, keys)
    assert status.tolist() == [0, 0, 1, 0]
    assert final.tolist() == [slots[0], slots[1], slots[0], slots[3]]
    table.l1.release(slots[2:3])
    more = table.l1.reserve(1)
    status, final = table.seal(1, more, keys[1:2])
    assert (status.tolist(), final.tolist()) == ([1], [slots[1]])
    table.l1.release(more)
    assert table.check_integrity() == []


def test_keys_with_equal_beginnings_are_told_apart() -> None:
    table = PageTable(8, 0)
    keys = np.zeros((4, 32), np.uint8)
    keys[:, 31] = [1, 2, 1, 3]
    status, _ = table.seal(1, table.l1.reserve(4), keys)
    assert status.tolist() == [0, 0, 1, 0]


def test_a_page_that_several_have_pinned_is_held_once_when_a_tier_is_over_its_watermark() -> None:
    pool = KvPool(PoolSpec(name="kv", page_bytes=64, l1_pages=100, high=0.9, low=0.8))
    tier, names = pool.table.l1, np.random.default_rng(1).integers(0, 256, (100, 32), np.uint8)
    pool.table.seal(L1, tier.reserve(100), names)
    assert pool.over(L1) == 20
    for session in range(4):
        account = pool.open(session, 1, "engine", quota=20)
        pool.pin(account, pool.choose(*pool.locate(names[:20], L1)))
    assert tier.pinned == 20
    assert pool.over(L1) == 80 - 64
    for account in pool.accounts.values():
        pool.unpin(account, *account.leases, None)
    assert (tier.pinned, pool.over(L1)) == (0, 20)


def test_so_many_pages_are_in_the_way_of_a_batch_as_it_finds_no_free_slots() -> None:
    pool = KvPool(PoolSpec(name="kv", page_bytes=64, l1_pages=100, high=0.9, low=0.8))
    tier = pool.table.l1
    pool.table.seal(L1, tier.reserve(93), names_of(93))
    assert (pool.short(L1, 7), pool.short(L1, 9), pool.short(L1, 64)) == (0, 2, 3)
    tier.pin(np.arange(92, dtype=np.uint32))
    assert pool.short(L1, 9) == 1


def names_of(count: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (count, 32), np.uint8)


def taken(pool: KvPool, account: Account, count: int) -> int:
    """Reserve so many slots of L1 at once; returns the token."""
    got: list[Reservation] = []
    pool.reserve(account, L1, count, count, 0.0, 0.0, got.append, _raise)
    return got[0].token


def _raise(error: DataError) -> None:
    raise error


def test_slots_in_quarantine_are_not_idle_pages_that_could_go_down() -> None:
    pool = KvPool(PoolSpec(name="kv", page_bytes=64, l1_pages=100, high=0.9, low=0.8))
    engine = pool.open(1, 1, "engine")
    token = taken(pool, engine, 60)
    pool.commit(engine, taken(pool, engine, 31), None, names_of(31), False, False)
    assert pool.over(L1) == 0
    pool.abort(engine, token, None, until=1.0)
    assert (pool.over(L1), pool.in_quarantine(L1)) == (0, 60)
    pool.tick(1.0)
    assert (pool.in_quarantine(L1), pool.table.l1.free.count) == (0, 69)


def test_what_is_in_quarantine_is_nobodys_to_promise() -> None:
    pool = KvPool(PoolSpec(name="kv", page_bytes=64, l1_pages=64))
    engine, other = pool.open(1, 1, "engine", quota=32), pool.open(2, 1, "other")
    for _ in range(2):
        pool.abort(engine, taken(pool, engine, 16), None, until=1.0)
    with pytest.raises(PoolFull, match="32 in quarantine"):
        taken(pool, engine, 1)
    taken(pool, other, 32)
    assert list(pool.close(1, 0.5)) == []
    again = pool.open(3, 1, "engine again", quota=32)
    with pytest.raises(PoolFull):
        taken(pool, other, 1)
    assert pool.check_integrity() == []
    pool.tick(1.0)
    assert taken(pool, again, 32)
    assert pool.check_integrity() == []


def test_a_page_costs_at_most_150_bytes() -> None:
    tracemalloc.start()
    try:
        pool = KvPool(PoolSpec(name="kv", page_bytes=64, l1_pages=1 << 16))
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert pool.nbytes <= used <= 150 << 16


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 11), st.integers(1, 99)), min_size=1, max_size=14), max_size=4))
def test_what_a_disk_reports_is_entered_once_and_within_its_rows(batches: list[list[tuple[int, int]]]) -> None:
    names = np.random.default_rng(3).integers(0, 256, (12, 32), np.uint8)
    table = PageTable(4, 0, 5)
    table.seal(L1, table.l1.reserve(4), names[:4])
    there: dict[int, int] = {}
    for batch in batches:
        at = np.array([name for name, _ in batch])
        first = {}
        for name, place in batch:
            first.setdefault(name, place)
        entered = table.recover_l3(names[at], np.array([place for _, place in batch], np.uint64), kept=1)
        known = {name: place for name, place in first.items() if name < 4 or name in there}
        for name, place in {**known, **first}.items():
            if name in there or len(there) < 4:
                there[name] = place
        assert entered == len(set(first) & set(there))
        rows = table.find(names)
        found = {
            int(n): int(table.place3[rows[n]]) for n in np.flatnonzero((rows >= 0) & ((table.tiers[rows] & L3) > 0))
        }
        assert found == there
        assert table.check_integrity() == []
