"""The ghost of a cache: which fingerprints were evicted lately, in 8 bytes an entry."""

import numpy as np
import numpy.typing as npt

from omni_flow.data.policy.base import Mask

Tags = npt.NDArray[np.uint32]
"""32-bit fingerprints. Two pages that share one are confused, which costs a misjudged page and nothing else."""

_WAYS = 8


class Ghost:
    """Remembers about the last `capacity` fingerprints added.

    A set-associative table of (fingerprint, time of adding), time counted in additions: an entry older than
    `capacity` additions has expired, so nothing needs removing. Expired entries are overwritten first, then
    the oldest of their set; a set that is full of newer ones forgets a little early. S3-FIFO (section 4.2 of
    the paper) suggests this form.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = max(capacity, 1)
        # A quarter more slots than entries, so that uneven sets seldom forget early.
        self._sets = max(1, -(-self.capacity * 5 // (4 * _WAYS)))
        self._tag: Tags = np.zeros((self._sets, _WAYS), np.uint32)
        self._time: Tags = np.zeros((self._sets, _WAYS), np.uint32)
        # Times start here so that the zeros of a new table are expired; they wrap, and only differences
        # count.
        self._now = self.capacity + 1

    def add(self, tags: Tags) -> None:
        """Remembers `tags`, in order."""
        tags = np.asarray(tags, np.uint32)
        for start in range(0, len(tags), self._sets):
            self._add(tags[start : start + self._sets])

    def _add(self, tags: Tags) -> None:
        pending = np.arange(len(tags))
        times = (np.arange(self._now, self._now + len(tags)) & 0xFFFFFFFF).astype(np.uint32)
        self._now += len(tags)
        rows = (tags % np.uint32(self._sets)).astype(np.intp)
        while len(pending):
            # One addition a set and round: two in one round would choose the same way.
            _, first = np.unique(rows[pending], return_index=True)
            batch = pending[first]
            row = rows[batch]
            age = np.uint32(self._now & 0xFFFFFFFF) - self._time[row]
            same = self._tag[row] == tags[batch, None]
            way = np.where(same.any(axis=1), same.argmax(axis=1), age.argmax(axis=1))
            self._tag[row, way] = tags[batch]
            self._time[row, way] = times[batch]
            pending = np.delete(pending, first)

    def contains(self, tags: Tags) -> Mask:
        """Returns for each tag whether it was added within the last `capacity` additions."""
        tags = np.asarray(tags, np.uint32)
        rows = (tags % np.uint32(self._sets)).astype(np.intp)
        age = np.uint32(self._now & 0xFFFFFFFF) - self._time[rows]
        found = (self._tag[rows] == tags[:, None]) & (age <= self.capacity)
        return np.asarray(found.any(axis=1))

    def nbytes(self) -> int:
        """Returns the bytes of the table."""
        return int(self._tag.nbytes + self._time.nbytes)
