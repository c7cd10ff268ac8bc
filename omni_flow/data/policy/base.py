"""The contract of an eviction policy."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Pages = npt.NDArray[np.uint32]
"""Page numbers of one pool, 0 to capacity - 1."""
Keys = npt.NDArray[np.uint64]
"""One 64-bit fingerprint a page (the first 8 bytes of its hash); recognises a page that comes back."""
Mask = npt.NDArray[np.bool_]
Evictable = Callable[[Pages], Mask]
"""Says for each page whether it may go now: not pinned, not on its way out already, no suffix left behind."""

NO_PAGES: Pages = np.empty(0, np.uint32)


class PolicyError(ValueError):
    """A call that contradicts what the policy tracks; the message names the pages."""


class EvictionPolicy(ABC):
    """Orders the pages of one pool for eviction.

    Knows page numbers and nothing else: no clock (`now` is passed in), no I/O, no bytes. Every call takes a
    batch and costs vector operations, not a loop over pages. Batches are checked as a whole before anything
    changes. Not thread-safe.
    """

    capacity: int

    @abstractmethod
    def on_insert(self, pages: Pages, keys: Keys) -> None:
        """Starts tracking `pages` (distinct, not tracked). `keys[i]` is the fingerprint of what page i holds.

        Raises:
            PolicyError: a page is out of range, given twice or tracked already.
        """

    @abstractmethod
    def on_hit(self, pages: Pages) -> None:
        """Notes that tracked `pages` were used. A page given several times in one batch counts once.

        Raises:
            PolicyError: a page is not tracked.
        """

    @abstractmethod
    def on_remove(self, pages: Pages, *, evicted: bool) -> None:
        """Stops tracking `pages` (distinct, tracked).

        Args:
            evicted: they went for lack of room and may come back; False: they are void (freed, retired
                namespace).

        Raises:
            PolicyError: a page is given twice or not tracked.
        """

    @abstractmethod
    def victims(self, n: int, evictable: Evictable, now: float = 0.0) -> Pages:
        """Returns up to `n` distinct tracked pages for which `evictable` holds, first to go first.

        Fewer only when there are no more of them. They stay tracked until `on_remove`, so an eviction that
        fails needs no undoing; until then `evictable` must refuse them or they are named again. May age other
        pages.

        Args:
            now: seconds on the caller's clock; only policies with deadlines read it.
        """

    @abstractmethod
    def tracks(self, pages: Pages) -> Mask:
        """Returns for each page, all in range, whether it is tracked."""

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of tracked pages."""

    @abstractmethod
    def nbytes(self) -> int:
        """Returns the bytes of memory the policy holds."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raises PolicyError when the bookkeeping contradicts itself. A pass over everything: for idle time
        and tests."""


def checked(pages: Pages, where: npt.NDArray[np.uint8], *, expect: bool, distinct: bool = True) -> Pages:
    """Returns `pages` as uint32 once each is known to be in range, tracked as expected and, if asked, given once."""
    pages = np.asarray(pages, np.uint32)
    if pages.size and int(pages.max()) >= len(where):
        raise PolicyError(f"page {int(pages.max())} is out of range; this pool has {len(where)} pages")
    wrong = pages[(where[pages] != 0) != expect]
    if wrong.size:
        state = "not tracked" if expect else "tracked already"
        raise PolicyError(f"{wrong.size} pages are {state}, first {int(wrong[0])}")
    if distinct and len(pages) > 1:
        ordered = np.sort(pages)
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        if twice.size:
            raise PolicyError(f"page {int(twice[0])} is given twice in one batch")
    return pages
