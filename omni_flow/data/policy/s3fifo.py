"""S3-FIFO: three FIFO queues instead of a list ordered by use.

Source: J. Yang, Y. Zhang, Z. Qiu, Y. Yue, K. V. Rashmi, "FIFO queues are all you need for cache eviction",
SOSP 2023. New pages enter a small queue S (a tenth of the pages). A page that leaves S without having been
used again is evicted and its fingerprint remembered in the ghost queue; a used one moves to the main queue M,
and so does a page that comes back while the ghost knows it. M gives each page one more round for every use,
up to three. So a scan (a long prompt that nobody asks for again) passes through S and leaves M alone, and a
hit moves nothing.
"""

import numpy as np

from omni_flow.data.policy.base import NO_PAGES, Evictable, EvictionPolicy, Keys, Mask, Pages, PolicyError, checked
from omni_flow.data.policy.ghost import Ghost, Tags
from omni_flow.data.policy.queue import PageQueue

_SMALL, _MAIN = 1, 2
_MAX_USES = 3


class S3Fifo(EvictionPolicy):
    """About 24 bytes a page: place 4, queue and use count 2, fingerprint 4, queue entries 5, ghost 9.

    Args:
        capacity: pages of the pool.
        small: share of the tracked pages that S is shrunk to; the paper's value is a tenth.
        promote_at: uses after insertion that carry a page from S to M; the paper's value is 2.
    """

    def __init__(self, capacity: int, *, small: float = 0.1, promote_at: int = 2) -> None:
        if not 0 < small < 1 or not 1 <= promote_at <= _MAX_USES:
            raise PolicyError(f"small is a share between 0 and 1 (got {small}), promote_at 1 to 3 (got {promote_at})")
        self.capacity = capacity
        self._share = small
        self._promote_at = promote_at
        self._where = np.zeros(capacity, np.uint8)
        self._uses = np.zeros(capacity, np.uint8)
        self._tags: Tags = np.zeros(capacity, np.uint32)
        pos = np.zeros(capacity, np.uint32)
        self._small = PageQueue(_SMALL, self._where, pos)
        self._main = PageQueue(_MAIN, self._where, pos)
        self._ghost = Ghost(capacity - int(capacity * small))

    def on_insert(self, pages: Pages, keys: Keys) -> None:
        pages = checked(pages, self._where, expect=False)
        if len(keys) != len(pages):
            raise PolicyError(f"{len(pages)} pages with {len(keys)} keys; give one key a page")
        tags = (np.asarray(keys, np.uint64) >> np.uint64(32)).astype(np.uint32)
        known = self._ghost.contains(tags)
        self._tags[pages] = tags
        self._uses[pages] = 0
        self._main.append(pages[known])
        self._small.append(pages[~known])

    def on_hit(self, pages: Pages) -> None:
        pages = checked(pages, self._where, expect=True, distinct=False)
        self._uses[pages] = np.minimum(self._uses[pages] + 1, _MAX_USES)

    def on_remove(self, pages: Pages, *, evicted: bool) -> None:
        pages = checked(pages, self._where, expect=True)
        in_small = self._where[pages] == _SMALL
        if evicted:
            self._ghost.add(self._tags[pages[in_small]])
        self._small.take(pages[in_small])
        self._main.take(pages[~in_small])

    def victims(self, n: int, evictable: Evictable, now: float = 0.0) -> Pages:
        if n < 1:
            return NO_PAGES
        found: list[Pages] = []
        excess = self._small.size - int(len(self) * self._share)
        missing = n
        if excess > 0:
            missing -= self._from_small(missing, excess, evictable, found)
        if missing > 0:
            missing -= self._from_main(missing, evictable, found)
        if missing > 0:
            missing -= self._from_small(missing, self._small.size, evictable, found)
        if missing > 0:
            # Used pages of S went to M just now, and nothing else is left.
            gone = np.concatenate(found) if found else NO_PAGES
            self._from_main(missing, lambda pages: evictable(pages) & ~np.isin(pages, gone), found)
        return np.concatenate(found) if found else NO_PAGES

    def _from_small(self, n: int, departures: int, evictable: Evictable, found: list[Pages]) -> int:
        """Lets up to `departures` pages leave S, each to M or, up to `n`, into `found`; returns how many went there."""
        chosen = 0
        already = np.concatenate(found) if found else NO_PAGES
        for chunk in self._small.chunks():
            may_go = evictable(chunk)
            if len(already):
                may_go = may_go & ~np.isin(chunk, already)
            leaving = chunk[may_go]
            promoted = self._uses[leaving] >= self._promote_at
            # The last one that may leave: bounded by departures, and that of the last victim wanted.
            stop = min(departures, len(leaving))
            evictions = np.cumsum(~promoted[:stop])
            if stop and evictions[-1] >= n - chosen:
                stop = int(np.searchsorted(evictions, n - chosen)) + 1
            leaving, promoted = leaving[:stop], promoted[:stop]
            self._small.take(leaving[promoted])
            self._main.append(leaving[promoted])
            found.append(leaving[~promoted])
            chosen += int(np.count_nonzero(~promoted))
            departures -= stop
            if chosen == n or departures == 0:
                break
        return chosen

    def _from_main(self, n: int, evictable: Evictable, found: list[Pages]) -> int:
        """Puts up to `n` unused pages of M into `found`, giving used ones another round; returns how many."""
        chosen = 0
        taken: list[Pages] = []
        # After this many rounds every page that may go has lost all its uses.
        for turn in range(_MAX_USES + 1):
            again: list[Pages] = []
            before = np.concatenate(taken) if turn and taken else NO_PAGES
            for chunk in self._main.chunks():
                leaving = chunk[evictable(chunk)]
                if len(before):
                    leaving = leaving[~np.isin(leaving, before)]
                unused = self._uses[leaving] == 0
                if int(np.count_nonzero(unused)) >= n - chosen:
                    stop = int(np.searchsorted(np.cumsum(unused), n - chosen)) + 1
                    leaving, unused = leaving[:stop], unused[:stop]
                again.append(leaving[~unused])
                taken.append(leaving[unused])
                chosen += int(np.count_nonzero(unused))
                if chosen == n:
                    break
            rounds = np.concatenate(again) if again else NO_PAGES
            self._uses[rounds] -= 1
            self._main.touch(rounds)
            if chosen == n or not len(rounds):
                break
        found += taken
        return chosen

    def tracks(self, pages: Pages) -> Mask:
        return np.asarray(self._where[pages] != 0)

    def __len__(self) -> int:
        return self._small.size + self._main.size

    def nbytes(self) -> int:
        columns = self._where.nbytes + self._uses.nbytes + self._tags.nbytes + 4 * self.capacity
        return int(columns) + self._small.nbytes() + self._main.nbytes() + self._ghost.nbytes()

    def check_integrity(self) -> None:
        self._small.check_integrity()
        self._main.check_integrity()
        if int(self._uses.max(initial=0)) > _MAX_USES:
            raise PolicyError(f"a use count is above {_MAX_USES}")
