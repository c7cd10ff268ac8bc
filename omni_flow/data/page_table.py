"""Rows, slots and copies of one pool of pages: the pure bookkeeping under the KV pool.

A *row* is one object under its 32-byte key; a *slot* is room for one page in the arena of L1 or L2. A row has at most
one copy per tier. Every operation works on a batch, checks it wholly and then changes everything or nothing. Who holds
what (reservations, leases, quotas) is the business of `kv_pool.py`. Knows no clock and no socket. 111 bytes a row at
most, index included, where every row has an L1 or L2 slot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_flow.data.digest_index import SEED, DigestIndex
from omni_flow.data.errors import BadArgument
from omni_flow.data.messages import L1, L2, L3, TIER_NAMES

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]
Mask = NDArray[np.bool_]

FREE: Final = 0
RESERVED: Final = 1
SEALED: Final = 2
QUARANTINED: Final = 3
NO_SLOT: Final = 0xFFFFFFFF
NO_ROWS: Final = np.empty(0, np.uint32)


class Stack:
    """Free numbers below `size`, taken from and given back to the top in batches."""

    __slots__ = ("_items", "count")

    def __init__(self, size: int, first: int = 0) -> None:
        self._items = np.arange(size - 1, first - 1, -1, dtype=np.uint32)
        self.count = size - first

    def take(self, n: int) -> U32:
        self.count -= n
        return self._items[self.count : self.count + n][::-1].copy()

    def give(self, numbers: NDArray[np.integer]) -> None:
        n = len(numbers)
        self._items[self.count : self.count + n] = numbers
        self.count += n

    def items(self) -> U32:
        return self._items[: self.count]

    @property
    def nbytes(self) -> int:
        return int(self._items.nbytes)


class SlotTier:
    """Slots of L1 or L2: state, generation, the row that lives there, pins. Slot 0 may be kept as padding.

    `pinned`: how many slots have pins, whoever's and however many.
    """

    def __init__(self, bit: int, slots: int, padding: int = 0) -> None:
        self.bit = bit
        self.name = TIER_NAMES[bit]
        self.slots = slots
        self.padding = padding
        self.capacity = max(0, slots - padding)
        self.state = np.zeros(slots, np.uint8)
        self.generation = np.ones(slots, np.uint32)
        self.row = np.full(slots, NO_SLOT, np.uint32)
        self.pins = np.zeros(slots, np.uint32)
        self.pinned = 0
        self.free = Stack(slots, min(padding, slots))

    def reserve(self, n: int) -> U32:
        """Take `n` free slots; the caller has checked that there are."""
        slots = self.free.take(n)
        self.state[slots] = RESERVED
        return slots

    def release(self, slots: U32) -> None:
        """RESERVED, SEALED or QUARANTINED → FREE; distinct slots."""
        self.state[slots] = FREE
        self.generation[slots] += np.uint32(1)
        self.row[slots] = NO_SLOT
        self.free.give(slots)

    def pin(self, slots: U32) -> None:
        """Add one pin to each of distinct sealed slots."""
        now = self.pins[slots]
        self.pinned += len(now) - int(np.count_nonzero(now))
        self.pins[slots] = now + np.uint32(1)

    def unpin(self, slots: U32, times: U32 | int = 1) -> None:
        """Take so many pins from each of distinct slots."""
        now = self.pins[slots] - np.asarray(times, np.uint32)
        self.pinned -= len(now) - int(np.count_nonzero(now))
        self.pins[slots] = now

    def quarantine(self, slots: U32) -> None:
        self.state[slots] = QUARANTINED

    @property
    def nbytes(self) -> int:
        return self.state.nbytes + self.generation.nbytes + self.row.nbytes + self.pins.nbytes + self.free.nbytes


class PageTable:
    """Which object lies where.

    Args:
        l1_slots: slots of the L1 arena.
        l2_slots: slots of the L2 arena.
        l3_rows: how many objects L3 may hold beyond those with a slot.
        padding: L1 slots kept back at the front (an engine's padding page).
        seed: for the index.

    `watch(rows, there)` is told which objects have become known, and which are about to be forgotten.
    """

    def __init__(self, l1_slots: int, l2_slots: int, l3_rows: int = 0, padding: int = 0, seed: int = SEED) -> None:
        capacity = max(1, l1_slots + l2_slots + l3_rows)
        self.capacity = capacity
        self.l1 = SlotTier(L1, l1_slots, padding)
        self.l2 = SlotTier(L2, l2_slots)
        self.keys = np.zeros((capacity, 32), np.uint8)
        self.tiers = np.zeros(capacity, np.uint8)
        self.slot1 = np.full(capacity, NO_SLOT, np.uint32)
        self.slot2 = np.full(capacity, NO_SLOT, np.uint32)
        self.place3 = np.zeros(capacity if l3_rows else 1, np.uint64)
        self.l3_count = 0
        self.l3_rows = l3_rows
        self.rows_free = Stack(capacity)
        self.index = DigestIndex(self.keys, seed)
        self.watch: Callable[[U32, bool], None] | None = None

    def tier(self, bit: int) -> SlotTier:
        """L1 or L2.

        Raises:
            BadArgument: another number.
        """
        if bit == L1:
            return self.l1
        if bit == L2:
            return self.l2
        raise BadArgument(f"tier {bit} has no slots", "name L1 (1) or L2 (2)")

    def slots_of(self, bit: int) -> U32:
        """Column row → slot of a tier."""
        return self.slot1 if bit == L1 else self.slot2

    def find(self, keys: U8) -> I64:
        """Rows of keys, -1 where unknown; pins nothing."""
        if len(keys) <= 2:
            return np.array([self.index.find_one(key.tobytes()) for key in keys], np.int64)
        return self.index.find(keys)

    def seal(self, bit: int, slots: U32, keys: U8) -> tuple[U8, U32]:
        """Name reserved slots. The caller has checked that it owns them and that they are distinct.

        A key whose object has a copy in this tier already, or that comes twice in the batch, keeps the first one.

        Returns:
            per slot 0 (stored) or 1 (was there; the given slot stays reserved), and the slot that now holds the key.

        Raises:
            BadArgument: no room for that many objects.
        """
        tier, column = self.tier(bit), self.slots_of(bit)
        n = len(slots)
        rows = self.find(keys)
        status = np.zeros(n, np.uint8)
        final = slots.copy()
        known = rows >= 0
        if known.any():
            at = rows[known]
            present = (self.tiers[at] & bit) != 0
            hit = np.flatnonzero(known)[present]
            status[hit] = 1
            final[hit] = column[at[present]]
        first = np.arange(n)
        if n > 1:
            words = np.ascontiguousarray(keys).view(np.uint64)
            _, lead, back = np.unique(words[:, 0], return_index=True, return_inverse=True)
            if len(lead) != n:
                first = lead[back]
                if (words[first] != words).any():
                    seen: dict[bytes, int] = {}
                    first = np.array([seen.setdefault(key.tobytes(), i) for i, key in enumerate(keys)])
        twice = (first != np.arange(n)) & (status == 0)
        status[twice] = 1
        final[twice] = final[first[twice]]
        fresh = np.flatnonzero((status == 0) & ~known)
        if len(fresh) > self.rows_free.count:
            raise BadArgument(f"{len(fresh)} new objects, room for {self.rows_free.count}", "raise the pool's L3 rows")
        new = self.rows_free.take(len(fresh))
        self.keys[new] = keys[fresh]
        self.tiers[new] = 0
        self.index.insert(new)
        if self.watch is not None:
            self.watch(new, True)
        rows[fresh] = new
        stored = np.flatnonzero(status == 0)
        at = rows[stored]
        put = slots[stored]
        self.tiers[at] |= np.uint8(bit)
        column[at] = put
        tier.row[put] = at
        tier.state[put] = SEALED
        return status, final

    def drop(self, bit: int, rows: U32) -> None:
        """Take away the copies of distinct rows in one tier; rows without a copy left are forgotten."""
        if bit == L3:
            self.l3_count -= len(rows)
        else:
            column = self.slots_of(bit)
            self.tier(bit).release(column[rows])
            column[rows] = NO_SLOT
        self.tiers[rows] &= np.uint8(~bit & 0xFF)
        gone = rows[self.tiers[rows] == 0]
        if len(gone):
            if self.watch is not None:
                self.watch(gone, False)
            self.index.delete(gone)
            self.rows_free.give(gone)

    def add_l3(self, rows: U32, places: U64) -> None:
        """Note copies in L3 of rows that are there; the caller has seen to it that L3 stays within `l3_rows`."""
        self.l3_count += int(((self.tiers[rows] & L3) == 0).sum())
        self.tiers[rows] |= np.uint8(L3)
        self.place3[rows] = places

    def drop_oldest_l3(self, count: int) -> int:
        """Take away the copies in L3 that were written first, `count` of them at most. Returns how many.

        Places grow with the time of writing.
        """
        rows = np.flatnonzero(self.tiers & L3)
        if count < len(rows):
            rows = rows[np.argpartition(self.place3[rows], count)[:count]]
        if len(rows):
            self.drop(L3, rows.astype(np.uint32))
        return len(rows)

    def recover_l3(self, keys: U8, places: U64, kept: int = 0) -> int:
        """Enter objects found on disk, of a key that comes twice the first; those that don't fit are left out.

        Args:
            kept: room in L3 that is promised to others.

        Returns:
            how many were entered.
        """
        _, lead = np.unique(np.ascontiguousarray(keys).view("V32").ravel(), return_index=True)
        lead = np.sort(lead)
        keys, places = keys[lead], places[lead]
        rows = self.find(keys)
        known = np.flatnonzero(rows >= 0)
        added = (self.tiers[rows[known]] & L3) == 0
        known = known[~added | (np.cumsum(added) <= self.l3_rows - kept - self.l3_count)]
        self.add_l3(rows[known].astype(np.uint32), places[known])
        fresh = np.flatnonzero(rows < 0)[: max(0, self.l3_rows - kept - self.l3_count)]
        if len(fresh):
            new = self.rows_free.take(len(fresh))
            self.keys[new] = keys[fresh]
            self.tiers[new] = 0
            self.index.insert(new)
            if self.watch is not None:
                self.watch(new, True)
            self.add_l3(new, places[fresh])
        return len(known) + len(fresh)

    @property
    def nbytes(self) -> int:
        """Bytes of all columns and of the index."""
        own = (self.keys, self.tiers, self.slot1, self.slot2, self.place3)
        parts = sum(int(column.nbytes) for column in own)
        return parts + self.l1.nbytes + self.l2.nbytes + self.rows_free.nbytes + self.index.nbytes

    def check_integrity(self) -> list[str]:
        """Violated invariants, empty when sound. Walks everything; for idle time and tests."""
        faults = self.index.check()
        live = np.flatnonzero(self.tiers)
        if len(live) + self.rows_free.count != self.capacity:
            faults.append(f"{len(live)} rows live, {self.rows_free.count} free, {self.capacity} in all")
        if len(self.index) != len(live):
            faults.append(f"{len(self.index)} keys for {len(live)} rows")
        if (self.tiers[self.rows_free.items()] != 0).any():
            faults.append("a free row has copies")
        if int((self.tiers & L3 != 0).sum()) != self.l3_count:
            faults.append(f"L3 counts {self.l3_count}, has {int((self.tiers & L3 != 0).sum())}")
        for tier in (self.l1, self.l2):
            column = self.slots_of(tier.bit)
            rows = np.flatnonzero(self.tiers & tier.bit)
            slots = column[rows]
            if (slots == NO_SLOT).any() or (tier.row[slots] != rows).any() or (tier.state[slots] != SEALED).any():
                faults.append(f"{tier.name}: a row and its slot disagree")
            if len(rows) != int((tier.state == SEALED).sum()):
                faults.append(f"{tier.name}: {len(rows)} copies in {int((tier.state == SEALED).sum())} sealed slots")
            free = tier.free.items()
            if len(np.unique(free)) != len(free) or (tier.state[free] != FREE).any():
                faults.append(f"{tier.name}: the free list holds a slot twice or one in use")
            if len(free) + int((tier.state != FREE).sum()) + tier.padding != tier.slots and tier.slots:
                faults.append(f"{tier.name}: a slot is neither free nor used")
            if (tier.pins[tier.state != SEALED] != 0).any():
                faults.append(f"{tier.name}: a pin on a slot that is not sealed")
            if tier.pinned != np.count_nonzero(tier.pins):
                faults.append(f"{tier.name}: counts {tier.pinned} pinned slots, has {np.count_nonzero(tier.pins)}")
        return faults
