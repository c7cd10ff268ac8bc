"""Finding pages of a pool and keeping them: look-up, pins and the leases that hold them. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from omni_flow.data.accounts import Account, Lease, live_positions
from omni_flow.data.errors import BadToken, PoolFull
from omni_flow.data.messages import L1, L2, L3
from omni_flow.data.page_table import NO_SLOT
from omni_flow.data.pool_room import PoolRoom

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
SLICE_PAGES: Final = 2048


class Pinned(NamedTuple):
    """What a look-up found in one group: parallel columns over the pages it needs."""

    tiers: U8
    slots: U32
    generations: U32


class PinnedPool(PoolRoom):
    """Pages with leases on them."""

    def locate(self, keys: U8, allowed: int) -> tuple[NDArray[np.int64], U8]:
        """Rows of the keys and their tiers within `allowed` (0: not there)."""
        rows = self.table.find(keys)
        tiers: U8 = self.table.tiers[rows] & np.uint8(allowed)
        tiers[rows < 0] = 0
        return rows, tiers

    def copies(self, keys: U8) -> NDArray[np.uint64]:
        """Which copies objects have: per key and tier (L1, L2, L3) a number of its own for each copy there, 0: none."""
        rows, tiers = self.locate(keys, L1 | L2 | L3)
        found = np.zeros((len(keys), 3), np.uint64)
        for at, bit in enumerate((L1, L2)):
            has = (tiers & bit) != 0
            slots = self.table.slots_of(bit)[rows[has]]
            found[has, at] = slots.astype(np.uint64) << np.uint64(32) | self.table.tier(bit).generation[slots]
            found[has, at] += np.uint64(1)
        has = (tiers & L3) != 0
        found[has, 2] = self.table.place3[rows[has]] + np.uint64(1)
        return found

    def choose(self, rows: NDArray[np.int64], tiers: U8) -> Pinned:
        """The best copy of each row; all `tiers` are non-zero. L3 copies have no slot."""
        table = self.table
        in1 = (tiers & L1) != 0
        if in1.all():
            slots = table.slot1[rows]
            return Pinned(np.full(len(rows), L1, np.uint8), slots, table.l1.generation[slots])
        in2 = ~in1 & ((tiers & L2) != 0)
        best = np.where(in1, L1, np.where(in2, L2, L3)).astype(np.uint8)
        slots = np.where(in1, table.slot1[rows], np.where(in2, table.slot2[rows], NO_SLOT)).astype(np.uint32)
        generations = np.zeros(len(rows), np.uint32)
        generations[in1] = table.l1.generation[slots[in1]]
        generations[in2] = table.l2.generation[slots[in2]]
        return Pinned(best, slots, generations)

    def note(self, found: Pinned, missed: int) -> None:
        """Count hits and tell the policies."""
        counters = self.counters
        counters["misses"] += missed
        for bit, name in ((L1, "hits_l1"), (L2, "hits_l2")):
            mine = found.slots[found.tiers == bit]
            if len(mine):
                counters[name] += len(mine)
                self.policies[bit].on_hit(mine[::-1])
        counters["hits_l3"] += int((found.tiers == L3).sum())

    def touch(self, keys: U8, first: int) -> None:
        """Tell the policies that pages are used without a look-up; of two copies it is that in tier `first`."""
        rows, tiers = self.locate(keys, L1 | L2)
        tiers[(tiers & first) != 0] = first
        for bit in (L1, L2):
            mine = self.table.slots_of(bit)[rows[tiers == bit]]
            if len(mine):
                self.policies[bit].on_hit(mine[::-1])

    def pin(self, account: Account, found: Pinned) -> int:
        """Pin what `choose` gave (L1 and L2 copies); 0 when there is nothing to pin."""
        tiers = np.where(found.tiers == L3, 0, found.tiers).astype(np.uint8)
        return self._pin(account, tiers, found.slots) if tiers.any() else 0

    def fitting(self, account: Account, found: Pinned) -> int:
        """How many copies from the front this account may still pin within its shares."""
        fits = len(found.slots)
        if min(account.share1.room, account.share2.room) >= fits:
            return fits
        for bit in (L1, L2):
            share = account.share(bit)
            at = np.flatnonzero(found.tiers == bit)
            fresh = share.counts[found.slots[at]] == 0
            if int(fresh.sum()) > max(0, share.room):
                over = np.flatnonzero(np.cumsum(fresh) > max(0, share.room))[0]
                fits = min(fits, int(at[over]))
        return fits

    def _pin(self, account: Account, tiers: U8, slots: U32, always: bool = False) -> int:
        """Pin distinct copies; a position that repeats a slot of the batch becomes tier 0.

        Args:
            always: also beyond the share (pages just committed, which were reserved within it).
        """
        parts: list[tuple[int, U32]] = []
        for bit in (L1, L2):
            at = np.flatnonzero(tiers == bit)
            if not len(at):
                continue
            mine = slots[at]
            ordered = np.sort(mine)
            if (ordered[1:] == ordered[:-1]).any():
                _, first = np.unique(mine, return_index=True)
                again = np.ones(len(at), np.bool_)
                again[first] = False
                tiers[at[again]] = 0
                mine = mine[np.sort(first)]
            share = account.share(bit)
            if not always and share.used + len(mine) > share.limit:
                fresh = int((share.counts[mine] == 0).sum())
                if share.used + fresh > share.limit:
                    raise PoolFull(
                        f"pinning {fresh} more pages of pool {self.spec.name}: share {share.name!r} of session "
                        f"{account.session} uses {share.used} of {share.limit}",
                        "unpin pages first, or raise the quota",
                        self.holders(),
                    )
            parts.append((bit, mine))
        total = 0
        for bit, mine in parts:
            self.table.tier(bit).pin(mine)
            account.share(bit).pin(mine)
            total += len(mine)
        lease = Lease(next(self.numbers), tiers, slots, total)
        account.leases[lease.id] = lease
        account.pinned += total
        return lease.id

    def unpin(self, account: Account, lease_id: int, positions: U32 | None) -> int:
        """Give pins back. Returns how many."""
        lease = account.leases.get(lease_id)
        if lease is None:
            raise BadToken(f"no lease {lease_id} of session {account.session} in pool {self.spec.name}")
        at = live_positions(positions, lease.tiers != 0)
        for bit in (L1, L2):
            mine = lease.slots[at[lease.tiers[at] == bit]]
            if len(mine):
                self.table.tier(bit).unpin(mine)
                account.share(bit).unpin(mine)
        lease.tiers[at] = 0
        lease.left -= len(at)
        account.pinned -= len(at)
        if not lease.left:
            del account.leases[lease_id]
        return len(at)

    def _unpin_many(self, account: Account) -> int:
        """Unpin whole leases together, about a slice of them."""
        chosen: list[Lease] = []
        pages = 0
        while account.leases and pages < SLICE_PAGES:
            lease = account.leases.popitem()[1]
            chosen.append(lease)
            pages += len(lease.slots)
        tiers = np.concatenate([lease.tiers for lease in chosen])
        slots = np.concatenate([lease.slots for lease in chosen])
        for bit in (L1, L2):
            mine = slots[tiers == bit]
            if len(mine):
                distinct, times = np.unique(mine, return_counts=True)
                self.table.tier(bit).unpin(distinct, times.astype(np.uint32))
                account.share(bit).unpin(distinct, times.astype(np.uint32))
        done = int((tiers != 0).sum())
        account.pinned -= done
        return done
