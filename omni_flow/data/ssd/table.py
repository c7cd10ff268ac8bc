"""What the tier knows of its records: numpy columns by row, and the index from key to row. Pure.

55 bytes a record besides the index (`digest_index.py`), whatever the number of segments.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from omni_flow.data.digest_index import DigestIndex
from omni_flow.data.ssd.format import BLOCK, ENTRY, KEY_BYTES, Bytes, Entries, blocks_of

Rows = npt.NDArray[np.int64]
NO_SLOT = 0xFFFF


@dataclass(frozen=True, slots=True)
class Spot:
    """Where records lie, column by column."""

    slot: npt.NDArray[np.uint16]
    block: npt.NDArray[np.uint32]
    length: npt.NDArray[np.uint32]
    checksum: npt.NDArray[np.uint64]

    def __getitem__(self, part: slice | npt.NDArray[np.intp]) -> "Spot":
        return Spot(self.slot[part], self.block[part], self.length[part], self.checksum[part])

    def __len__(self) -> int:
        return len(self.slot)

    def runs(self, run_bytes: int, run_records: int) -> list[slice]:
        """Returns the parts, at least one record each, that lie one behind the other and make one I/O."""
        slots, blocks, lengths = self.slot.tolist(), self.block.tolist(), self.length.tolist()
        out, start, payload = [], 0, 0
        for i in range(1, len(slots) + 1):
            payload += lengths[i - 1]
            if (
                i < len(slots)
                and slots[i] == slots[i - 1]
                and blocks[i] == blocks[i - 1] + blocks_of(lengths[i - 1])
                and payload + lengths[i] <= run_bytes
                and i - start < run_records
            ):
                continue
            out.append(slice(start, i))
            start, payload = i, 0
        return out


class RecordTable:
    """Maps 32-byte keys to records. `slot` is the small number of a segment; `block` the record's header in
    it.

    Args:
        capacity: records at most.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.keys: Bytes = np.zeros((capacity, KEY_BYTES), np.uint8)
        self.slot = np.full(capacity, NO_SLOT, np.uint16)
        self.block = np.zeros(capacity, np.uint32)
        self.length = np.zeros(capacity, np.uint32)
        self.checksum = np.zeros(capacity, np.uint64)
        self.kind = np.zeros(capacity, np.uint16)
        self.hits = np.zeros(capacity, np.uint8)
        self._free = np.arange(capacity - 1, -1, -1, dtype=np.uint32)
        self._room = capacity
        self._index = DigestIndex(self.keys)
        self.payload_bytes = 0

    def __len__(self) -> int:
        return self.capacity - self._room

    @property
    def room(self) -> int:
        """Records that can still be added."""
        return self._room

    def find(self, keys: Bytes) -> Rows:
        """Returns the row of each key, -1 where there is none."""
        return self._index.find(keys)

    def spot(self, rows: Rows) -> Spot:
        """Returns copies of where `rows` lie."""
        return Spot(self.slot[rows], self.block[rows], self.length[rows], self.checksum[rows])

    def add(self, entries: Entries, slot: int | npt.NDArray[np.uint16], kinds: npt.NDArray[np.uint16]) -> Rows:
        """Enters records with distinct keys that are not there; returns their rows. There must be room."""
        n = len(entries)
        rows = self._free[self._room - n : self._room].astype(np.int64)
        self._room -= n
        self.keys[rows] = entries["key"]
        self.slot[rows] = slot
        for name in ("block", "length", "checksum"):
            getattr(self, name)[rows] = entries[name]
        self.kind[rows] = kinds
        self.hits[rows] = 0
        self._index.insert(rows.astype(np.uint32))
        self.payload_bytes += int(entries["length"].sum(dtype=np.int64))
        return rows

    def move(self, rows: Rows, slot: int, block: npt.NDArray[np.uint32]) -> None:
        """Notes that records were appended anew elsewhere; their hits start again."""
        self.slot[rows] = slot
        self.block[rows] = block
        self.hits[rows] = 0

    def drop(self, rows: Rows) -> None:
        """Forgets distinct records."""
        if not len(rows):
            return
        self._index.delete(rows.astype(np.uint32))
        self.payload_bytes -= int(self.length[rows].sum(dtype=np.int64))
        self.slot[rows] = NO_SLOT
        self._free[self._room : self._room + len(rows)] = rows
        self._room += len(rows)

    def hit(self, rows: Rows) -> None:
        """Counts a use, up to 255."""
        self.hits[rows] = np.minimum(self.hits[rows].astype(np.uint16) + 1, 255)

    def rows_in(self, slot: int) -> Rows:
        """Returns the rows of a segment, in the order in which they lie there."""
        rows = np.flatnonzero(self.slot == slot)
        return rows[np.argsort(self.block[rows])]

    def rows_of_kinds(self, kinds: npt.NDArray[np.uint16]) -> Rows:
        """Returns the rows whose kind is one of `kinds`."""
        return np.flatnonzero((self.slot != NO_SLOT) & np.isin(self.kind, kinds))

    def entries(self, rows: Rows) -> Entries:
        """Returns footer entries of `rows`; `kind` is the table's own number."""
        out = np.zeros(len(rows), ENTRY)
        out["key"] = self.keys[rows]
        for name in ("checksum", "block", "length", "kind"):
            out[name] = getattr(self, name)[rows]
        return out

    def nbytes(self) -> int:
        """Returns the bytes of all columns and of the index."""
        columns = (self.keys, self.slot, self.block, self.length, self.checksum, self.kind, self.hits, self._free)
        return sum(int(column.nbytes) for column in columns) + self._index.nbytes

    def check(self) -> list[str]:
        """Returns the violated invariants; walks everything."""
        faults = self._index.check()
        live = np.flatnonzero(self.slot != NO_SLOT)
        if len(live) != len(self) or len(live) != len(self._index):
            faults.append(f"{len(live)} rows in segments, {len(self)} in use, {len(self._index)} in the index")
        if int(self.length[live].sum(dtype=np.int64)) != self.payload_bytes:
            faults.append(f"payload bytes {self.payload_bytes}, rows hold {int(self.length[live].sum(dtype=np.int64))}")
        order = np.lexsort((self.block[live], self.slot[live]))
        slot, start = self.slot[live][order], self.block[live][order].astype(np.int64)
        end = start + 1 + -(-self.length[live][order].astype(np.int64) // BLOCK)
        if np.any((slot[1:] == slot[:-1]) & (start[1:] < end[:-1])):
            faults.append("two records overlap in a segment")
        return faults
