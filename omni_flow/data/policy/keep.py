"""Priorities with a deadline, over any other policy: what a session asked to keep goes last."""

import math

import numpy as np

from omni_flow.data.policy.base import Evictable, EvictionPolicy, Keys, Mask, Pages, PolicyError

MAX_LEVEL = 3


class KeepHints(EvictionPolicy):
    """Evicts pages of level 0 first, then of level 1, and so on; within a level, in the order of the inner
    policy.

    A hint is a wish and not a lease: when nothing else is left, kept pages go too. Level 0 is the level of a
    page without a hint and of one whose deadline has passed. Costs 5 bytes a page from the first hint on,
    nothing before.
    """

    def __init__(self, inner: EvictionPolicy) -> None:
        self.capacity = inner.capacity
        self._inner = inner
        self._level = np.zeros(0, np.uint8)
        self._until = np.zeros(0, np.uint32)

    def keep(self, pages: Pages, level: int, until: float) -> None:
        """Gives tracked `pages` a level of 1 to 3 until a time; level 0 withdraws hints.

        Args:
            until: seconds on the clock that `victims` is given, rounded up; at least 0.

        Raises:
            PolicyError: a page is not tracked, the level or the time is out of range.
        """
        pages = np.asarray(pages, np.uint32)
        if np.any(pages >= self.capacity) or not np.all(self._inner.tracks(pages)):
            raise PolicyError(f"a hint for pages that are not tracked, among {len(pages)} from {pages[:4]}")
        if not 0 <= level <= MAX_LEVEL or not 0 <= until < 1 << 32:
            raise PolicyError(f"level {level} until {until}; a level is 0 to {MAX_LEVEL}, a time 0 to 2**32 seconds")
        if not len(self._level):
            self._level = np.zeros(self.capacity, np.uint8)
            self._until = np.zeros(self.capacity, np.uint32)
        self._level[pages] = level
        self._until[pages] = math.ceil(until)

    def on_insert(self, pages: Pages, keys: Keys) -> None:
        self._inner.on_insert(pages, keys)
        if len(self._level):
            self._level[pages] = 0

    def on_hit(self, pages: Pages) -> None:
        self._inner.on_hit(pages)

    def on_remove(self, pages: Pages, *, evicted: bool) -> None:
        self._inner.on_remove(pages, evicted=evicted)
        if len(self._level):
            self._level[pages] = 0

    def victims(self, n: int, evictable: Evictable, now: float = 0.0) -> Pages:
        if not len(self._level):
            return self._inner.victims(n, evictable, now)
        level = np.where(self._until > now, self._level, np.uint8(0))
        found: list[Pages] = []
        missing = n
        for stage in range(MAX_LEVEL + 1):
            if missing <= 0:
                break

            def this_stage(pages: Pages, stage: int = stage) -> Mask:
                mask: Mask = level[pages] == stage
                mask[mask] = evictable(pages[mask])
                return mask

            chosen = self._inner.victims(missing, this_stage, now)
            found.append(chosen)
            missing -= len(chosen)
        return np.concatenate(found) if found else np.empty(0, np.uint32)

    def tracks(self, pages: Pages) -> Mask:
        return self._inner.tracks(pages)

    def __len__(self) -> int:
        return len(self._inner)

    def nbytes(self) -> int:
        own = self._level.nbytes + self._until.nbytes
        return int(own) + self._inner.nbytes()

    def check_integrity(self) -> None:
        self._inner.check_integrity()
        if len(self._level):
            hinted = np.flatnonzero(self._level).astype(np.uint32)
            if not np.all(self._inner.tracks(hinted)):
                raise PolicyError("a page that is not tracked carries a hint")
