"""A FIFO of page numbers in about 5 bytes a page, with removal from the middle.

Why no linked list: every operation of a list is a Python step a page; here a batch is a few vector
operations. Why no `deque`: pages leave from the middle, and an entry costs 8 bytes and a Python int.

Entries are page numbers in one array. `pos[page]` says which entry of a page is the living one, so removing a
page, or moving it to the end, leaves a dead entry behind. Dead entries go when the array is full; that
happens after at least a fifth of the living entries were added, so it costs O(1) an operation.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from omni_flow.data.policy.base import Mask, Pages, PolicyError

_CHUNK = 4096
_SLACK = 64


class PageQueue:
    """One queue among several that share `where` and `pos`; a page is in at most one of them.

    Args:
        ident: the number that `where[page]` holds while a page is in this queue; not 0.
        where: uint8 a page, which queue it is in.
        pos: uint32 a page, its living entry in that queue.
    """

    def __init__(self, ident: int, where: npt.NDArray[np.uint8], pos: npt.NDArray[np.uint32]) -> None:
        self._ident = ident
        self._where = where
        self._pos = pos
        self._ring: Pages = np.empty(_SLACK, np.uint32)
        self._head = 0
        self._tail = 0
        self.size = 0

    def append(self, pages: Pages) -> None:
        """Puts pages that are in no queue at the end, in order."""
        self._write(pages)
        self._where[pages] = self._ident
        self.size += len(pages)

    def touch(self, pages: Pages) -> None:
        """Moves pages of this queue to the end, in order; of a page given several times the last place counts."""
        self._write(pages)

    def take(self, pages: Pages) -> None:
        """Takes distinct pages of this queue out of it."""
        self._where[pages] = 0
        self.size -= len(pages)

    def chunks(self) -> Iterator[Pages]:
        """Yields the pages from the head on, in pieces. Meanwhile the caller may `take` pages but add or move none."""
        at, stop = self._head, self._tail
        while at < stop:
            end = min(at + _CHUNK, stop)
            piece = self._ring[at:end]
            live = piece[self._living(piece, at)]
            if len(live):
                yield live
            elif at == self._head:
                self._head = end
            at = end

    def _living(self, piece: Pages, start: int) -> Mask:
        here: Mask = self._where[piece] == self._ident
        here &= self._pos[piece] == np.arange(start, start + len(piece), dtype=np.uint32)
        return here

    def _write(self, pages: Pages) -> None:
        if self._tail + len(pages) > len(self._ring):
            self._compact(len(pages))
        end = self._tail + len(pages)
        self._ring[self._tail : end] = pages
        self._pos[pages] = np.arange(self._tail, end, dtype=np.uint32)
        self._tail = end

    def _compact(self, room: int) -> None:
        piece = self._ring[self._head : self._tail]
        live = piece[self._living(piece, self._head)]
        need = len(live) + room
        self._ring = np.empty(need + need // 5 + _SLACK, np.uint32)
        self._ring[: len(live)] = live
        self._pos[live] = np.arange(len(live), dtype=np.uint32)
        self._head, self._tail = 0, len(live)

    def nbytes(self) -> int:
        """Returns the bytes of this queue's entries."""
        return int(self._ring.nbytes)

    def check_integrity(self) -> None:
        """Raises PolicyError unless exactly the pages marked as being here have one living entry each."""
        piece = self._ring[self._head : self._tail]
        live = piece[self._living(piece, self._head)]
        marked = int(np.count_nonzero(self._where == self._ident))
        if not (len(live) == len(np.unique(live)) == self.size == marked):
            raise PolicyError(
                f"queue {self._ident}: {len(live)} living entries, size {self.size}, {marked} pages marked"
            )
