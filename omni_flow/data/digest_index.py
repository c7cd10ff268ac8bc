"""32-byte key → row number, open addressing in numpy columns, without tombstones.

The table is an array of buckets, each a cache line: eight tags, eight row numbers. A tag is 32 bits of the key, odd, so
that 0 is an empty lane. A key lives in the first bucket from its home onwards that had a free
lane; each bucket counts the keys that had to pass it (the overflow counts of F14), so a search stops at the first
bucket nobody passed and a deletion takes its counts back: the table never needs to be rebuilt. The keys themselves
are a column of the page table. 20 bytes a key at half load. Rows of a column are fetched by `take`, which copies whole
rows; indexing by an array takes six times as long for them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

U32 = NDArray[np.uint32]
Keys = NDArray[np.uint8]

SEED = 0x9E3779B97F4A7C15
_LANES = 8


class DigestIndex:
    """Maps keys to rows; `keys` is the (rows, 32) column the rows refer to, owned and filled by the caller.

    Args:
        keys: column of keys by row.
        seed: any odd-able number; moves the buckets so that nobody can aim at one.
    """

    def __init__(self, keys: Keys, seed: int = SEED) -> None:
        capacity = len(keys)
        buckets = 1
        while buckets * _LANES < 2 * capacity:
            buckets *= 2
        self._keys = keys
        self._words = keys.view(np.uint64)
        self._mask = np.uint64(buckets - 1)
        self._mul = np.uint64((seed | 1) & 0xFFFFFFFFFFFFFFFF)
        self._int_mul = int(self._mul)
        self._int_mask = buckets - 1
        raw = np.zeros(buckets * 16 + 16, np.uint32)
        skip = (-raw.ctypes.data % 64) // 4
        self._lanes = raw[skip : skip + buckets * 16].reshape(buckets, 16)
        self._flat = self._lanes.reshape(-1)
        self._tags = self._lanes[:, :_LANES]
        self._rows = self._lanes[:, _LANES:]
        self._passed = np.zeros(buckets, np.uint16)
        self._claim = np.zeros(buckets, np.uint32)
        self._count = 0
        self._lane_view = self._flat.data
        self._passed_view = self._passed.data
        self._key_view = keys.data.cast("B")

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        return self._lanes.nbytes + self._passed.nbytes + self._claim.nbytes

    def find_one(self, key: bytes) -> int:
        """Row of one key, -1 if it is not there. For very small batches: no numpy call."""
        mixed = (int.from_bytes(key[:8], "little") * self._int_mul) & 0xFFFFFFFFFFFFFFFF
        mixed ^= mixed >> 32
        mask = self._int_mask
        bucket = mixed & mask
        tag = int.from_bytes(key[8:12], "little") | 1
        view = self._lane_view
        while True:
            base = bucket * 16
            lanes = view[base : base + _LANES].tolist()
            if tag in lanes:
                for lane, found in enumerate(lanes):
                    if found == tag:
                        row = view[base + _LANES + lane]
                        if self._key_view[row * 32 : row * 32 + 32] == key:
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
        """Rows of the keys, and where in the flat table their row numbers stand; -1 where missing."""
        n = len(keys)
        keys = np.ascontiguousarray(keys)
        words = keys.view(np.uint64)
        tags = keys.view(np.uint32)[:, 2] | np.uint32(1)
        bucket = self._home(words)
        hit = np.flatnonzero(self._lanes.take(bucket, axis=0)[:, :_LANES] == tags[:, None])
        which = hit >> 3
        if len(hit) == n and (which == np.arange(n)).all():
            place = bucket * 16 + (hit & 7) + _LANES
            rows = self._flat[place].astype(np.int64)
            if (self._words.take(rows, axis=0) == words).all():
                return rows, place
        found = np.full(n, -1, np.int64)
        place = np.full(n, -1, np.int64)
        live = np.arange(n)
        while True:
            if len(hit):
                at = bucket[which] * 16 + (hit & 7) + _LANES
                rows = self._flat[at].astype(np.int64)
                same = (self._words.take(rows, axis=0) == words[live[which]]).all(axis=1)
                found[live[which[same]]] = rows[same]
                place[live[which[same]]] = at[same]
            going = (found[live] < 0) & (self._passed[bucket] > 0)
            live = live[going]
            if not len(live):
                return found, place
            bucket = (bucket[going] + 1) & self._int_mask
            hit = np.flatnonzero(self._lanes.take(bucket, axis=0)[:, :_LANES] == tags[live, None])
            which = hit >> 3

    def insert(self, rows: U32) -> None:
        """Enter rows whose keys stand in the key column. The keys must be distinct and not be there yet."""
        words = self._words.take(rows, axis=0)
        tags = self._keys.view(np.uint32)[rows, 2] | np.uint32(1)
        bucket = self._home(words)
        live = np.arange(len(rows))
        while len(live):
            self._claim[bucket] = live.astype(np.uint32)
            won = self._claim[bucket] == live
            mine = bucket[won]
            who = live[won]
            free = self._tags[mine] == 0
            lane = free.argmax(axis=1)
            fits = free[np.arange(len(mine)), lane]
            put = mine[fits]
            self._tags[put, lane[fits]] = tags[who[fits]]
            self._rows[put, lane[fits]] = rows[who[fits]]
            full = mine[~fits]
            self._passed[full] += 1
            stay = ~won
            live = np.concatenate((live[stay], who[~fits]))
            bucket = np.concatenate((bucket[stay], (full + 1) & self._int_mask))
        self._count += len(rows)

    def delete(self, rows: U32) -> None:
        """Remove rows that are there; their keys still stand in the key column."""
        keys = self._keys[rows]
        found, place = self._locate(keys)
        if (found != rows).any():
            raise ValueError(f"{int((found != rows).sum())} rows are not in the index")
        bucket = place >> 4
        self._flat[place - _LANES] = 0
        home = self._home(np.ascontiguousarray(keys).view(np.uint64))
        far = home != bucket
        home, bucket = home[far], bucket[far]
        while len(home):
            np.subtract.at(self._passed, home, 1)
            home = (home + 1) & self._int_mask
            going = home != bucket
            home, bucket = home[going], bucket[going]
        self._count -= len(rows)

    def check(self) -> list[str]:
        """Violated invariants; walks the whole table."""
        faults: list[str] = []
        used = self._tags != 0
        if int(used.sum()) != self._count:
            faults.append(f"index counts {self._count} keys, holds {int(used.sum())}")
        rows = self._rows[used]
        if len(np.unique(rows)) != len(rows):
            faults.append("index holds a row twice")
        if len(rows) and (self.find(self._keys[rows]) != rows).any():
            faults.append("index holds a row it does not find")
        return faults
