"""Least recently used."""

import numpy as np

from omni_flow.data.policy.base import NO_PAGES, Evictable, EvictionPolicy, Keys, Mask, Pages, checked
from omni_flow.data.policy.queue import PageQueue


class Lru(EvictionPolicy):
    """Evicts the page whose last use (or insertion) is longest ago. About 10 bytes a page."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._where = np.zeros(capacity, np.uint8)
        self._queue = PageQueue(1, self._where, np.zeros(capacity, np.uint32))

    def on_insert(self, pages: Pages, keys: Keys) -> None:
        self._queue.append(checked(pages, self._where, expect=False))

    def on_hit(self, pages: Pages) -> None:
        self._queue.touch(checked(pages, self._where, expect=True, distinct=False))

    def on_remove(self, pages: Pages, *, evicted: bool) -> None:
        self._queue.take(checked(pages, self._where, expect=True))

    def victims(self, n: int, evictable: Evictable, now: float = 0.0) -> Pages:
        found: list[Pages] = []
        missing = n
        for chunk in self._queue.chunks():
            if missing <= 0:
                break
            chosen = chunk[evictable(chunk)][:missing]
            found.append(chosen)
            missing -= len(chosen)
        return np.concatenate(found) if found else NO_PAGES

    def tracks(self, pages: Pages) -> Mask:
        return np.asarray(self._where[pages] != 0)

    def __len__(self) -> int:
        return self._queue.size

    def nbytes(self) -> int:
        return int(self._where.nbytes) + 4 * self.capacity + self._queue.nbytes()

    def check_integrity(self) -> None:
        self._queue.check_integrity()
