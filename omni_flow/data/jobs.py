"""Migration jobs of one pool: what they hold, and what the table learns from their outcome. Pure.

A job holds pins on its source slots and reservations of its target slots, both in the staging share, until the
mover says how each page ended or is dead. Outcomes are entered by key, so nothing depends on rows that may have
changed meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_flow.data.kv_pool import KvPool
from omni_flow.data.messages import L1, L2, L3
from omni_flow.data.page_table import RESERVED, SEALED

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
BATCH: Final = 64
PAUSE_S: Final = 1.0
L3_PART: Final = 64
NO_SLOTS: Final = np.empty(0, np.uint32)
NO_PLACES: Final = np.empty(0, np.uint64)
Done = Callable[["Work", U8], None]


@dataclass(slots=True, eq=False)
class Work:
    """One job. `src`/`dst` are tiers (0: none, or L3, or a peer); slots are empty where the tier has none.

    Args:
        move: the source copy goes once the target copy is there.
        done: called with one u8 per key, 1 where it worked.
    """

    id: int
    kind: str
    pool: str
    keys: U8
    src: int
    dst: int
    src_slots: U32
    dst_slots: U32
    places: U64
    deadline: float
    move: bool = False
    peer: str = ""
    mover: int = 0
    cancelled: bool = False
    done: Done = field(default=lambda _work, _ok: None)


class PoolJobs:
    """Plans and settles the jobs of one pool."""

    def __init__(self, pool: KvPool) -> None:
        self.pool = pool
        self.running: dict[int, Work] = {}
        self.orphaned: dict[int, Work] = {}
        self.l3_on = False
        self.storing = 0
        self._demoting = {L1: 0, L2: 0}
        self._paused = {L1: 0.0, L2: 0.0}
        pool.job_pins = self._pins
        pool.job_slots = self._slots
        pool.demoting = lambda bit: self._demoting[bit]

    def _pins(self) -> Sequence[tuple[int, U32]]:
        return [(work.src, work.src_slots) for work in self._holding() if len(work.src_slots)]

    def _slots(self) -> Sequence[tuple[int, U32]]:
        return [(work.dst, work.dst_slots) for work in self._holding() if len(work.dst_slots)]

    def _holding(self) -> Sequence[Work]:
        """Jobs that hold memory."""
        return [*self.running.values(), *self.orphaned.values()]

    # -- holding ------------------------------------------------------------------------------------------------

    def _room(self, bit: int, urgent: bool) -> int:
        """Slots that a job may take of the staging share. Half of it is kept for jobs that somebody waits for."""
        share = self.pool.staging[bit]
        return max(0, share.room if urgent else share.room - share.limit // 2)

    def _hold_source(self, bit: int, slots: U32, urgent: bool = True) -> U32:
        """Pin as many of distinct sealed slots as the staging share allows."""
        share = self.pool.staging[bit]
        slots = slots[: self._room(bit, urgent)]
        if len(slots):
            self.pool.table.tier(bit).pin(slots)
            share.pin(slots)
        return slots

    def _drop_source(self, bit: int, slots: U32) -> None:
        if len(slots):
            self.pool.table.tier(bit).unpin(slots)
            self.pool.staging[bit].unpin(slots)

    def _hold_target(self, bit: int, count: int, now: float, urgent: bool) -> U32:
        """Reserve up to `count` slots in the staging share.

        Pages in the way go down a tier. If urgent, they are dropped where the tier below takes none of them now.
        """
        pool = self.pool
        share = pool.staging[bit]
        tier = pool.table.tier(bit)
        count = min(count, self._room(bit, urgent))
        # with no room for a demotion either, the end of a job that holds it comes before anything is dropped
        if count > tier.free.count and (self._room(bit, urgent=False) or not share.used):
            made = pool.make_room(bit, count, now, urgent=False)
            if urgent and not made and not tier.free.count and not pool.demoting(bit):
                pool.make_room(bit, count, now, urgent=True)
        count = min(count, tier.free.count)
        if not count:
            return NO_SLOTS
        share.reserved += count
        return tier.reserve(count)

    def _settle_target(self, bit: int, slots: U32, keys: U8, ok: NDArray[np.bool_]) -> None:
        """Seal the slots that were filled and free the others."""
        pool = self.pool
        tier = pool.table.tier(bit)
        pool.staging[bit].reserved -= len(slots)
        bad = slots[~ok]
        if len(bad):
            tier.release(bad)
        good = slots[ok]
        if len(good):
            status, _ = pool.table.seal(bit, good, keys[ok])
            again = good[status == 1]
            if len(again):
                tier.release(again)
            pool.admit(bit, good[status == 0])

    def _l3_room(self, wanted: int) -> int:
        """How many more objects L3 takes; the oldest go for them, some more at once than are in the way."""
        table = self.pool.table
        room = table.l3_rows - table.l3_count - self.storing
        if room < wanted:
            dropped = table.drop_oldest_l3(max(wanted - room, table.l3_rows // L3_PART))
            self.pool.counters["evicted"] += dropped
            room += dropped
        return max(0, room)

    # -- planning -----------------------------------------------------------------------------------------------

    def _start(self, work: Work) -> Work:
        self.running[work.id] = work
        if work.move:
            self._demoting[work.src] += len(work.src_slots)
        if work.kind == "store":
            self.storing += len(work.keys)
        return work

    def demotion(self, number: int, bit: int, slots: U32, now: float, deadline: float) -> Work | None:
        """A job that writes the only copies in `slots` one tier down; None when nothing can be moved now."""
        pool = self.pool
        table = pool.table
        if self._paused[bit] > now:
            return None
        slots = slots[:BATCH]
        if bit == L1 and table.l2.capacity:
            target = self._hold_target(L2, len(slots), now, urgent=False)
            slots = self._hold_source(L1, slots[: len(target)], urgent=False)
            spare = target[len(slots) :]
            if len(spare):
                pool.staging[L2].reserved -= len(spare)
                table.l2.release(spare)
            target = target[: len(slots)]
            kind, dst = "copy", L2
        elif bit == L2 and self.l3_on:
            room = self._l3_room(min(len(slots), self._room(L2, urgent=False)))
            slots = self._hold_source(L2, slots[:room], urgent=False)
            target, kind, dst = NO_SLOTS, "store", L3
        else:
            return None
        if not len(slots):
            return None
        keys = table.keys[table.tier(bit).row[slots]]
        return self._start(
            Work(number, kind, pool.spec.name, keys, bit, dst, slots, target, NO_PLACES, deadline, move=True)
        )

    def let_through(self, keys: U8, coming: int) -> None:
        """See that `coming` more pages can be loaded into L2, as far as copies of `keys` make room there that only
        passed through on their way to L1: L3 has them too, so nothing is written for those that come.
        """
        table = self.pool.table
        short = min(coming, BATCH) - table.l2.free.count
        if short <= 0 or not len(keys):
            return
        rows = table.find(keys)
        slots = table.slots_of(L2)[rows[(rows >= 0) & (table.tiers[rows] == L1 | L2 | L3)]]
        idle = slots[(table.l2.state[slots] == SEALED) & (table.l2.pins[slots] == 0)]
        if len(idle):
            self.pool.evict(L2, idle[:short])

    def load(
        self, passing: int, number: int, keys: U8, now: float, deadline: float, done: Done
    ) -> tuple[Work | None, int]:
        """A job that reads the first of `keys` (all in L3 only) into L2. Returns it and how many keys it takes.

        Where a batch of pages is `passing` through L2 on its way to L1 already, nothing goes to the disk for more: they
        will make room.
        """
        table = self.pool.table
        count = min(len(keys), BATCH)
        if passing >= max(1, min(BATCH, self.pool.staging[L2].limit // 2)):
            count = min(count, table.l2.free.count)
        target = self._hold_target(L2, count, now, urgent=True)
        if not len(target):
            return None, 0
        keys = keys[: len(target)].copy()
        places = table.place3[table.find(keys)]
        work = Work(number, "load", self.pool.spec.name, keys, L3, L2, NO_SLOTS, target, places, deadline, done=done)
        return self._start(work), len(target)

    def copy(
        self, src: int, dst: int, number: int, keys: U8, now: float, deadline: float, done: Done
    ) -> tuple[Work | None, int]:
        """A job that copies the first of distinct `keys` (all in tier `src`, not in `dst`) up or down; both stay."""
        table = self.pool.table
        # no more than there may be targets: the rest would keep the share of the source's tier from a demotion for them
        rows = table.find(keys[: min(BATCH, self._room(dst, urgent=True))])
        source = self._hold_source(src, table.slots_of(src)[rows])
        target = self._hold_target(dst, len(source), now, urgent=True)
        self._drop_source(src, source[len(target) :])
        source = source[: len(target)]
        if not len(source):
            return None, 0
        keys = keys[: len(source)].copy()
        work = Work(number, "copy", self.pool.spec.name, keys, src, dst, source, target, NO_PLACES, deadline, done=done)
        return self._start(work), len(source)

    def pull(
        self, peer: str, number: int, keys: U8, now: float, deadline: float, done: Done
    ) -> tuple[Work | None, int]:
        """A job that fetches the first of distinct `keys` (in neither L1 nor L2) from a peer into L2."""
        bit = L2 if self.pool.table.l2.capacity else L1
        target = self._hold_target(bit, min(len(keys), BATCH), now, urgent=True)
        if not len(target):
            return None, 0
        keys = keys[: len(target)].copy()
        work = Work(
            number,
            "pull",
            self.pool.spec.name,
            keys,
            0,
            bit,
            NO_SLOTS,
            target,
            NO_PLACES,
            deadline,
            peer=peer,
            done=done,
        )
        return self._start(work), len(target)

    def push(
        self, peer: str, bit: int, number: int, keys: U8, now: float, deadline: float, done: Done
    ) -> tuple[Work | None, int]:
        """A job that sends the first of distinct `keys` (all in tier `bit`) to a peer."""
        table = self.pool.table
        source = self._hold_source(bit, table.slots_of(bit)[table.find(keys[:BATCH])])
        if not len(source):
            return None, 0
        keys = keys[: len(source)].copy()
        work = Work(
            number,
            "push",
            self.pool.spec.name,
            keys,
            bit,
            0,
            source,
            NO_SLOTS,
            NO_PLACES,
            deadline,
            peer=peer,
            done=done,
        )
        return self._start(work), len(source)

    # -- outcomes -----------------------------------------------------------------------------------------------

    def finish(self, work: Work, ok: NDArray[np.bool_], places: U64, now: float) -> None:
        """Enter what a mover did; `places` (one per key) matters for `store` only.

        After a demotion that failed, pages of that tier are dropped instead for `PAUSE_S`.
        """
        del self.running[work.id]
        if work.src in (L1, L2):
            self._drop_source(work.src, work.src_slots)
        if work.dst in (L1, L2):
            self._settle_target(work.dst, work.dst_slots, work.keys, ok)
        self._conclude(work, ok, places, now)

    def abandon(self, work: Work, now: float) -> None:
        """The mover is lost, but may still touch the pages: the job has failed, what it holds stays held until `bury`.

        Records it was to read keep their places.
        """
        del self.running[work.id]
        self.orphaned[work.id] = work
        if work.kind == "load":
            work.places = np.full(len(work.keys), np.iinfo(np.uint64).max, np.uint64)
        self._conclude(work, np.zeros(len(work.keys), np.bool_), np.zeros(len(work.keys), np.uint64), now)

    def bury(self, work: Work, until: float | None) -> None:
        """Give back what an abandoned job holds; with `until` its targets stay in quarantine so long."""
        del self.orphaned[work.id]
        if work.src in (L1, L2):
            self._drop_source(work.src, work.src_slots)
        if work.dst in (L1, L2):
            tier = self.pool.table.tier(work.dst)
            self.pool.staging[work.dst].reserved -= len(work.dst_slots)
            if until is None:
                tier.release(work.dst_slots)
            else:
                self.pool.quarantine(work.dst, work.dst_slots, self.pool.staging[work.dst], until)
        self.pool.pump()

    def _conclude(self, work: Work, ok: NDArray[np.bool_], places: U64, now: float) -> None:
        """Enter the outcome and tell who waits for it."""
        pool = self.pool
        table = pool.table
        if work.move:
            self._demoting[work.src] -= len(work.src_slots)
            if not ok.all():
                self._paused[work.src] = now + PAUSE_S
        if work.kind == "store":
            self.storing -= len(work.keys)
            rows = table.find(work.keys)
            there = ok & (rows >= 0)
            table.add_l3(rows[there].astype(np.uint32), places[there])
        if work.kind == "load" and not ok.all():
            self._forget_bad(work, ~ok)
        if work.move:
            self._move_away(work, ok)
        pool.counters["demoted" if work.move else "migrated"] += int(ok.sum())
        pool.counters["job_pages_failed"] += int((~ok).sum())
        pool.pump()
        work.done(work, ok.astype(np.uint8))

    def _forget_bad(self, work: Work, bad: NDArray[np.bool_]) -> None:
        """Records that could not be read are no copies; unless they have moved in the meantime."""
        table = self.pool.table
        rows = table.find(work.keys[bad])
        same = (rows >= 0) & ((table.tiers[rows] & L3) != 0) & (table.place3[rows] == work.places[bad])
        self.pool.counters["bad_records"] += int(same.sum())
        table.drop(L3, np.unique(rows[same]).astype(np.uint32))

    def _move_away(self, work: Work, ok: NDArray[np.bool_]) -> None:
        """Drop source copies that have arrived below, unless somebody has pinned them meanwhile."""
        pool = self.pool
        tier = pool.table.tier(work.src)
        slots = work.src_slots[ok]
        idle = slots[(tier.state[slots] == SEALED) & (tier.pins[slots] == 0)]
        mirrored = idle[(pool.table.tiers[tier.row[idle]] & ~np.uint8(work.src)) != 0]
        if len(mirrored):
            pool.evict(work.src, mirrored)

    def change(self, what: str, keys: U8, old: U64, new: U64) -> int:
        """What L3 says of itself: `recovered`, `moved` or `dropped`. Returns how many objects changed."""
        table = self.pool.table
        if what == "recovered":
            return table.recover_l3(keys, new, self.storing)
        rows = table.find(keys)
        same = (rows >= 0) & ((table.tiers[rows] & L3) != 0) & (table.place3[rows] == old)
        at = rows[same].astype(np.uint32)
        if what == "moved":
            table.place3[at] = new[same]
        else:
            table.drop(L3, np.unique(at).astype(np.uint32))
        return len(at)

    def forget_l3(self, start: int, count: int) -> None:
        """Drop the L3 copies of rows start … start + count."""
        table = self.pool.table
        rows = np.flatnonzero(table.tiers[start : start + count] & L3) + start
        if len(rows):
            table.drop(L3, rows.astype(np.uint32))

    def check_integrity(self) -> list[str]:
        """Violated invariants of the jobs."""
        faults: list[str] = []
        for bit in (L1, L2):
            tier = self.pool.table.tier(bit)
            held = [work.dst_slots for work in self._holding() if work.dst == bit]
            count = sum(map(len, held))
            if self.pool.staging[bit].reserved != count:
                faults.append(f"{tier.name}: staging counts {self.pool.staging[bit].reserved} slots, jobs hold {count}")
            if any((tier.state[slots] != RESERVED).any() for slots in held):
                faults.append(f"{tier.name}: a job's target is not reserved")
        return faults
