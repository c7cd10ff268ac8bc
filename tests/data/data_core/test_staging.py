"""Whose the staging share is: pages that go down never keep those waiting that somebody has asked for."""

from __future__ import annotations

import numpy as np
import pytest

from omni_flow.data.jobs import PoolJobs
from omni_flow.data.kv_pool import KvPool
from omni_flow.data.messages import L1, L2
from omni_flow.data.pool_spec import PoolSpec

from .conftest import keys


def stored(pool: KvPool, tier: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Sealed pages of a tier: slots and keys."""
    names = keys(count)
    slots = pool.table.tier(tier).reserve(count)
    pool.table.seal(tier, slots, names)
    pool.admit(tier, slots)
    return slots, names


def pool_of(staging: int) -> tuple[KvPool, PoolJobs]:
    spec = PoolSpec(name="kv", page_bytes=64, l1_pages=64, l2_pages=64, l3_pages=100, staging=staging)
    pool = KvPool(spec)
    jobs = PoolJobs(pool)
    jobs.l3_on = True
    return pool, jobs


def test_writes_to_the_disk_leave_half_of_the_share_to_fetches() -> None:
    pool, jobs = pool_of(8)
    slots, names = stored(pool, L2, 24)
    store = jobs.demotion(1, L2, slots[:12], 0.0, 9.0)
    assert store is not None
    assert len(store.src_slots) == 4
    assert jobs.demotion(2, L2, slots[12:], 0.0, 9.0) is None
    copy, taken = jobs.copy(L2, L1, 3, names[12:], 0.0, 9.0, lambda _work, _ok: None)
    assert copy is not None
    assert taken == 4
    jobs.finish(copy, np.ones(4, np.bool_), copy.places, 0.0)
    jobs.finish(store, np.ones(4, np.bool_), np.arange(4, dtype=np.uint64), 0.0)
    assert jobs.check_integrity() == pool.check_integrity() == []


def test_a_share_of_one_slot_serves_both() -> None:
    pool, jobs = pool_of(1)
    slots, names = stored(pool, L2, 4)
    store = jobs.demotion(1, L2, slots, 0.0, 9.0)
    assert store is not None
    jobs.finish(store, np.ones(1, np.bool_), np.zeros(1, np.uint64), 0.0)
    copy, taken = jobs.copy(L2, L1, 2, names[1:], 0.0, 9.0, lambda _work, _ok: None)
    assert copy is not None
    assert taken == 1


def test_by_default_jobs_have_a_fourth_of_the_tier_that_they_all_pass() -> None:
    pool = KvPool(PoolSpec(name="kv", page_bytes=64, l1_pages=1600, l2_pages=400, l3_pages=100))
    assert (pool.staging[L1].limit, pool.staging[L2].limit) == (100, 100)
    assert KvPool(PoolSpec(name="kv", page_bytes=64, l1_pages=1600)).staging[L1].limit == 0


@pytest.mark.parametrize("way", ["lower", "make_room"])
def test_room_below_is_not_that_of_the_other_copies_of_pages_that_are_dropped_above(way: str) -> None:
    pool, jobs = pool_of(32)

    def demote(bit: int, slots: np.ndarray, now: float) -> int:
        work = jobs.demotion(bit, bit, slots, now, 9.0)
        return 0 if work is None else len(work.src_slots)

    pool.demote = demote
    _, both = stored(pool, L1, 16)
    copies = pool.table.l2.reserve(16)
    pool.table.seal(L2, copies, both)
    pool.admit(L2, copies)
    stored(pool, L2, 48)
    stored(pool, L1, 48)
    if way == "lower":
        pool.lower(L1, 32, 0.0)
    else:
        pool.make_room(L1, 32, 0.0, urgent=False)
    assert pool.demoting(L1) == 16
    assert (pool.locate(both, L1 | L2)[0] >= 0).all()
    assert jobs.check_integrity() == pool.check_integrity() == []


def test_a_full_disk_index_takes_new_pages_for_its_oldest() -> None:
    """The log itself goes round by bytes; an index that is smaller must not stay as it was when it first was full."""
    pool, jobs = pool_of(32)
    names: list[np.ndarray] = []
    for turn in range(30):
        slots, added = stored(pool, L2, 8)
        work = jobs.demotion(turn, L2, slots, 0.0, 9.0)
        assert work is not None
        assert len(work.src_slots) == 8
        jobs.finish(work, np.ones(8, np.bool_), np.arange(8, dtype=np.uint64) + 8 * turn, 0.0)
        names.append(added)
        assert jobs.check_integrity() == pool.check_integrity() == []
    there = pool.table.find(np.concatenate(names)) >= 0
    assert pool.table.l3_count == there.sum() <= 100
    assert there[-96:].all()
    assert not there[:-100].any()
