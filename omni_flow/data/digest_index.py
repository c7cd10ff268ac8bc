"""32-byte key → row number, open addressing in numpy columns, without tombstones.

The table is an array of buckets of eight lanes. A key lives in the first bucket from its home onwards that had a free
lane; each bucket counts the keys that had to pass it (the overflow counts of F14), so a search stops at the first
bucket nobody passed and a deletion takes its counts back: the table never needs to be rebuilt. The keys themselves
are a column of the page table, the index holds a 32-bit tag and the row. 20 bytes a key at half load.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

U32 = NDArray[np.uint32]
Keys = NDArray[np.uint8]

_LANES = 8
_NONE = 0xFFFFFFFF


class DigestIndex:
    """Maps keys to rows; `keys` is the (rows, 32) column the rows refer to, owned and filled by the caller.

    Args:
        keys: column of keys by row.
        seed: any odd-able number; moves the buckets so that nobody can aim at one.
    """

    def __init__(self, keys: Keys, seed: int = 0x9E3779B97F4A7C15) -> None:
        capacity = len(keys)
        buckets = 1
        while buckets * _LANES < 2 * capacity:
            buckets *= 2
        self._keys = keys
        self._words = keys.view(np.uint64)
        self._mask = np.uint64(buckets - 1)
        self._mul = np.uint64((seed | 1) & 0xFFFFFFFFFFFFFFFF)
        self._int_mul = int(self._mul)
        self._tags = np.zeros((buckets, _LANES), np.uint32)
        self._rows = np.full((buckets, _LANES), _NONE, np.uint32)
        self._passed = np.zeros(buckets, np.uint16)
        self._claim = np.zeros(buckets, np.uint32)
        self._lane_bits = (1 << np.arange(_LANES)).astype(np.uint8)
        self._count = 0
        self._tag_view = self._tags.data.cast("B").cast("I")
        self._row_view = self._rows.data.cast("B").cast("I")
        self._passed_view = self._passed.data
        self._key_view = keys.data.cast("B")

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        return self._tags.nbytes + self._rows.nbytes + self._passed.nbytes + self._claim.nbytes

    def find_one(self, key: bytes) -> int:
        """Row of one key, -1 if it is not there. For very small batches: no numpy call."""
        mixed = (int.from_bytes(key[:8], "little") * self._int_mul) & 0xFFFFFFFFFFFFFFFF
        mixed ^= mixed >> 32
        mask = int(self._mask)
        bucket = mixed & mask
        tag = int.from_bytes(key[8:12], "little")
        tags, rows = self._tag_view, self._row_view
        while True:
            base = bucket * _LANES
            for at in range(base, base + _LANES):
                if tags[at] == tag:
                    row = rows[at]
                    if row != _NONE and self._key_view[row * 32 : row * 32 + 32] == key:
                        return row
            if not self._passed_view[bucket]:
                return -1
            bucket = (bucket + 1) & mask

    def _home(self, words: NDArray[np.uint64]) -> NDArray[np.int64]:
        mixed = words[:, 0] * self._mul
        mixed ^= mixed >> np.uint64(32)
        return (mixed & self._mask).astype(np.int64)

    def find(self, keys: Keys) -> NDArray[np.int64]:
        """Rows of the keys, -1 where a key is not there. Duplicates are allowed."""
        found, _ = self._locate(keys)
        return found

    def _locate(self, keys: Keys) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows and flat lanes (bucket * 8 + lane) of the keys, -1 where missing."""
        n = len(keys)
        found = np.full(n, -1, np.int64)
        place = np.full(n, -1, np.int64)
        words = np.ascontiguousarray(keys).view(np.uint64)
        tags = np.ascontiguousarray(keys).view(np.uint32)[:, 2]
        bucket = self._home(words)
        live = np.arange(n)
        while len(live):
            match = (self._tags[bucket] == tags[live, None]) & (self._rows[bucket] != _NONE)
            which, lane = np.nonzero(match)
            if len(which):
                rows = self._rows[bucket[which], lane]
                same = (self._words[rows] == words[live[which]]).all(axis=1)
                which, lane, rows = which[same], lane[same], rows[same]
                found[live[which]] = rows
                place[live[which]] = bucket[which] * _LANES + lane
            going = (found[live] < 0) & (self._passed[bucket] > 0)
            live = live[going]
            bucket = (bucket[going] + 1) & int(self._mask)
        return found, place

    def insert(self, rows: U32) -> None:
        """Enter rows whose keys stand in the key column. The keys must be distinct and not be there yet."""
        words = self._words[rows]
        tags = self._keys.view(np.uint32)[rows, 2]
        bucket = self._home(words)
        live = np.arange(len(rows))
        while len(live):
            self._claim[bucket] = live.astype(np.uint32)
            won = self._claim[bucket] == live
            mine = bucket[won]
            who = live[won]
            free = self._rows[mine] == _NONE
            lane = free.argmax(axis=1)
            fits = free[np.arange(len(mine)), lane]
            put = mine[fits]
            self._tags[put, lane[fits]] = tags[who[fits]]
            self._rows[put, lane[fits]] = rows[who[fits]]
            full = mine[~fits]
            self._passed[full] += 1
            stay = ~won
            live = np.concatenate((live[stay], who[~fits]))
            bucket = np.concatenate((bucket[stay], (full + 1) & int(self._mask)))
        self._count += len(rows)

    def delete(self, rows: U32) -> None:
        """Remove rows that are there; their keys still stand in the key column."""
        keys = self._keys[rows]
        found, place = self._locate(keys)
        if (found != rows).any():
            raise ValueError(f"{int((found != rows).sum())} rows are not in the index")
        bucket, lane = place // _LANES, place % _LANES
        self._rows[bucket, lane] = _NONE
        self._tags[bucket, lane] = 0
        home = self._home(np.ascontiguousarray(keys).view(np.uint64))
        far = home != bucket
        home, bucket = home[far], bucket[far]
        while len(home):
            np.subtract.at(self._passed, home, 1)
            home = (home + 1) & int(self._mask)
            going = home != bucket
            home, bucket = home[going], bucket[going]
        self._count -= len(rows)

    def check(self) -> list[str]:
        """Violated invariants; walks the whole table."""
        faults: list[str] = []
        used = self._rows != _NONE
        if int(used.sum()) != self._count:
            faults.append(f"index counts {self._count} keys, holds {int(used.sum())}")
        rows = self._rows[used]
        if len(np.unique(rows)) != len(rows):
            faults.append("index holds a row twice")
        if len(rows) and (self.find(self._keys[rows]) != rows).any():
            faults.append("index holds a row it does not find")
        return faults
