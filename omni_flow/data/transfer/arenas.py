"""Mapped arenas of a driver process, and the checks that keep every span inside them."""

import fcntl
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from omni_flow.data.mapping import map_shared
from omni_flow.data.transfer.base import Access, ArenaId
from omni_flow.data.transfer.errors import AccessDenied, BadJob, OutOfBounds, UnknownArena


@dataclass(slots=True)
class Arena:
    """One mapped memory file."""

    id: ArenaId
    size: int
    access: Access
    view: memoryview
    writable: bool

    def check(self, pieces: Iterable[tuple[int, int]]) -> None:
        """Raises: OutOfBounds unless every (offset, length) lies inside."""
        for offset, length in pieces:
            if offset < 0 or length < 1 or offset + length > self.size:
                raise OutOfBounds(f"bytes {offset}+{length} leave arena {self.id} of {self.size} bytes")

    def check_rows(self, offsets: npt.NDArray[np.uint64], lengths: npt.NDArray[np.uint64]) -> None:
        """The same for columns of offsets and lengths, each below 2^62."""
        ends = offsets + lengths
        if int(ends.max()) > self.size:
            row = int(ends.argmax())
            raise OutOfBounds(f"bytes {offsets[row]}+{lengths[row]} leave arena {self.id} of {self.size} bytes")


class ArenaMap:
    """The registered arenas by number."""

    def __init__(self) -> None:
        self._arenas: dict[ArenaId, Arena] = {}

    def __iter__(self) -> Iterator[Arena]:
        return iter(list(self._arenas.values()))

    def add(self, arena: ArenaId, fd: int, size: int, access: Access) -> Arena:
        """Map `fd`, which stays the caller's. Raises: BadJob when the number is taken or the file too short."""
        if arena in self._arenas:
            raise BadJob(f"arena {arena} is registered already")
        have = os.fstat(fd).st_size
        if size < 1 or have < size:
            raise BadJob(f"arena {arena} shall have {size} bytes, its file has {have}")
        writable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
        if access in ("write", "both") and not writable:
            raise BadJob(f"arena {arena} shall be open to writes, its file is open read-only")
        made = Arena(arena, size, access, map_shared(fd, size, writable), writable)
        self._arenas[arena] = made
        return made

    def local(self, arena: ArenaId, direction: str) -> Arena:
        """The arena of a job on this side. Raises: UnknownArena, AccessDenied."""
        found = self._arenas.get(arena)
        if found is None:
            raise UnknownArena(f"arena {arena} is not registered on this side; register it first")
        if direction == "read" and not found.writable:
            raise AccessDenied(f"arena {arena} is mapped read-only here and cannot be filled")
        return found

    def remote(self, arena: ArenaId, verb: Access) -> Arena:
        """The arena a peer names. Raises: UnknownArena, AccessDenied."""
        found = self._arenas.get(arena)
        if found is None:
            raise UnknownArena(f"arena {arena} is not registered on the peer")
        if found.access not in (verb, "both"):
            raise AccessDenied(f"arena {arena} of the peer is registered for {found.access!r}, not for {verb!r}")
        return found
