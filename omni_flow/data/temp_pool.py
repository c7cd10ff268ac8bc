"""The server's half of the TempBuffer pool: leases, ledgers, orphans.

Clients publish, adopt, forward and release by writing into their ledgers (`ledger.py`); the server reads a ledger when
it is rung, when room is short, and when its client dies. It alone frees slots, and leases them anew to their owners but
for those that an only reader gave back; whoever does it raises the slot's generation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from omni_flow.data.errors import BadArgument, BadToken, DataError, NeverFits
from omni_flow.data.ledger import (
    BACK_AT,
    BLOCK,
    CELLS,
    MAX_FANOUT,
    NONE,
    PUBLISHED,
    ROW,
    SOLE,
    SOLE_AT,
    TAKEN_MARK,
    U32,
)
from omni_flow.data.temp_account import Slot, TempAccount
from omni_flow.data.temp_room import Leased, TempRoom
from omni_flow.data.waits import Waiter

_RECHECK_S = 0.01
_HOT_BYTES = 256 << 10
"""From this size on a lease first looks for what has just been released: reusing it is worth more than the look."""
_PRESS_S = 0.05
"""How often those who don't wait make the others give back what they don't use."""
SETTLED_S = 1.0
"""How often a settled slot that somebody still holds is looked at."""


class TempPool(TempRoom):
    """See the module; arguments as of `TempRoom`."""

    def is_published(self, slot: Slot) -> bool:
        """Whether a slot has been published and is not back."""
        return self._shares(slot) > 0

    def published(self) -> int:
        """Slots that have been published and are not free again."""
        return sum(map(self.is_published, self.slots.values())) + len(self.closing)

    # -- leases -------------------------------------------------------------------------------------------------

    def lease(
        self,
        account: TempAccount,
        nbytes: int,
        count: int,
        deadline: float,
        now: float,
        taken: Callable[[int, Leased], None],
        failed: Callable[[DataError], None],
    ) -> None:
        """Lease 1 to `count` slots for `nbytes` each (a sixteenth of the arena at most), waiting for the first.

        Calls exactly one of `taken(slot size, [(entry, slot, generation)])` and `failed`.
        """
        if nbytes < 1 or not 1 <= count <= 256:
            raise BadArgument(f"{count} slots of {nbytes} bytes", "1 to 256 slots of at least a byte")
        size, order = self.size_of(nbytes)
        count = min(count, max(1, self.capacity() // (16 * size)))
        if self.client_bytes and size > self.client_bytes:
            raise NeverFits(f"a slot of {size} bytes, a client may hold {self.client_bytes}", "raise temp_client_bytes")
        if account.ledger is None:
            raise BadToken(f"session {account.session} has no ledger", "map temp/ledger before leasing")

        def within() -> bool:
            return bool(account.free_entries) and (not self.client_bytes or account.bytes + size <= self.client_bytes)

        def serve(_last: bool) -> bool:
            got = self._take(account, size, order, count)
            if got:
                taken(size, got)
            return bool(got)

        def expire() -> None:
            failed(self._full(account, size, within()))

        def admit(_last: bool) -> bool:
            if not within():
                return False
            if self.waits or not serve(False):
                self.waits.add(Waiter(account.session, size, deadline, serve, expire))
            return True

        if size >= _HOT_BYTES or not within() or self.waits or not self._enough(size):
            self.harvest_all()
        if not account.own_wait and within() and not self.waits and serve(False):
            return
        if deadline > now or now >= self._press_again:
            self._press_again = now + _PRESS_S
            self.pressure()
        if deadline <= now:
            expire()
            return
        self.counters["waits"] += 1
        if account.own_wait or not within():
            account.own_wait.add(Waiter(account.session, size, deadline, admit, expire))
            self._bounded.append(account)
        else:
            self.waits.add(Waiter(account.session, size, deadline, serve, expire))

    # -- shares -------------------------------------------------------------------------------------------------

    def _shares(self, slot: Slot) -> int:
        """Shares not yet back, -1 if the slot has not been published; 0 if its only reader has given it back and the
        owner has not looked yet."""
        owner = self.accounts.get(slot.owner)
        if owner is not None and owner.ledger is not None:
            at, cells = slot.entry * CELLS, owner.cells
            if cells[at + 3] != slot.generation:  # the owner has leased it anew by itself
                slot.begin(cells[at + 3])
            if slot.left < 0 and cells[at] == PUBLISHED and 1 <= cells[at + 1] <= MAX_FANOUT:
                slot.left = slot.own = cells[at + 1]
        return 0 if slot.left > 0 and self._returned(slot) else slot.left

    def _sole(self, slot: Slot) -> bool:
        """Whether the slot is out to an only reader, who gives it back directly."""
        return self._table[slot.number * ROW + SOLE_AT] in (slot.generation, slot.generation ^ TAKEN_MARK)

    def _returned(self, slot: Slot) -> bool:
        """Whether the only reader has given it back."""
        return self._table[slot.number * ROW + BACK_AT] == slot.generation and self._sole(slot)

    def _back(self, number: int, generation: int, shares: int) -> Slot | None:
        """Shares of a slot come back; nonsense is counted and ignored. Returns the slot if they were the last."""
        slot = self.slots.get(number)
        if slot is None or not 1 <= shares <= self._shares(slot) or slot.generation != generation:
            self.counters["bad_releases"] += 1
            return None
        slot.left -= shares
        return None if slot.left else slot

    def _end(self, slots: Sequence[Slot]) -> None:
        """All shares of these are back, if nobody lied: one that another ledger still holds stays for its holders."""
        if not slots:
            return
        numbers = {slot.number for slot in slots}
        doubtful = any(not numbers.isdisjoint(account.slots_held()) for account in self.accounts.values())
        held = self.held_shares() if doubtful else {}
        for slot in slots:
            slot.left = held.get((slot.number, slot.generation), 0)
            if slot.left:
                self.counters["bad_releases"] += 1
            elif not self._renew(slot):
                self._free(slot)

    def harvest(self, accounts: Sequence[TempAccount], dead: bool = False) -> int:
        """Take in what clients have forwarded and released; of a dead one everything it held. Returns how many entries
        came back.

        Whoever releases a forwarded share saw it forwarded; so the forwards of all clients are taken in after the look
        at who has released, and before anything comes back.
        """
        found = []
        for account in accounts:
            held, at = account.released(dead)
            if len(at):
                found.append((held, at, held[at].tolist()))
        for account in self.accounts.values() if found else accounts:
            self._take_forwards(account)
        ended: list[Slot] = []
        for held, at, entries in found:
            held[at, 0] = NONE
            for state, shares, number, generation in entries:
                if state == SOLE and self._give_back_for(number, generation):
                    continue
                if slot := self._back(number, generation, shares):
                    ended.append(slot)
        self._end(ended)
        self.counters["harvests"] += len(found)
        return sum(len(entries) for _, _, entries in found)

    def _give_back_for(self, number: int, generation: int) -> bool:
        """Give a slot back to its owner for its only reader, who is dead. False if others hold it too."""
        slot = self.slots.get(number)
        if slot is None:
            return True
        back = self._table[number * ROW + BACK_AT]  # read first: the owner may be at it, and have a new reader
        if self._shares(slot) < 0 or slot.generation != generation:
            return True  # it has been given back before, and the owner has leased it anew
        if not self._sole(slot):
            return False
        if back != generation and not any((number, generation) in account.sole() for account in self.accounts.values()):
            self._table[number * ROW + BACK_AT] = generation
        return True

    def harvest_all(self) -> None:
        self.harvest(list(self.accounts.values()))
        self._free_returned()

    def _free_returned(self) -> None:
        """Free what only readers have given back and no owner looks at."""
        for slot in [slot for slot in self.orphans.values() if self._returned(slot)]:
            self._free(slot)

    def _take_forwards(self, account: TempAccount) -> None:
        """Count the shares that a client has given on; nonsense is counted and ignored."""
        for forward in account.forwards():
            shares, number, generation = forward or (0, 0, 0)
            slot = self.slots.get(number)
            if slot is None or not 1 <= shares <= MAX_FANOUT or self._shares(slot) < 1 or slot.generation != generation:
                self.counters["bad_forwards"] += 1
                continue
            if self._sole(slot):  # given on by a session that may not write here
                self._table[number * ROW + SOLE_AT] = (generation - 1) & U32
            slot.left += shares
            if slot.forwards is None:
                slot.forwards = {}
            slot.forwards[account.session] = slot.forwards.get(account.session, 0) + 1
            self.counters["forwarded"] += 1

    def give_back(self, account: TempAccount, entries: list[int]) -> None:
        """Return leased slots that were never published.

        Raises:
            BadToken: an entry that holds no such slot; nothing is returned then.
        """
        if len(set(entries)) != len(entries):
            raise BadArgument("an entry comes twice")
        slots = [account.owned.get(entry) for entry in entries]
        if account.ledger is None or any(slot is None or self._shares(slot) >= 0 for slot in slots):
            raise BadToken(f"session {account.session} returns slots it has not leased or has published")
        for slot in slots:
            assert slot is not None
            self._free(slot)

    def retract(self, account: TempAccount, number: int, generation: int, shares: int) -> None:
        """The producer takes back shares that no consumer will adopt.

        Raises:
            BadToken: not this client's slot, not published, or fewer shares out.
        """
        slot = self.slots.get(number)
        if (
            slot is None
            or slot.owner != account.session
            or not 1 <= shares <= min(self._shares(slot), slot.own)
            or slot.generation != generation
        ):
            raise BadToken(f"session {account.session} retracts {shares} shares of slot {number} it has not published")
        self.counters["retracted"] += shares
        slot.own -= shares
        if ended := self._back(number, generation, shares):
            self._end((ended,))

    def settle(self, account: TempAccount, slots: list[tuple[int, int]], now: float) -> None:
        """Slots (number, generation) that this client has published, or forwarded, to readers of whom none comes from
        now on: each is free once those who have adopted it are done, and the others who gave it on have settled it too.
        Slots that are free already, or not this client's, are passed over.
        """
        self._take_forwards(account)
        for number, generation in slots:
            slot = self.slots.get(number)
            shares = -1 if slot is None else self._shares(slot)
            if slot is None or slot.generation != generation:
                continue
            if slot.forwards is not None and account.session in slot.forwards:
                slot.forwards[account.session] -= 1
                if not slot.forwards[account.session]:
                    del slot.forwards[account.session]
            elif slot.owner == account.session and not shares:
                self._free(slot)
            elif slot.owner == account.session and shares > 0:
                slot.settled = True
                self._orphan(slot, now)
                self.counters["settled"] += 1

    def _orphan(self, slot: Slot, until: float) -> None:
        """A published slot has no owner any more; who has not adopted it by then comes too late."""
        owner = self.accounts.get(slot.owner)
        if owner is not None:
            owner.disown(slot)
        slot.owner = 0
        slot.adopt_until = max(slot.adopt_until, until)
        self.orphans[slot.number] = slot

    # -- the end of things --------------------------------------------------------------------------------------

    def close(self, session: int, now: float) -> Iterator[None]:
        """A client has gone: its shares go back, unpublished slots are free, published ones become orphans.

        What it has forwarded stays with a producer that lives and has not settled it: that one says when nobody comes
        any more, also for the readers of the same request that the dead one meant. Where there is none, those readers
        have `orphan_s`: their messages may be under way.
        """
        account = self.accounts.get(session)
        if account is None:
            return
        self.waits.forget(session)
        account.own_wait.forget(session)
        self.harvest([account], dead=True)
        yield
        for done, slot in enumerate(list((self.slots if account.has_forwarded else account.owned).values()), 1):
            if self.slots.get(slot.number) is not slot:
                continue
            forwarded = slot.forwards is not None and slot.forwards.pop(session, 0) > 0
            if slot.owner == session and self._shares(slot) <= 0:
                self._free(slot)
            elif slot.owner == session or (forwarded and not slot.owner):
                self._orphan(slot, now + self.orphan_s)
                self.counters["orphaned"] += 1
            if not done % 512:
                yield
        del self.accounts[session]
        self.pump()

    def pump(self) -> None:
        for queue in self._own_waits():
            queue.pump()
        if self.waits:
            self.waits.pump()

    def tick(self, now: float) -> float | None:
        """Serve waiters, drop orphans nobody adopts. Returns when to come again."""
        times: list[float] = []
        queues = self._own_waits()
        if self.waits:
            queues.append(self.waits)
        if queues:
            self.harvest_all()
            self.pump()
            times += [t for t in (queue.tick(now) for queue in queues) if t is not None]
            if times:
                times.append(now + _RECHECK_S)
        if self.orphans or self.closing:
            times.append(self._orphans(now))
        return min(times, default=None)

    def _orphans(self, now: float) -> float:
        """Close orphans past their time, and free closed ones that no ledger names any more.

        An adopter first writes its ledger and then checks the generation, and here the generation is raised first
        and the ledgers are read in a later round: so either it sees the new generation or we see its entry."""
        self._free_returned()
        if not self.closing and (first := self._first_due(now)) > now:
            return min(first, now + self.orphan_s)
        self.harvest_all()
        held = self.held_shares()
        self._free_returned()  # also what was held no more at that look
        due = [slot for slot in self.orphans.values() if slot.adopt_until <= now and not slot.forwards]
        closing, self.closing = self.closing, []
        for slot in closing:
            if (slot.number, slot.generation) in held:
                self.closing.append(slot)
            else:
                self.counters["orphans_dropped"] += 1
                self._recycle(slot)
        for slot in due:
            if (slot.number, slot.generation) in held:
                slot.adopt_until = now + (SETTLED_S if slot.settled else self.orphan_s)
                continue
            del self.orphans[slot.number], self.slots[slot.number]
            self._raise(slot)
            self.closing.append(slot)
        self.pump()
        return min(now + (_RECHECK_S if self.closing else self.orphan_s), self._first_due(now))

    def _first_due(self, now: float) -> float:
        """When the first orphan is to be looked at; those forwarded in requests that go on wait for their settling, and
        an only reader says nothing when it is done."""
        return min(
            (
                min(slot.adopt_until, now + SETTLED_S) if self._sole(slot) else slot.adopt_until
                for slot in self.orphans.values()
                if not slot.forwards
            ),
            default=float("inf"),
        )

    def check_integrity(self) -> list[str]:
        """Violated invariants, empty when sound."""
        faults: list[str] = []
        used = sum(slot.size for slot in (*self.slots.values(), *self.closing))
        if used + self.free_bytes() != self.capacity():
            faults.append(f"{used} bytes used, {self.free_bytes()} free, {self.capacity()} in all")
        spans = sorted((slot.number * BLOCK, slot.size) for slot in (*self.slots.values(), *self.closing))
        if any(a + size > b for (a, size), (b, _) in itertools.pairwise(spans)):
            faults.append("two slots overlap")
        for account in self.accounts.values():
            faults += [f"session {account.session}: {fault}" for fault in account.check_integrity()]
        owned = sum(len(account.owned) for account in self.accounts.values())
        if owned + len(self.orphans) != len(self.slots):
            faults.append(f"{len(self.slots)} slots, {owned} owned, {len(self.orphans)} orphans")
        for slot in self.slots.values():
            before = self._table[slot.number * ROW]
            self._shares(slot)
            after = self._table[slot.number * ROW]  # its owner goes on meanwhile, and may be between two steps
            least = before - 1 if slot.owner else before
            if (slot.generation - least) & U32 > (after - least) & U32:
                faults.append(f"slot {slot.number} has the wrong generation")
        return faults
