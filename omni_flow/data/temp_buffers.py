"""TempBuffers in a role process without any calls: magazines of slots to compute into, over the reader's half.

`TempBuffers` knows no socket: it says when it has no slot left, or when the server should look into the ledger.
`TempClient` and `AsyncTempClient` do the asking.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Final

from omni_flow.data.arguments import whole
from omni_flow.data.errors import Refused, StaleDescriptor
from omni_flow.data.ledger import (
    BACK_AT,
    BLOCK,
    CELLS,
    LEASED,
    MAX_FANOUT,
    OWNED,
    PUBLISHED,
    RENEWED,
    ROW,
    SOLE_AT,
    TAKEN_MARK,
    TEMP_ARENA,
    U32,
)
from omni_flow.data.temp_arrays import TempBuffer
from omni_flow.data.temp_shares import Maps, TempShares
from omni_flow.refs import TensorRef

BATCH: Final = 64
_MAGAZINE_BYTES: Final = 8 << 20
_MAGAZINE_LEAST: Final = 4
_DIRECT: Final = 64
_DIRECT_PART: Final = 8
"""So many slots, and such a part of the pool, may be out to only readers who give them back directly: until this client
looks, nobody else can have them."""
_NOWHERE: Final = -1
"""The slot of a buffer that has been discarded."""

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


class TempBuffers(TempShares):
    """Magazines and ledger of one client; no calls.

    Slots may be taken and put back from any thread; of shares see `TempShares`. `bell` is also called when a size runs
    low. `direct`: only readers give slots back without the server; for clients that answer at once when the server asks
    for what lies unused.
    """

    def __init__(self, maps: Maps, node: str, bell: Callable[[], None] | None = None, *, direct: bool = False) -> None:
        super().__init__(maps, bell)
        self.node = node
        self.writer_address = 0 if maps.writer is None else maps.writer.address
        self._stocks: dict[int, _Stock] = defaultdict(_Stock)
        self._direct_most = _DIRECT if direct else 0
        self._direct_bytes = self._size // _DIRECT_PART
        self._direct: dict[tuple[int, int], int] = {}
        """(Slot, generation) → size of what is out to an only reader; whoever takes one out may renew it, or give it
        up. The slot may be this client's again before all that it noted of an earlier generation is gone."""

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
        if cells[at] == LEASED and cells[at + 2] == slot and cells[at + 3] == buffer.generation and not self.dead:
            self._stocks[_order(buffer.size)].magazine.append((buffer.entry, slot, buffer.generation, buffer.size))

    def die(self) -> None:
        """The server is gone and all this with it: nothing more is computed into its memory, nor told to another."""
        self.dead = True
        self._stocks.clear()

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


def _order(nbytes: int) -> int:
    """Class of a size: smallest k with 4 KiB · 2^k ≥ nbytes."""
    return max(0, (nbytes - 1).bit_length() - 12)
