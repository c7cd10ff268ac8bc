"""One pool of KV pages: reservations, leases, quotas, fair waits, eviction. The page table underneath knows no owner.

Times are monotonic seconds that the caller passes in. Every operation is all-or-nothing: arguments are checked before
anything changes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from omni_flow.data.accounts import Account, Lease, Reservation, Share
from omni_flow.data.digest_index import SEED
from omni_flow.data.errors import BadArgument, BadToken, DataError, Holder, NeverFits, PoolFull, Refused
from omni_flow.data.messages import L1, L2, L3, TIER_NAMES
from omni_flow.data.page_table import NO_SLOT, RESERVED, SEALED, PageTable, SlotTier
from omni_flow.data.policy import EvictionPolicy, make_policy
from omni_flow.data.waits import Waiter, WaitQueue

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
Mask = NDArray[np.bool_]
SLICE_PAGES: Final = 2048
SLICE_TOKENS: Final = 64

Taken = Callable[[Reservation], None]
Failed = Callable[[DataError], None]


class PoolSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a pool is.

    Args:
        name: of the pool.
        page_bytes: size of a page (of one object) in bytes.
        l1_pages, l2_pages: slots of the two arenas.
        l3_pages: objects L3 may hold beyond those with a slot; 0: no L3.
        padding: L1 slots at the front that are never given out.
        l1_device: the GPU on which L1 lies; -1: CPU memory stands in for it.
        planes: pieces of a page in a device L1, which is layer-major: plane i of page p lies at
            (i · l1_pages + p) · page_bytes / planes. In CPU memory and below, pages are whole.
        policy: eviction policy of L1 and L2.
        high, low: shares of a tier at which background demotion starts and stops.
        staging: slots of each tier kept for running jobs, never lent to the cache; -1: a sixteenth of the tier, at
            most 256, where there is a tier below L1.
        death_quarantine_s: how long slots reserved by a dead session stay closed (DMA still in flight).
        demote: write pages down before dropping them.
    """

    name: str
    page_bytes: int
    l1_pages: int
    l2_pages: int = 0
    l3_pages: int = 0
    padding: int = 0
    l1_device: int = -1
    planes: int = 1
    policy: str = "s3fifo"
    high: float = 0.9
    low: float = 0.8
    staging: int = -1
    death_quarantine_s: float = 0.0
    demote: bool = True


class Pinned(NamedTuple):
    """What a look-up found in one group: parallel columns over the pages it needs."""

    tiers: U8
    slots: U32
    generations: U32


class KvPool:
    """See the module.

    Args:
        numbers: gives tokens and lease ids, unique within a boot of the server.
        seed: of the index; a secret of the server, so that nobody can crowd a bucket.
    """

    def __init__(self, spec: PoolSpec, numbers: Iterator[int] | None = None, seed: int = SEED) -> None:
        self.spec = spec
        self.table = PageTable(spec.l1_pages, spec.l2_pages, spec.l3_pages, spec.padding, seed)
        self.numbers = numbers if numbers is not None else itertools.count(1)
        self.policies: dict[int, EvictionPolicy] = {
            bit: make_policy(spec.policy, max(1, self.table.tier(bit).slots)) for bit in (L1, L2)
        }
        self.waits = {L1: WaitQueue(), L2: WaitQueue()}
        self.quota_waits: dict[int, WaitQueue] = {}
        self.now = 0.0
        self.accounts: dict[int, Account] = {}
        self.shared = {
            bit: Share("shared", self.table.tier(bit).capacity, self.table.tier(bit).slots) for bit in (L1, L2)
        }
        self.staging = {bit: Share("staging", 0, self.table.tier(bit).slots) for bit in (L1, L2)}
        self.quarantined: list[tuple[float, int, U32]] = []
        self.counters: dict[str, int] = dict.fromkeys(
            ("hits_l1", "hits_l2", "hits_l3", "misses", "stored", "duplicates", "evicted", "demoted", "waits"), 0
        )
        self.counters.update(refused=0, reclaimed=0, migrated=0, job_pages_failed=0, bad_records=0)
        self.demote: Callable[[int, U32, float], int] = lambda _tier, _slots, _now: 0
        self.demoting: Callable[[int], int] = lambda _tier: 0
        self.job_pins: Callable[[], Sequence[tuple[int, U32]]] = tuple
        self.job_slots: Callable[[], Sequence[tuple[int, U32]]] = tuple
        self.set_staging(spec.staging)

    # -- accounts and shares ------------------------------------------------------------------------------------

    def set_staging(self, pages: int) -> None:
        """Set the staging share of both tiers (as far as the tier is that large; -1: see `PoolSpec`)."""
        for bit in (L1, L2):
            capacity = self.table.tier(bit).capacity
            take = min(pages, max(0, capacity - 1))
            if pages < 0:
                below = self.spec.l2_pages or self.spec.l3_pages
                take = min(256, max(1, capacity // 16), max(0, capacity - 1)) if below else 0
            self.shared[bit].limit += self.staging[bit].limit - take
            self.staging[bit].limit = take

    def open(self, session: int, pid: int, name: str, quota: int = 0) -> Account:
        """Make the account of a session; `quota` L1 pages are always available to it.

        Raises:
            NeverFits: the quotas together would pass the tier.
        """
        share1 = self.shared[L1]
        if quota:
            room = share1.limit - share1.used
            if quota > room:
                raise NeverFits(
                    f"quota of {quota} pages in pool {self.spec.name}, {max(0, room)} of "
                    f"{self.table.l1.capacity} are not promised to others",
                    "lower the quotas or enlarge L1",
                    self.holders(),
                )
            share1.limit -= quota
            share1 = Share(name, quota, self.table.l1.slots)
            self.quota_waits[session] = WaitQueue()
        account = Account(session, pid, name, share1, self.shared[L2])
        self.accounts[session] = account
        return account

    def holders(self) -> tuple[Holder, ...]:
        """The sessions that hold most of this pool, at most 8."""
        held = [account.holder() for account in self.accounts.values()]
        held = [holder for holder in held if holder.reserved or holder.pinned]
        return tuple(sorted(held, key=lambda h: -(h.reserved + h.pinned))[:8])

    @property
    def nbytes(self) -> int:
        """Bytes of all bookkeeping that grows with the number of pages."""
        shares = sum(s.counts.nbytes for s in (*self.shared.values(), *self.staging.values()))
        return self.table.nbytes + shares + sum(policy.nbytes() for policy in self.policies.values())

    # -- reservations -------------------------------------------------------------------------------------------

    def reserve(
        self,
        account: Account,
        tier: int,
        count: int,
        least: int,
        now: float,
        deadline: float,
        taken: Taken,
        failed: Failed,
    ) -> None:
        """Take `count` slots, at least `least` if not all are to be had; waits until the deadline.

        Pages that exist nowhere else are written down first, and dropped only once the deadline has come. An account
        with a quota waits for its own earlier requests alone, never for those of others. Calls exactly one of `taken`
        and `failed`, now or later.
        """
        self.now = now
        slots, share = self.table.tier(tier), account.share(tier)
        least = least or count
        if not 1 <= least <= count:
            raise BadArgument(f"reserve {count} pages, at least {least}", "count ≥ least ≥ 1")
        if least > share.limit:
            self.counters["refused"] += 1
            raise NeverFits(
                f"{least} pages of {slots.name} in pool {self.spec.name}: share {share.name!r} has {share.limit} pages",
                "ask for fewer pages, or enlarge the tier or the quota",
                self.holders(),
            )

        def attempt(last: bool) -> bool:
            n = min(count, share.room)
            if n < least or not self.make_room(tier, n, self.now, urgent=last):
                return False
            taken(self._take(account, slots, n))
            return True

        def expire() -> None:
            failed(self._full(slots, share, least))

        own = self.quota_waits.get(account.session) if tier == L1 else None
        queue = self.waits[tier] if own is None else own
        at_once = deadline <= now
        if (at_once or not queue) and attempt(at_once):
            return
        if at_once:
            expire()
            return
        self.counters["waits"] += 1
        queue.add(Waiter(account.session, least, deadline, attempt, expire))

    def _full(self, slots: SlotTier, share: Share, want: int) -> PoolFull:
        pinned = int((slots.pins > 0).sum())
        reserved = int((slots.state == RESERVED).sum())
        return PoolFull(
            f"{want} pages of {slots.name} in pool {self.spec.name} not to be had: {slots.free.count} free, "
            f"{reserved} reserved, {pinned} pinned of {slots.capacity}; "
            f"share {share.name!r} uses {share.used} of {share.limit}",
            "wait longer, or let the holders unpin",
            self.holders(),
        )

    def _take(self, account: Account, slots: SlotTier, n: int) -> Reservation:
        token = next(self.numbers)
        got = slots.reserve(n)
        reservation = Reservation(token, slots.bit, got, np.ones(n, np.bool_), n)
        account.tokens[token] = reservation
        account.reserved[slots.bit] += n
        account.share(slots.bit).reserved += n
        return reservation

    def _evictable(self, tier: SlotTier) -> Callable[[U32], Mask]:
        def ask(slots: U32) -> Mask:
            mask: Mask = (tier.state[slots] == SEALED) & (tier.pins[slots] == 0)
            return mask

        return ask

    def make_room(self, bit: int, count: int, now: float, urgent: bool) -> bool:
        """See that `count` slots are free: drop what has another copy; write down the rest, or drop it if urgent."""
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
        if len(victims):
            self.evict(bit, victims)
        return tier.free.count >= count

    def lower(self, bit: int, count: int, now: float) -> None:
        """Background demotion: copies with another copy are dropped, others go down a tier as far as that works."""
        tier = self.table.tier(bit)
        victims = self.policies[bit].victims(count, self._evictable(tier), now)
        alone = self.table.tiers[tier.row[victims]] == bit
        if alone.any():
            self.demote(bit, victims[alone], now)
        if not alone.all():
            self.evict(bit, victims[~alone])

    def evict(self, bit: int, slots: U32) -> None:
        """Drop unpinned copies."""
        self.policies[bit].on_remove(slots, evicted=True)
        self.table.drop(bit, self.table.tier(bit).row[slots])
        self.counters["evicted"] += len(slots)

    def _reservation(self, account: Account, token: int) -> Reservation:
        found = account.tokens.get(token)
        if found is None:
            raise BadToken(f"no reservation {token} of session {account.session} in pool {self.spec.name}")
        return found

    @staticmethod
    def _positions(positions: U32 | None, live: Mask) -> NDArray[np.int64]:
        """Checked positions of a reservation or lease; None: all that are left."""
        if positions is None:
            return np.flatnonzero(live)
        at = positions.astype(np.int64)
        if len(at) and (int(at.max()) >= len(live) or not live[at].all()):
            raise BadArgument(f"a position of {len(at)} is outside 0..{len(live) - 1} or already given back")
        if len(at) > 1:
            ordered = np.sort(at)
            if (ordered[1:] == ordered[:-1]).any():
                raise BadArgument("a position comes twice")
        return at

    def commit(
        self, account: Account, token: int, positions: U32 | None, keys: U8, pin: bool, keep_duplicates: bool
    ) -> tuple[int, U8, U32]:
        """Name reserved slots; see `PageTable.seal`.

        Args:
            keep_duplicates: slots that turn out not to be needed stay in the reservation; else they are freed.

        Returns:
            lease (0 without `pin`), per page status and the slot that holds it now.
        """
        reservation = self._reservation(account, token)
        at = self._positions(positions, reservation.live)
        if len(at) != len(keys):
            raise BadArgument(f"{len(keys)} keys for {len(at)} pages")
        bit = reservation.tier
        tier = self.table.tier(bit)
        slots = reservation.slots[at]
        status, final = self.table.seal(bit, slots, keys)
        duplicates = int(status.sum())
        if duplicates:
            stored = status == 0
            done = at[stored] if keep_duplicates else at
            fresh = slots[stored]
            if not keep_duplicates:
                tier.release(slots[~stored])
        else:
            done, fresh = at, slots
        self.admit(bit, fresh)
        self._settle(account, reservation, done)
        self.counters["stored"] += len(fresh)
        self.counters["duplicates"] += duplicates
        lease = self._pin(account, np.full(len(final), bit, np.uint8), final, always=True) if pin and len(final) else 0
        return lease, status, final

    def admit(self, bit: int, slots: U32) -> None:
        """Tell the policy of new copies; a suffix is to go before its prefix, so the last page comes first."""
        if len(slots):
            words = self.table.keys.view(np.uint64)[self.table.tier(bit).row[slots], 0]
            self.policies[bit].on_insert(slots[::-1], words[::-1])

    def _settle(self, account: Account, reservation: Reservation, at: NDArray[np.int64]) -> None:
        """Positions `at` are no longer reserved."""
        n = len(at)
        reservation.live[at] = False
        reservation.left -= n
        account.reserved[reservation.tier] -= n
        account.share(reservation.tier).reserved -= n
        if not reservation.left:
            del account.tokens[reservation.token]

    def abort(self, account: Account, token: int, positions: U32 | None, until: float | None) -> int:
        """Give reserved slots back; with `until` they stay in quarantine so long. Returns how many."""
        reservation = self._reservation(account, token)
        at = self._positions(positions, reservation.live)
        slots = reservation.slots[at]
        tier = self.table.tier(reservation.tier)
        if until is not None:
            tier.quarantine(slots)
            self.quarantined.append((until, tier.bit, slots))
        else:
            tier.release(slots)
        self._settle(account, reservation, at)
        return len(at)

    # -- look-up and pins ---------------------------------------------------------------------------------------

    def locate(self, keys: U8, allowed: int) -> tuple[NDArray[np.int64], U8]:
        """Rows of the keys and their tiers within `allowed` (0: not there)."""
        rows = self.table.find(keys)
        tiers: U8 = self.table.tiers[rows] & np.uint8(allowed)
        tiers[rows < 0] = 0
        return rows, tiers

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
            self.table.pin(bit, mine)
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
        at = self._positions(positions, lease.tiers != 0)
        for bit in (L1, L2):
            mine = lease.slots[at[lease.tiers[at] == bit]]
            if len(mine):
                self.table.unpin(bit, mine)
                account.share(bit).unpin(mine)
        lease.tiers[at] = 0
        lease.left -= len(at)
        account.pinned -= len(at)
        if not lease.left:
            del account.leases[lease_id]
        return len(at)

    # -- the end of things --------------------------------------------------------------------------------------

    def drop_keys(self, keys: U8) -> U8:
        """Forget objects that nobody has pinned. Returns per key whether it is gone (or was not there)."""
        gone = np.ones(len(keys), np.uint8)
        table = self.table
        for i, key in enumerate(keys):
            row = table.index.find_one(key.tobytes())
            if row < 0:
                continue
            slots = [(bit, int(table.slots_of(bit)[row])) for bit in (L1, L2) if table.tiers[row] & bit]
            if any(table.tier(bit).pins[slot] for bit, slot in slots):
                gone[i] = 0
                continue
            if table.tiers[row] & L3:
                table.drop(L3, np.array([row], np.uint32))
            for bit, slot in slots:
                self.policies[bit].on_remove(np.array([slot], np.uint32), evicted=False)
                table.drop(bit, np.array([row], np.uint32))
        return gone

    def close(self, session: int, now: float) -> Iterator[None]:
        """Give back everything of a session, yielding between slices of about `SLICE_PAGES` pages."""
        account = self.accounts.get(session)
        if account is None:
            return
        self.quota_waits.pop(session, None)
        for queue in self.waits.values():
            queue.forget(session)
        closed = self.spec.death_quarantine_s
        while account.tokens:
            until = now + closed if closed else None
            done = 0
            for token in list(itertools.islice(account.tokens, SLICE_TOKENS)):
                done += self.abort(account, token, None, until)
                if done >= SLICE_PAGES:
                    break
            self.counters["reclaimed"] += done
            yield
        while account.leases:
            done = self._unpin_many(account)
            self.counters["reclaimed"] += done
            yield
        if account.share1 is not self.shared[L1]:
            self.shared[L1].limit += account.share1.limit
        del self.accounts[session]
        self.pump()

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
                self.table.tier(bit).pins[distinct] -= times.astype(np.uint32)
                account.share(bit).unpin(distinct, times.astype(np.uint32))
        done = int((tiers != 0).sum())
        account.pinned -= done
        return done

    def waiting(self, bit: int) -> int:
        """How many reservations wait for room in a tier."""
        return len(self.waits[bit]) + (sum(map(len, self.quota_waits.values())) if bit == L1 else 0)

    def _queues(self) -> list[WaitQueue]:
        return [*self.quota_waits.values(), *self.waits.values()]

    def pump(self) -> None:
        """Serve waiters as far as there is room, those with a quota first."""
        for queue in self._queues():
            if queue:
                queue.pump()

    def tick(self, now: float) -> float | None:
        """End quarantines and waits that are due. Returns when to come again."""
        self.now = now
        if self.quarantined:
            due = [q for q in self.quarantined if q[0] <= now]
            if due:
                self.quarantined = [q for q in self.quarantined if q[0] > now]
                for _, bit, slots in due:
                    self.table.tier(bit).release(slots)
                self.pump()
        times = [queue.tick(now) for queue in self._queues() if queue]
        times += [q[0] for q in self.quarantined]
        return min((t for t in times if t is not None), default=None)

    def over(self, bit: int) -> int:
        """Slots above the low watermark of a tier that has passed the high one, else 0."""
        tier = self.table.tier(bit)
        used = tier.capacity - tier.free.count
        return used - int(self.spec.low * tier.capacity) if used > self.spec.high * tier.capacity else 0

    def require(self, bit: int, account: Account) -> None:
        """Refuse a tier this pool does not have."""
        if bit not in (L1, L2) or not self.table.tier(bit).capacity:
            raise Refused(
                f"pool {self.spec.name} has no {TIER_NAMES.get(bit, bit)}", f"session {account.session}: use L1"
            )

    def check_integrity(self) -> list[str]:
        """Violated invariants of table, policies, shares and accounts; empty when sound."""
        faults = self.table.check_integrity()
        for bit in (L1, L2):
            tier = self.table.tier(bit)
            pins = np.zeros(tier.slots, np.int64)
            reserved = np.zeros(tier.slots, np.int64)
            shares: dict[int, Share] = {
                id(self.shared[bit]): self.shared[bit],
                id(self.staging[bit]): self.staging[bit],
            }
            for account in self.accounts.values():
                shares[id(account.share(bit))] = account.share(bit)
                for lease in account.leases.values():
                    np.add.at(pins, lease.slots[lease.tiers == bit], 1)
                for reservation in account.tokens.values():
                    if reservation.tier == bit:
                        np.add.at(reserved, reservation.slots[reservation.live], 1)
            for bits, slots in self.job_pins():
                if bits == bit:
                    np.add.at(pins, slots, 1)
            for bits, slots in self.job_slots():
                if bits == bit:
                    np.add.at(reserved, slots, 1)
            if (pins != tier.pins).any():
                faults.append(f"{tier.name}: pins {int(tier.pins.sum())}, leases and jobs hold {int(pins.sum())}")
            if (reserved > 1).any() or ((tier.state == RESERVED) != (reserved == 1)).any():
                faults.append(f"{tier.name}: reserved slots and reservations disagree")
            if sum(share.limit for share in shares.values()) > tier.capacity:
                faults.append(f"{tier.name}: the shares promise more than {tier.capacity} slots")
            for share in shares.values():
                if share.pinned != int((share.counts > 0).sum()):
                    faults.append(f"{tier.name}: share {share.name} counts {share.pinned} pinned pages wrongly")
            if len(self.policies[bit]) != int((tier.state == SEALED).sum()):
                faults.append(f"{tier.name}: the policy tracks {len(self.policies[bit])} slots of {len(pins)}")
        return faults
