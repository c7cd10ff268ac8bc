"""What a pool of pages consists of, what of it is promised to whom, and how room is made in a tier. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_flow.data.accounts import Account, Share
from omni_flow.data.digest_index import SEED
from omni_flow.data.errors import Holder, NeverFits
from omni_flow.data.messages import L1, L2
from omni_flow.data.page_table import SEALED, PageTable, SlotTier
from omni_flow.data.policy import EvictionPolicy, make_policy
from omni_flow.data.pool_spec import PoolSpec

U32 = NDArray[np.uint32]
Mask = NDArray[np.bool_]
_STAGED: Final = {L1: 16, L2: 4}
"""The part of a tier, one in so many slots, that is kept for jobs unless the spec says otherwise. All jobs pass L2."""
_MOST_STAGED: Final = 256


def beside_staging(bit: int, pages: int) -> int:
    """Slots of a tier that leave `pages` of them to everybody, beside the share that a spec keeps for jobs if it says
    nothing of `staging`."""
    return pages + min(_MOST_STAGED, pages // (_STAGED[bit] - 1) + 1)


class PoolRoom:
    """Page table, policies, accounts and shares of a pool.

    Args:
        numbers: gives tokens and lease ids, unique within a boot of the server.
        seed: of the index; a secret of the server, so that nobody can crowd a bucket.

    `demote(tier, slots, now)` writes pages one tier down and returns how many it has begun with; `demoting(tier)` is
    how many are on their way. Whoever runs the jobs sets both.
    """

    def __init__(self, spec: PoolSpec, numbers: Iterator[int] | None = None, seed: int = SEED) -> None:
        self.spec = spec
        self.table = PageTable(spec.l1_pages, spec.l2_pages, spec.l3_pages, spec.padding, seed)
        self.numbers = numbers if numbers is not None else itertools.count(1)
        self.policies: dict[int, EvictionPolicy] = {
            bit: make_policy(spec.policy, max(1, self.table.tier(bit).slots)) for bit in (L1, L2)
        }
        self.accounts: dict[int, Account] = {}
        self.shared = {
            bit: Share("shared", self.table.tier(bit).capacity, self.table.tier(bit).slots) for bit in (L1, L2)
        }
        self.staging = {bit: Share("staging", 0, self.table.tier(bit).slots) for bit in (L1, L2)}
        self.counters: dict[str, int] = dict.fromkeys(
            ("hits_l1", "hits_l2", "hits_l3", "misses", "stored", "duplicates", "evicted", "demoted", "waits"), 0
        )
        self.counters.update(refused=0, reclaimed=0, migrated=0, job_pages_failed=0, bad_records=0)
        self.demote: Callable[[int, U32, float], int] = lambda _tier, _slots, _now: 0
        self.demoting: Callable[[int], int] = lambda _tier: 0
        self.set_staging(spec.staging)

    def set_staging(self, pages: int) -> None:
        """Set the staging share of both tiers (as far as the tier is that large; -1: see `PoolSpec`)."""
        for bit in (L1, L2):
            capacity = self.table.tier(bit).capacity
            take = min(pages, max(0, capacity - 1))
            if pages < 0:
                below = self.spec.l2_pages or self.spec.l3_pages
                take = min(_MOST_STAGED, max(1, capacity // _STAGED[bit]), max(0, capacity - 1)) if below else 0
            self.shared[bit].limit += self.staging[bit].limit - take
            self.staging[bit].limit = take

    def open(self, session: int, pid: int, name: str, quota: int = 0) -> Account:
        """Make the account of a session; `quota` L1 pages are always available to it.

        Raises:
            NeverFits: the quotas together would pass the tier.
        """
        share1 = self.shared[L1]
        if quota:
            room = share1.limit - share1.used + share1.quarantined
            if quota > room:
                raise NeverFits(
                    f"quota of {quota} pages in pool {self.spec.name}, {max(0, room)} of "
                    f"{self.table.l1.capacity} are not promised to others",
                    "lower the quotas or enlarge L1",
                    self.holders(),
                )
            share1.limit -= quota
            share1 = Share(name, quota, self.table.l1.slots)
        account = Account(session, pid, name, share1, self.shared[L2])
        self.accounts[session] = account
        return account

    def holders(self) -> tuple[Holder, ...]:
        """The sessions that hold most of this pool, at most 8."""
        held = [account.holder() for account in self.accounts.values()]
        held = [holder for holder in held if holder.reserved or holder.pinned]
        return tuple(sorted(held, key=lambda h: -(h.reserved + h.pinned))[:8])

    def shares(self, bit: int) -> set[Share]:
        """All shares of a tier."""
        return {self.shared[bit], self.staging[bit], *(account.share(bit) for account in self.accounts.values())}

    def in_quarantine(self, bit: int) -> int:
        """Slots of a tier in quarantine."""
        return sum(share.quarantined for share in self.shares(bit))

    @property
    def nbytes(self) -> int:
        """Bytes of all bookkeeping that grows with the number of pages."""
        shares = sum(s.counts.nbytes for s in (*self.shared.values(), *self.staging.values()))
        return self.table.nbytes + shares + sum(policy.nbytes() for policy in self.policies.values())

    # -- room ---------------------------------------------------------------------------------------------------

    def _evictable(self, tier: SlotTier) -> Callable[[U32], Mask]:
        def ask(slots: U32) -> Mask:
            mask: Mask = (tier.state[slots] == SEALED) & (tier.pins[slots] == 0)
            return mask

        return ask

    def make_room(self, bit: int, count: int, now: float, urgent: bool) -> bool:
        """See that `count` slots are free: drop what has another copy, write down the rest.

        What the tier below does not take, or all of it if urgent, is dropped.
        """
        tier = self.table.tier(bit)
        missing = count - tier.free.count
        if missing <= 0:
            return True
        if not urgent:
            missing -= self.demoting(bit)
            if missing <= 0:
                return False
        victims = self.policies[bit].victims(missing, self._evictable(tier), now)
        if len(victims) < missing:
            return False
        if not urgent and self.spec.demote:
            alone = np.flatnonzero(self.table.tiers[tier.row[victims]] == bit)
            if len(alone):
                planned = self.demote(bit, victims[alone], now)
                coming = self.demoting(bit) or (bit == L1 and self.demoting(L2))
                victims = np.delete(victims, alone if coming else alone[:planned])
                if coming:
                    victims = self._mirrored(bit, victims)
        if len(victims):
            self.evict(bit, victims)
        return tier.free.count >= count

    def attainable(self, bit: int) -> int:
        """Slots that are free, or are when all idle pages have gone."""
        tier = self.table.tier(bit)
        return tier.free.count + int(np.count_nonzero((tier.state == SEALED) & (tier.pins == 0)))

    def lower(self, bit: int, count: int, now: float) -> None:
        """Background demotion: copies with another copy are dropped, others go down a tier as far as that works."""
        tier = self.table.tier(bit)
        victims = self.policies[bit].victims(count, self._evictable(tier), now)
        alone = self.table.tiers[tier.row[victims]] == bit
        if alone.any():
            self.demote(bit, victims[alone], now)
        rest = self._mirrored(bit, victims[~alone])
        if len(rest):
            self.evict(bit, rest)

    def _mirrored(self, bit: int, slots: U32) -> U32:
        """Those that have another copy now: the room below for a demotion may have been that of the other copy."""
        other: Mask = self.table.tiers[self.table.tier(bit).row[slots]] != bit
        return slots[other]

    def evict(self, bit: int, slots: U32) -> None:
        """Drop unpinned copies."""
        self.policies[bit].on_remove(slots, evicted=True)
        self.table.drop(bit, self.table.tier(bit).row[slots])
        self.counters["evicted"] += len(slots)

    def admit(self, bit: int, slots: U32) -> None:
        """Tell the policy of new copies; a suffix is to go before its prefix, so the last page comes first."""
        if len(slots):
            words = self.table.keys.view(np.uint64)[self.table.tier(bit).row[slots], 0]
            self.policies[bit].on_insert(slots[::-1], words[::-1])

    def over(self, bit: int) -> int:
        """Idle pages above the low watermark of a tier whose idle pages have passed the high one, else 0.

        The watermarks are shares of what nobody holds. Of the whole tier, one that clients hold nearly all of would
        drop every page that a job brings before anyone could read it.
        """
        tier = self.table.tier(bit)
        used = tier.capacity - tier.free.count
        if used <= self.spec.high * tier.capacity:
            return 0
        held = self._held(bit)
        idle, room = used - held, tier.capacity - held
        return max(0, idle - math.ceil(self.spec.low * room)) if idle > self.spec.high * room else 0

    def short(self, bit: int, wanted: int) -> int:
        """Idle pages that would have to go for `wanted` slots to be free, or what lies above the high watermark if that
        is less."""
        tier = self.table.tier(bit)
        wanted = min(wanted, tier.capacity - math.floor(self.spec.high * tier.capacity))
        idle = tier.capacity - tier.free.count - self._held(bit)
        return max(0, min(wanted - tier.free.count, idle))

    def _held(self, bit: int) -> int:
        return self.table.tier(bit).pinned + sum(share.reserved + share.quarantined for share in self.shares(bit))
