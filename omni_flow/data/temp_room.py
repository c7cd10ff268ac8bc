"""What the TempBuffer pool consists of: its areas, slots and clients; how slots are taken, freed and leased anew.

Every way out of a slot raises its generation: descriptors of the one before are stale."""

from __future__ import annotations

from collections.abc import Callable

from omni_flow.data.buddy import MIN_BLOCK, Buddy, Extents
from omni_flow.data.errors import Holder, NeverFits, PoolFull
from omni_flow.data.ledger import BLOCK, LEASED, NONE, OWNED, ROW, U32
from omni_flow.data.temp_account import Slot, TempAccount
from omni_flow.data.waits import WaitQueue

Leased = list[tuple[int, int, int]]


class TempRoom:
    """See the module.

    Args:
        size: bytes of the block area.
        large: bytes of the area behind it for what is larger than the largest block.
        client_bytes: bound for one client; 0: none.
        orphan_s: patience with unadopted shares of a dead producer.
        table: the shared table of slots, `ROW` cells per 4 KiB of the arena.

    `pressure()` is called when there is no room, for all clients to give back what they don't use.
    """

    def __init__(self, size: int, large: int, client_bytes: int, orphan_s: float, table: memoryview) -> None:
        self.blocks = Buddy(size)
        self.extents = Extents(self.blocks.size, large)
        self.client_bytes = client_bytes
        self.orphan_s = orphan_s
        self._table = table
        self.slots: dict[int, Slot] = {}
        self.accounts: dict[int, TempAccount] = {}
        self.waits = WaitQueue()
        self.orphans: dict[int, Slot] = {}
        self.closing: list[Slot] = []
        self._bounded: list[TempAccount] = []
        self.pressure: Callable[[], None] = lambda: None
        self._press_again = 0.0
        self.counters: dict[str, int] = dict.fromkeys(
            (
                "leased",
                "freed",
                "harvests",
                "waits",
                "orphaned",
                "orphans_dropped",
                "renewed",
                "forwarded",
                "bad_releases",
                "bad_forwards",
                "retracted",
                "settled",
            ),
            0,
        )

    def open(self, session: int, pid: int, name: str) -> TempAccount:
        account = TempAccount(session, pid, name)
        self.accounts[session] = account
        return account

    def _own_waits(self) -> list[WaitQueue]:
        """Of those who have reached their own bound."""
        if self._bounded:
            self._bounded = [account for account in dict.fromkeys(self._bounded) if account.own_wait]
        return [account.own_wait for account in self._bounded]

    def capacity(self) -> int:
        return self.blocks.size + self.extents.size

    def free_bytes(self) -> int:
        return self.blocks.free_bytes + self.extents.free_bytes

    def held_shares(self) -> dict[tuple[int, int], int]:
        """(slot, generation) → shares in the ledgers of living clients."""
        found: dict[tuple[int, int], int] = {}
        for account in self.accounts.values():
            held = account.held()
            for _, shares, number, generation in held[held[:, 0] != NONE].tolist():
                found[number, generation] = found.get((number, generation), 0) + shares
        return found

    def size_of(self, nbytes: int) -> tuple[int, int]:
        """Size and class of the slot for a request; class -1 is the large area.

        Raises:
            NeverFits: larger than any slot there can be.
        """
        if nbytes <= self.blocks.largest:
            order = Buddy.order_of(nbytes)
            return MIN_BLOCK << order, order
        size = (nbytes + MIN_BLOCK - 1) // MIN_BLOCK * MIN_BLOCK
        if size > self.extents.size:
            raise NeverFits(
                f"a buffer of {nbytes} bytes: the largest block is {self.blocks.largest}, the large area "
                f"{self.extents.size}",
                "raise temp_bytes or temp_large_bytes",
            )
        return size, -1

    # -- slots --------------------------------------------------------------------------------------------------

    def _enough(self, size: int) -> bool:
        return self.free_bytes() - size >= self.capacity() // 16

    def _take(self, account: TempAccount, size: int, order: int, count: int) -> Leased:
        got: Leased = []
        ledger = account.ledger
        assert ledger is not None
        if self.client_bytes:
            count = min(count, (self.client_bytes - account.bytes) // size)
        for _ in range(min(count, len(account.free_entries))):
            at = self.extents.take(size) if order < 0 else self.blocks.take(order)
            if at is None:
                break
            number = at // BLOCK
            entry = account.free_entries.pop()
            slot = Slot(number, size, order, account.session, entry, self._table[number * ROW])
            self.slots[number] = account.owned[entry] = slot
            ledger[entry] = (LEASED, 0, number, slot.generation)
            account.bytes += size
            got.append((entry, number, slot.generation))
        self.counters["leased"] += len(got)
        return got

    def _full(self, account: TempAccount, size: int, within: bool) -> PoolFull:
        rows = sorted(self.accounts.values(), key=lambda a: -a.bytes)[:8]
        holders = tuple(Holder(a.session, a.pid, a.name, a.bytes, a.shares()) for a in rows if a.bytes)
        if not within:
            return PoolFull(
                f"session {account.session} holds {account.bytes} bytes of TempBuffers in {len(account.owned)} slots, "
                f"the bound is {self.client_bytes} bytes and {OWNED} slots",
                "consumers must release first",
                holders,
            )
        orphaned = sum(slot.size for slot in self.orphans.values())
        return PoolFull(
            f"no slot of {size} bytes: {self.free_bytes()} of {self.capacity()} bytes are free, the largest piece is "
            f"{max(self.blocks.largest_free(), self.extents.largest_free())}, {orphaned} bytes "
            "have no producer any more",
            "wait longer, or let the holders release",
            holders,
        )

    def _free(self, slot: Slot) -> None:
        """The slot is free, its descriptors are stale."""
        del self.slots[slot.number]
        self.orphans.pop(slot.number, None)
        self._raise(slot)
        owner = self.accounts.get(slot.owner)
        if owner is not None:
            owner.disown(slot)
        self._recycle(slot)

    def _raise(self, slot: Slot) -> int:
        """The next generation of a slot: descriptors of the present one are stale. Its owner may have been further than
        we saw."""
        at = slot.number * ROW
        generation = self._table[at] = (self._table[at] + 1) & U32
        return generation

    def _renew(self, slot: Slot) -> bool:
        """All shares are back: lease the slot to its owner anew, if it may keep it. It is what the owner will most
        likely need next, and still in its caches; so a client that goes on as before asks for nothing.

        A client keeps an eighth of the pool at most, and nothing while somebody waits, little is free, or its own bound
        is near.
        """
        owner = self.accounts.get(slot.owner)
        if owner is None or self.waits or owner.own_wait or self.free_bytes() < self.capacity() // 4:
            return False
        if self.client_bytes and 2 * owner.bytes > self.client_bytes:
            return False
        if not owner.has_room_to_keep(slot.size, self.capacity() // 8):
            return False
        slot.begin(self._raise(slot))
        owner.keep(slot)
        self.counters["renewed"] += 1
        return True

    def _recycle(self, slot: Slot) -> None:
        if slot.order < 0:
            self.extents.give(slot.number * BLOCK, slot.size)
        else:
            self.blocks.give(slot.number * BLOCK, slot.order)
        self.counters["freed"] += 1
