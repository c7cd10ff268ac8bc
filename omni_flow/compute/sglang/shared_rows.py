"""Memory that a role and its engine process share for fixed rows: what goes into a step and what comes out of it lie
there, and messages say only that they do.

It is one anonymous file that the role makes and the engine process inherits; it ends with both. Each session has a
place of its own, behind all that there were: what nobody has written takes no memory, and what a session has is given
back when it is closed.
"""

from __future__ import annotations

import mmap
import os

import numpy as np

from omni_flow.compute.engine import Floats
from omni_flow.compute.errors import EngineFull


class SharedRows:
    """The rows of one session, float32 (rows, hidden size) each, as one of the two processes maps them.

    Args:
        fd: the file.
        at: where they lie in it.

    Attributes:
        given: what goes into a step. Written by the role while no step is under way.
        made: what comes out of it. Written by the engine before it says that the step is done.

    Raises:
        EngineFull: the process can't map so much.
    """

    __slots__ = ("_map", "given", "made")

    def __init__(self, fd: int, at: int, rows: int, hidden: int) -> None:
        try:
            self._map = mmap.mmap(fd, nbytes(rows, hidden), offset=at)
        except OSError as error:
            raise EngineFull(f"{rows} rows of {hidden} can't be mapped: {error}", "close other sessions") from error
        both: Floats = np.frombuffer(self._map, np.float32, 2 * rows * hidden).reshape(2, rows, hidden)
        self.given, self.made = both

    def give_back(self) -> None:
        """Let go of the memory; both processes would read zeros. For whoever uses it last."""
        self._map.madvise(mmap.MADV_REMOVE)


class RowsFile:
    """The file, at the role. Raises OSError: no descriptor is left."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("omni-rows", os.MFD_CLOEXEC)
        self._end = 0

    def place(self, rows: int, hidden: int) -> int:
        """Where the rows of another session lie. Raises EngineFull: the file can't be so large."""
        at, end = self._end, self._end + nbytes(rows, hidden)
        try:
            os.ftruncate(self.fd, end)
        except OSError as error:
            raise EngineFull(f"{rows} rows of {hidden} have no place: {error}", "close other sessions") from error
        self._end = end
        return at

    def close(self) -> None:
        """The file is gone once nobody maps it."""
        os.close(self.fd)


def nbytes(rows: int, hidden: int) -> int:
    """Of a session's place: whole pages of the system."""
    return -(-2 * 4 * rows * hidden // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
