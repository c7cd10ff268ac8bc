"""Room in one arena: power-of-two blocks by a buddy allocator, and extents for what is larger. Pure; in units of bytes.

The largest class is the largest power of two that fits into the area, 256 MiB at most. An area that is no multiple
of it is cut into a few aligned roots, so no byte of whole blocks is lost."""

from __future__ import annotations

import bisect
from typing import Final

MIN_BLOCK: Final = 4096
MAX_BLOCK: Final = 256 << 20


class Buddy:
    """Blocks of 4 KiB · 2^k in [0, size). The block given back last is taken first: it is still in the caches.

    A free list is a dict used as an ordered set.
    """

    def __init__(self, size: int) -> None:
        self.size = size // MIN_BLOCK * MIN_BLOCK
        self.top = 0
        while MIN_BLOCK << (self.top + 1) <= min(self.size, MAX_BLOCK):
            self.top += 1
        self._free: list[dict[int, None]] = [{} for _ in range(self.top + 1)]
        self.free_bytes = 0
        at = 0
        while at < self.size:
            order = self.top
            while at % (MIN_BLOCK << order) or at + (MIN_BLOCK << order) > self.size:
                order -= 1
            self._free[order][at] = None
            self.free_bytes += MIN_BLOCK << order
            at += MIN_BLOCK << order

    @property
    def largest(self) -> int:
        """Size of the largest block there can be."""
        return MIN_BLOCK << self.top if self.size else 0

    def largest_free(self) -> int:
        """Size of the largest block that is free now."""
        return max((MIN_BLOCK << order for order, blocks in enumerate(self._free) if blocks), default=0)

    @staticmethod
    def order_of(nbytes: int) -> int:
        """Class of a request: smallest k with 4 KiB · 2^k ≥ nbytes."""
        return max(0, (nbytes - 1).bit_length() - 12)

    def take(self, order: int) -> int | None:
        """Offset of a block of this class, None when there is none."""
        for have in range(order, self.top + 1):
            if self._free[have]:
                break
        else:
            return None
        at, _ = self._free[have].popitem()
        while have > order:
            have -= 1
            self._free[have][at + (MIN_BLOCK << have)] = None
        self.free_bytes -= MIN_BLOCK << order
        return at

    def give(self, at: int, order: int) -> None:
        """Free a block and join it with its free buddies."""
        self.free_bytes += MIN_BLOCK << order
        while order < self.top:
            buddy = at ^ (MIN_BLOCK << order)
            if buddy not in self._free[order]:
                break
            del self._free[order][buddy]
            at = min(at, buddy)
            order += 1
        self._free[order][at] = None


class Extents:
    """First fit in [start, start + size), in whole 4 KiB pages, neighbours joined on return."""

    def __init__(self, start: int, size: int) -> None:
        self.size = size // MIN_BLOCK * MIN_BLOCK
        self._free: list[tuple[int, int]] = [(start, self.size)] if self.size else []

    @property
    def free_bytes(self) -> int:
        return sum(length for _, length in self._free)

    def largest_free(self) -> int:
        return max((length for _, length in self._free), default=0)

    def take(self, length: int) -> int | None:
        """Offset of `length` bytes (a multiple of 4 KiB), None when there is no such hole."""
        for i, (at, have) in enumerate(self._free):
            if have >= length:
                if have == length:
                    del self._free[i]
                else:
                    self._free[i] = (at + length, have - length)
                return at
        return None

    def give(self, at: int, length: int) -> None:
        i = bisect.bisect(self._free, (at, 0))
        if i < len(self._free) and at + length == self._free[i][0]:
            length += self._free.pop(i)[1]
        if i and sum(self._free[i - 1]) == at:
            before, have = self._free.pop(i - 1)
            at, length = before, have + length
        bisect.insort(self._free, (at, length))
