"""One pool of KV pages: reservations, waits and quarantine over its room (`pool_room.py`) and pins (`pool_pins.py`).

Times are monotonic seconds that the caller passes in. Every operation is all-or-nothing: arguments are checked before
anything changes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_flow.data.accounts import Account, Reservation, Share, live_positions
from omni_flow.data.digest_index import SEED
from omni_flow.data.errors import BadArgument, BadToken, DataError, NeverFits, PoolFull, Refused
from omni_flow.data.messages import L1, L2, L3, TIER_NAMES
from omni_flow.data.page_table import QUARANTINED, RESERVED, SEALED, SlotTier
from omni_flow.data.pool_pins import SLICE_PAGES, PinnedPool
from omni_flow.data.pool_spec import PoolSpec
from omni_flow.data.waits import Waiter, WaitQueue

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
SLICE_TOKENS: Final = 64

Taken = Callable[[Reservation], None]
Failed = Callable[[DataError], None]


@dataclass(slots=True, eq=False)
class Quarantine:
    """Slots that nobody gets before `until`, as a device may still write there; held by the share that had them."""

    until: float
    tier: int
    slots: U32
    share: Share


class KvPool(PinnedPool):
    """See the module."""

    def __init__(self, spec: PoolSpec, numbers: Iterator[int] | None = None, seed: int = SEED) -> None:
        super().__init__(spec, numbers, seed)
        self.waits = {L1: WaitQueue(), L2: WaitQueue()}
        self.quota_waits: dict[int, WaitQueue] = {}
        self.now = 0.0
        self.quarantined: list[Quarantine] = []
        self.job_pins: Callable[[], Sequence[tuple[int, U32]]] = tuple
        self.job_slots: Callable[[], Sequence[tuple[int, U32]]] = tuple

    def open(self, session: int, pid: int, name: str, quota: int = 0) -> Account:
        account = super().open(session, pid, name, quota)
        if quota:
            self.quota_waits[session] = WaitQueue()
        return account

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
        """Take `count` slots; waits until the deadline, and takes then what nobody holds, at least `least`.

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
            n, known = min(count, share.room), len(self.table.index)
            if n < least:
                return False
            if not self.make_room(tier, n, self.now, urgent=last):
                n = min(n, self.attainable(tier))
                if not last or n < least or not self.make_room(tier, n, self.now, urgent=True):
                    return False
            reservation = self._take(account, slots, n)
            reservation.forced = last and not at_once and len(self.table.index) < known
            taken(reservation)
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
        reserved = int((slots.state == RESERVED).sum())
        return PoolFull(
            f"{want} pages of {slots.name} in pool {self.spec.name} not to be had: {slots.free.count} free, "
            f"{reserved} reserved, {slots.pinned} pinned, {self.in_quarantine(slots.bit)} in quarantine "
            f"of {slots.capacity}; share {share.name!r} uses {share.used} of {share.limit}",
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

    def _reservation(self, account: Account, token: int) -> Reservation:
        found = account.tokens.get(token)
        if found is None:
            raise BadToken(f"no reservation {token} of session {account.session} in pool {self.spec.name}")
        return found

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
        at = live_positions(positions, reservation.live)
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
        at = live_positions(positions, reservation.live)
        slots = reservation.slots[at]
        tier = self.table.tier(reservation.tier)
        self._settle(account, reservation, at)
        if until is not None:
            self.quarantine(tier.bit, slots, account.share(tier.bit), until)
        else:
            tier.release(slots)
        return len(at)

    def quarantine(self, bit: int, slots: U32, share: Share, until: float) -> None:
        """Close reserved slots, which `share` no longer counts as such, until a time."""
        self.table.tier(bit).quarantine(slots)
        share.quarantined += len(slots)
        self.quarantined.append(Quarantine(until, bit, slots, share))

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
            for closed_part in self.quarantined:
                if closed_part.share is account.share1:
                    closed_part.share = self.shared[L1]
                    self.shared[L1].quarantined += len(closed_part.slots)
        del self.accounts[session]
        self.pump()

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
            due = [q for q in self.quarantined if q.until <= now]
            if due:
                self.quarantined = [q for q in self.quarantined if q.until > now]
                for over in due:
                    self.table.tier(over.tier).release(over.slots)
                    over.share.quarantined -= len(over.slots)
                self.pump()
        times = [queue.tick(now) for queue in self._queues() if queue]
        times += [q.until for q in self.quarantined]
        return min((t for t in times if t is not None), default=None)

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
            shares = self.shares(bit)
            for account in self.accounts.values():
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
            if self.in_quarantine(bit) != int((tier.state == QUARANTINED).sum()):
                faults.append(f"{tier.name}: the shares count {self.in_quarantine(bit)} slots in quarantine wrongly")
            if sum(share.limit for share in shares) > tier.capacity:
                faults.append(f"{tier.name}: the shares promise more than {tier.capacity} slots")
            for share in shares:
                if share.pinned != int((share.counts > 0).sum()):
                    faults.append(f"{tier.name}: share {share.name} counts {share.pinned} pinned pages wrongly")
            if len(self.policies[bit]) != int((tier.state == SEALED).sum()):
                faults.append(f"{tier.name}: the policy tracks {len(self.policies[bit])} slots of {len(pins)}")
        return faults
