"""The reader's half of a client's TempBuffers: shares of what others published, and what it gives on of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from omni_flow.data.arena import Arena
from omni_flow.data.arguments import whole
from omni_flow.data.errors import PoolFull, Refused, StaleDescriptor
from omni_flow.data.ledger import (
    BACK_AT,
    BLOCK,
    CELLS,
    FORWARDS,
    FORWARDS_AT,
    HELD,
    HELD_ENTRIES,
    MADE,
    MAX_FANOUT,
    NONE,
    ORDERED,
    OWNED,
    RELEASED,
    ROW,
    SOLE,
    SOLE_AT,
    TAKEN,
    TAKEN_MARK,
    TOP,
    U32,
)
from omni_flow.data.temp_arrays import Share
from omni_flow.refs import TensorRef

RING: Final = 64
_RING_PART: Final = 4
"""So many shares, or such a part of the pool, come back before the server is told unasked: waking it costs a hop on few
cores 40 µs and more. Whoever runs low of slots, or waits for room, makes it look earlier, and at all ledgers."""
_HELD_BASE: Final = OWNED * CELLS
_HELD_END: Final = FORWARDS_AT * CELLS


class Maps(NamedTuple):
    """The four mappings the pool needs; in a read-only session `writer` is None and `slots` can't be written either."""

    writer: Arena | None
    reader: Arena
    slots: Arena
    ledger: Arena

    def populate(self) -> None:
        """Fault the mappings of the buffers in."""
        for arena in (self.writer, self.reader):
            if arena is not None:
                arena.populate()


class TempShares:
    """Shares that one client holds, in its ledger; no calls.

    Shares may be released from any thread: each list is changed by one atomic step at a time. `adopt` and `forward`
    belong to one thread. `bell`, if set, is called when enough has been released to tell the server; in any thread,
    also by a finalizer.
    """

    def __init__(self, maps: Maps, bell: Callable[[], None] | None) -> None:
        """Raises Refused: the machine does not keep the order of stores that the ledger needs."""
        if not ORDERED:
            raise Refused("TempBuffers need the order of stores of x86-64", "send arrays by other means")
        self.maps = maps
        self.reader_address = maps.reader.address
        self.bell = bell
        self._cells = maps.ledger.view(0, maps.ledger.size).cast("I")
        self._table = maps.slots.view(0, maps.slots.size // (4 * ROW) * 4 * ROW).cast("I")
        self._blocks = len(self._table) // ROW
        self._size = maps.reader.size
        self._ring_bytes = self._size // _RING_PART
        self._free_held = list(range(_HELD_END - CELLS, _HELD_BASE - 1, -CELLS))
        self._given: deque[int] = deque()
        self._given_last = _HELD_BASE
        self._forwards = 0
        self._booked: list[None] = []
        self.pending = 0
        self.pending_bytes = 0
        self.low = False
        self.dead = False

    def adopt(self, ref: TensorRef, shares: int = 1) -> Share:
        """Take a share of a published buffer of this node.

        Raises:
            StaleDescriptor: the slot is no longer the one described, or its only share has been taken.
            BadArgument: no number of shares.
            PoolFull: the ledger has no room for one more share until some are released and the server has looked.
        """
        offset, generation = ref.offset, ref.generation
        slot, inside = divmod(offset, BLOCK)
        if type(shares) is not int or not 1 <= shares <= MAX_FANOUT:
            shares = whole("shares", shares, 1, MAX_FANOUT)
        if inside or not 0 <= slot < self._blocks or offset + ref.nbytes > self._size or not 0 <= generation <= U32:
            raise StaleDescriptor(f"{ref.nbytes} bytes at {offset} lie outside the arena", "is it of this node?")
        cells, given = self._cells, self._given
        at = given.popleft() if given and cells[given[0]] == NONE else self._held_entry()
        cells[at + 1] = shares
        cells[at + 2] = slot
        cells[at + 3] = generation
        table, row = self._table, slot * ROW
        sole = table[row + SOLE_AT]
        direct = sole == generation and shares == 1 and self.maps.writer is not None
        cells[at] = SOLE if direct else HELD
        now = table[row]
        if now != generation or sole == generation ^ TAKEN_MARK:
            cells[at] = NONE
            self._free_held.append(at)
            if now == generation:
                raise StaleDescriptor(f"the only share of slot {slot} has been adopted before", "adopt once per use")
            raise StaleDescriptor(
                f"slot {slot} has generation {now}, the descriptor {generation}",
                "its producer or the server has taken it back",
            )
        if direct:
            table[row + SOLE_AT] = generation ^ TAKEN_MARK
        return Share(self, at, ref)

    def _held_entry(self) -> int:
        """A free held entry, where the server has not seen yet what was given back; that is reused first, so that few
        are ever used.

        Raises:
            PoolFull: as many shares are held as the ledger has entries.
        """
        cells = self._cells
        while self._free_held:
            at = self._free_held.pop()
            if cells[at] != NONE:  # it was found free by itself while another thread gave it back
                continue
            used = (at - _HELD_BASE) // CELLS + 1
            if used > cells[TOP]:
                cells[TOP] = used
            return at
        return self._find_entry()

    def _find_entry(self) -> int:
        entries = np.frombuffer(self._cells, np.uint32).reshape(-1, CELLS)[OWNED:FORWARDS_AT]
        free = (np.flatnonzero(entries[:, 0] == NONE) * CELLS + _HELD_BASE).tolist()
        self._given.clear()  # of these, what the server has seen is among the free ones
        if not free:
            held = entries[entries[:, 0] != RELEASED]
            raise PoolFull(
                f"this process holds {len(held)} shares of {len(np.unique(held[:, 2]))} buffers and has just released "
                f"{HELD_ENTRIES - len(held)}, of {HELD_ENTRIES} shares that one client may have",
                "release some, or forget the arrays over them; then flush",
            )
        self._free_held = free
        return self._free_held.pop()

    def give(self, at: int, ref: TensorRef) -> None:
        """Mark a share as released; any thread."""
        if self.dead:
            return
        cells = self._cells
        if cells[at] == SOLE:
            self._table[ref.offset // BLOCK * ROW + BACK_AT] = ref.generation
            cells[at] = NONE
            self._free_held.append(at)
            return
        if cells[self._given_last] != RELEASED:  # the server has looked since
            self.pending = self.pending_bytes = 0
        self._given_last = at
        self._given.append(at)
        cells[at] = RELEASED
        self.pending += 1
        self.pending_bytes += ref.nbytes
        if (self.pending >= RING or self.pending_bytes >= self._ring_bytes) and self.bell is not None:
            self.bell()

    @property
    def should_ring(self) -> bool:
        """Whether enough has come back to tell the server."""
        return self.pending >= RING or self.pending_bytes >= self._ring_bytes

    def rung(self) -> None:
        """The server looks into the ledger now."""
        self.pending = self.pending_bytes = 0
        self.low = False

    @property
    def _unseen_forwards(self) -> int:
        """Forwards made that the server has not taken in, and those that room is kept for."""
        return ((self._forwards - self._cells[TAKEN]) & U32) + len(self._booked)

    @property
    def may_forward(self) -> bool:
        """Whether the ledger has room for one more forward; the server makes some when it looks into it."""
        return self._unseen_forwards < FORWARDS

    def book_forward(self) -> bool:
        """Keep room for one forward, until `unbook_forward`; False where there is none. Rings while there still is."""
        unseen = self._unseen_forwards
        if unseen >= FORWARDS // 2 and self.bell is not None:
            self.bell()
        if unseen >= FORWARDS:
            return False
        self._booked.append(None)
        return True

    def unbook_forward(self) -> None:
        """The room is needed no longer, or now; any thread."""
        self._booked.pop()

    def holds(self, share: Share) -> bool:
        """Whether a share is held through this ledger, of a slot that still is the one described."""
        return share.owner is self and self.generation_of(share.ref.offset // BLOCK) == share.ref.generation

    def forward(self, share: Share, consumers: int = 1) -> None:
        """Give further shares of a held buffer to `consumers` readers: no copy, no slot. They adopt the descriptor of
        the share, or the same with another type and shape; where a read-only session forwards, once the server has
        looked into its ledger (`TempClient.forward` sees to that).

        Raises:
            StaleDescriptor: the share has been released, or the slot is no longer the one described.
            PoolFull: see `may_forward`.
        """
        if type(consumers) is not int or not 1 <= consumers <= MAX_FANOUT:
            consumers = whole("consumers", consumers, 1, MAX_FANOUT)
        if not self.holds(share):
            raise StaleDescriptor(f"slot at {share.ref.offset} is not held by this client", "publish a copy")
        if not self.may_forward:
            raise PoolFull(f"{FORWARDS} forwards that the server has not seen", "flush")
        cells, ref = self._cells, share.ref
        if cells[share.entry] == SOLE:  # it is no longer the only one, and the server has to count
            cells[share.entry] = HELD
            self._table[ref.offset // BLOCK * ROW + SOLE_AT] = (ref.generation - 1) & U32
        at = (FORWARDS_AT + self._forwards % FORWARDS) * CELLS
        cells[at] = share.entry // CELLS
        cells[at + 1] = consumers
        cells[at + 2] = ref.offset // BLOCK
        cells[at + 3] = ref.generation
        cells[MADE] = self._forwards = (self._forwards + 1) & U32

    def generation_of(self, slot: int) -> int:
        return self._table[slot * ROW]
