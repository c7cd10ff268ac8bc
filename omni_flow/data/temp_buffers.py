"""TempBuffers in a role process without any calls: magazines, and the client's half of the ledger.

`TempBuffers` knows no socket: it says when it has no slot left, or when the server should look into the ledger.
`TempClient` and `AsyncTempClient` do the asking.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
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
    LEASED,
    MADE,
    MAX_FANOUT,
    NONE,
    OWNED,
    PUBLISHED,
    RELEASED,
    RENEWED,
    ROW,
    SOLE,
    SOLE_AT,
    TAKEN,
    TAKEN_MARK,
    TEMP_ARENA,
    TOP,
    U32,
)
from omni_flow.data.temp_arrays import Share, TempBuffer
from omni_flow.refs import TensorRef

BATCH: Final = 64
_RING_PART: Final = 4
"""So many shares, or such a part of the pool, come back before the server is told unasked: waking it costs a hop on few
cores 40 µs and more. Whoever runs low of slots, or waits for room, makes it look earlier, and at all ledgers."""
_MAGAZINE_BYTES: Final = 8 << 20
_MAGAZINE_LEAST: Final = 4
_DIRECT: Final = 64
_DIRECT_PART: Final = 8
"""So many slots, and such a part of the pool, may be out to only readers who give them back directly: until this client
looks, nobody else can have them."""
_NOWHERE: Final = -1
"""The slot of a buffer that has been discarded."""
_HELD_BASE: Final = OWNED * CELLS
_HELD_END: Final = FORWARDS_AT * CELLS

_Slot = tuple[int, int, int, int]
"""Entry, slot, generation, size."""


class _Stock:
    """The slots of one size: those that lie ready, the warmest last, and those that are out, the latest last.

    `used`: asked for since the last drain.
    """

    __slots__ = ("magazine", "published", "used")

    def __init__(self) -> None:
        self.magazine: list[_Slot] = []
        self.published: deque[_Slot] = deque()
        self.used = False


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


class TempBuffers:
    """Magazines and ledger of one client; no calls.

    Slots may be taken and put back, and shares released, from any thread: each list is changed by one atomic step at a
    time. `adopt` and `forward` belong to one thread. `bell`, if set, is called when enough has been released to tell
    the server; in any thread, also by a finalizer. `direct`: only readers give slots back without the server; for
    clients that answer at once when the server asks for what lies unused.
    """

    def __init__(self, maps: Maps, node: str, bell: Callable[[], None] | None = None, *, direct: bool = False) -> None:
        self.maps = maps
        self.node = node
        self.reader_address = maps.reader.address
        self.writer_address = 0 if maps.writer is None else maps.writer.address
        self.bell = bell
        self._cells = maps.ledger.view(0, maps.ledger.size).cast("I")
        self._table = maps.slots.view(0, maps.slots.size // (4 * ROW) * 4 * ROW).cast("I")
        self._blocks = len(self._table) // ROW
        self._size = maps.reader.size
        self._ring_bytes = self._size // _RING_PART
        self._stocks: dict[int, _Stock] = defaultdict(_Stock)
        self._free_held = list(range(_HELD_END - CELLS, _HELD_BASE - 1, -CELLS))
        self._given: deque[int] = deque()
        self._given_last = _HELD_BASE
        self._forwards = 0
        self._direct_most = _DIRECT if direct else 0
        self._direct_bytes = self._size // _DIRECT_PART
        self._direct: dict[tuple[int, int], int] = {}
        """(Slot, generation) → size of what is out to an only reader; whoever takes one out may renew it, or give it
        up. The slot may be this client's again before all that it noted of an earlier generation is gone."""
        self._booked: list[None] = []
        self.pending = 0
        self.pending_bytes = 0
        self.low = False
        self.dead = False

    # -- slots of one's own -------------------------------------------------------------------------------------

    @staticmethod
    def magazine(nbytes: int) -> tuple[int, int]:
        """Class of a request and how many slots of it to lease at once."""
        order = _order(nbytes)
        return order, max(_MAGAZINE_LEAST, min(BATCH, _MAGAZINE_BYTES >> (order + 12)))

    def pop(self, nbytes: int) -> TempBuffer | None:
        """A slot from the magazine, None when it must be filled first. The one used last comes first."""
        arena = self.maps.writer
        if arena is None:
            raise Refused("a read-only session makes no buffers", "connect without read_only")
        if type(nbytes) is not int or nbytes < 1:
            nbytes = whole("nbytes", nbytes, 1)
        stock = self._stocks[_order(nbytes)]
        stock.used = True
        magazine, published = stock.magazine, stock.published
        try:
            entry, slot, generation, _ = published[-1]
            if self._cells[entry * CELLS] != PUBLISHED or self._table[slot * ROW + BACK_AT] == generation:
                self._collect(stock, 1)  # what went out last is the warmest
        except IndexError:
            pass  # nothing is out
        while magazine or self._collect(stock, BATCH):
            try:
                entry, slot, generation, size = magazine.pop()
            except IndexError:  # another thread has taken it
                continue
            if size >= nbytes:
                if not magazine and published and not self._collect(stock, BATCH):
                    self._run_low()
                return TempBuffer(arena, entry, slot, generation, size, nbytes)
            magazine.append((entry, slot, generation, size))
            break
        return None

    def _run_low(self) -> None:
        """The last slot of a size has been taken: the server is to look who has released others, before the next."""
        self.low = True
        if self.bell is not None:
            self.bell()

    def _collect(self, stock: _Stock, most: int) -> bool:
        """Look at the slots published last, `most` of them: what its reader has given back or the server has leased
        anew goes into the magazine, the warmest last, and what is still out is looked at last the next time. Returns
        whether anything was leased anew.
        """
        cells, table, published = self._cells, self._table, stock.published
        found: list[_Slot] = []
        for _ in range(min(len(published), most)):
            try:
                one = published.pop()
            except IndexError:
                break
            entry, slot, generation, size = one
            at = entry * CELLS
            state, now, following = cells[at], cells[at + 3], (generation + 1) & U32
            if cells[at + 2] != slot:
                self._direct.pop((slot, generation), None)
            elif state == RENEWED and now == following:
                self._direct.pop((slot, generation), None)
                cells[at] = LEASED
                found.append((entry, slot, now, size))
            elif state == PUBLISHED and now in (generation, following):
                if now == following or table[slot * ROW + BACK_AT] != generation:
                    published.appendleft(one)  # or the server is between the two steps of leasing it anew
                elif self._direct.pop((slot, generation), None) is not None:
                    cells[at] = LEASED
                    table[slot * ROW] = following
                    cells[at + 3] = following
                    found.append((entry, slot, following, size))
            else:
                self._direct.pop((slot, generation), None)
        stock.magazine += reversed(found)
        return bool(found)

    def fill(self, order: int, size: int, entries: Sequence[tuple[int, int, int]]) -> None:
        """Put leased slots of one size into the magazine."""
        self._stocks[order].magazine += [(*entry, size) for entry in entries]

    def discard(self, buffer: TempBuffer) -> None:
        """Put an unpublished buffer back into the magazine; it can't be published any more. One that has been published
        or discarded stays what it is."""
        cells, at, slot = self._cells, buffer.entry * CELLS, buffer.slot
        buffer.slot = _NOWHERE
        if cells[at] == LEASED and cells[at + 2] == slot and cells[at + 3] == buffer.generation:
            self._stocks[_order(buffer.size)].magazine.append((buffer.entry, slot, buffer.generation, buffer.size))

    def drain(self, idle: bool = False) -> list[int]:
        """Empty the magazines; the entries are to be returned to the server.

        Args:
            idle: only those of sizes that have not been asked for since the last drain.
        """
        entries = []
        for stock in list(self._stocks.values()):
            used, stock.used = stock.used, False
            if idle and used:
                continue
            self._collect(stock, OWNED)
            while stock.magazine:
                try:
                    entries.append(stock.magazine.pop()[0])
                except IndexError:
                    break
        return entries

    def publish(self, buffer: TempBuffer, dtype: str, shape: tuple[int, ...], consumers: int = 1) -> TensorRef:
        """Hand a buffer over to `consumers` readers; its content must not change from now on.

        Returns:
            the descriptor to send them, by any channel; at most 128 bytes encoded.
        """
        self.hand_over(buffer, consumers)
        return self.describe(buffer, dtype, shape)

    def describe(self, buffer: TempBuffer, dtype: str, shape: tuple[int, ...]) -> TensorRef:
        """The descriptor of a buffer: what `publish` returns."""
        return TensorRef(self.node, TEMP_ARENA, buffer.offset, buffer.nbytes, buffer.generation, dtype, shape)

    def hand_over(self, buffer: TempBuffer, consumers: int) -> None:
        """The ledger's part of `publish`."""
        if type(consumers) is not int or not 1 <= consumers <= MAX_FANOUT:
            consumers = whole("consumers", consumers, 1, MAX_FANOUT)
        cells = self._cells
        at = buffer.entry * CELLS
        if cells[at] != LEASED or cells[at + 2] != buffer.slot or cells[at + 3] != buffer.generation:
            raise StaleDescriptor(f"slot {buffer.slot} is not leased by this client", "publish a buffer once")
        cells[at + 1] = consumers
        slot, generation, direct = buffer.slot, buffer.generation, self._direct
        if (
            consumers == 1
            and len(direct) < self._direct_most
            and sum(direct.values()) + buffer.size <= self._direct_bytes
        ):
            direct[slot, generation] = buffer.size
            self._table[slot * ROW + SOLE_AT] = generation
        cells[at] = PUBLISHED
        self._stocks[_order(buffer.size)].published.append((buffer.entry, slot, generation, buffer.size))

    def give_up(self, refs: Sequence[TensorRef]) -> list[TensorRef]:
        """Of own buffers that nobody adopts from now on, those that the server must see to: the others are free, or are
        when they are wanted."""
        table, left = self._table, []
        for ref in refs:
            slot, generation = ref.offset // BLOCK, ref.generation
            at = slot * ROW
            if table[at] != generation or table[at + BACK_AT] == generation:
                continue
            sole = table[at + SOLE_AT] in (generation, generation ^ TAKEN_MARK)
            if sole and self._direct.pop((slot, generation), None) is None:
                continue  # another thread has just found it given back
            left.append(ref)
        return left

    # -- shares -------------------------------------------------------------------------------------------------

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
        if not self._free_held:
            return self._find_entry()
        at = self._free_held.pop()
        used = (at - _HELD_BASE) // CELLS + 1
        if used > cells[TOP]:
            cells[TOP] = used
        return at

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
        if (self.pending >= BATCH or self.pending_bytes >= self._ring_bytes) and self.bell is not None:
            self.bell()

    @property
    def should_ring(self) -> bool:
        """Whether enough has come back to tell the server."""
        return self.pending >= BATCH or self.pending_bytes >= self._ring_bytes

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


def _order(nbytes: int) -> int:
    """Class of a size: smallest k with 4 KiB · 2^k ≥ nbytes."""
    return max(0, (nbytes - 1).bit_length() - 12)
