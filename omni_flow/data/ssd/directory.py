"""The directory of one tier: its exclusive lock, its epoch, and the files in it.

    lock                 locked by the process that has the directory; holds the epoch and that process's pid
    <id>.open            a segment that is being written, or was when its writer died
    <id>.seg             a full segment with a footer
    probe                one block, written and read while a sick disk is off

A segment id is epoch << 32 | number. The epoch grows with every opening, so an id never comes back and bytes
of an earlier use of a file can't be taken for new records.
"""

import fcntl
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from omni_flow.data.ssd.errors import BadSsdConfig, DirectIoUnsupported, DirectoryBusy
from omni_flow.data.ssd.format import BLOCK
from omni_flow.data.ssd.io import Io, aligned_buffer, read_into, write_all

_NAME = re.compile(r"([0-9a-f]{16})\.(open|seg)")
_LOCK_MAGIC = "omni-flow ssd tier"


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """A segment file found on disk."""

    ident: int
    path: str
    sealed: bool


def make_usable(path: Path) -> None:
    """Create a directory for tiers if it is missing, and see that files can be made in it.

    Raises:
        BadSsdConfig: it can't be created or written.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise BadSsdConfig(
            f"directory {path} can't be used: {error.strerror}", "name one that this user can create and write"
        ) from error


def holder_of(path: Path) -> str:
    """What the process that has the tier in a directory says of itself; empty if there is none."""
    try:
        lock = os.open(path / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError:
        return "it is another user's"
    except OSError:
        return ""
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return ""
    except BlockingIOError:
        return _said_in(lock)
    except OSError:  # locks are no use there, which whoever opens the tier is told
        return ""
    finally:
        os.close(lock)


def _said_in(lock: int) -> str:
    return os.pread(lock, 200, 0).decode(errors="replace").strip() or "unknown"


class SegmentDirectory:
    """Holds the lock from construction to `close`.

    Args:
        path: created with mode 0700 when missing.
        io: the seam.
        require_direct: refuse a file system without O_DIRECT; otherwise `direct` says what came out.

    Raises:
        DirectoryBusy: another process holds the lock.
        DirectIoUnsupported: the file system can't do O_DIRECT and it is required.
    """

    def __init__(self, path: Path, io: Io, *, require_direct: bool) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = path
        self._io = io
        self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._take_lock()
            self.epoch = self._next_epoch()
            self.direct = self._try_direct()
            if require_direct and not self.direct:
                raise DirectIoUnsupported(
                    f"{path} is on a file system without O_DIRECT",
                    "choose a directory on a disk, or allow buffered I/O",
                )
        except BaseException:
            os.close(self._lock)
            raise
        self._number = 0

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DirectoryBusy(
                f"{self.path} is in use ({_said_in(self._lock)})",
                "give each tier a directory of its own, or stop the other process",
            ) from None

    def _next_epoch(self) -> int:
        """Above the epoch in the lock file and above that of every segment, so a torn lock file does no harm."""
        found = re.search(r"epoch (\d+)", os.pread(self._lock, 200, 0).decode(errors="replace"))
        known = [file.ident >> 32 for file in self.files()] + [int(found[1]) if found else 0]
        epoch = max(known) + 1
        text = f"{_LOCK_MAGIC}, epoch {epoch}, pid {os.getpid()}\n".encode()
        os.pwrite(self._lock, text.ljust(200), 0)
        os.fsync(self._lock)
        return epoch

    def _try_direct(self) -> bool:
        try:
            fd = self._io.open(str(self.path / "probe"), os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        except OSError:
            # EINVAL and its kin: what open(2) says on a file system without O_DIRECT. Anything worse shows at
            # once when the first segment is made.
            return False
        self._io.close(fd)
        return True

    def _flags(self) -> int:
        return os.O_RDWR | (os.O_DIRECT if self.direct else 0)

    def files(self) -> list[SegmentFile]:
        """Returns the segment files, oldest first."""
        found = []
        for name in os.listdir(self.path):
            if match := _NAME.fullmatch(name):
                found.append(SegmentFile(int(match[1], 16), str(self.path / name), match[2] == "seg"))
        return sorted(found, key=lambda file: file.ident)

    def next_ident(self) -> int:
        """Returns an id that no segment ever had."""
        self._number += 1
        return self.epoch << 32 | self._number

    def name(self, ident: int, *, sealed: bool) -> str:
        """Returns the path of a segment."""
        return str(self.path / f"{ident:016x}.{'seg' if sealed else 'open'}")

    def open(self, path: str) -> int:
        """Opens a segment file for reading and writing."""
        return self._io.open(path, self._flags())

    def create(self, ident: int, length: int) -> tuple[int, str]:
        """Makes an empty segment whose blocks are reserved; returns its descriptor and path.

        Raises:
            OSError: there is no room; nothing is left behind.
        """
        path = self.name(ident, sealed=False)
        fd = self._io.open(path, self._flags() | os.O_CREAT | os.O_EXCL)
        try:
            self._io.fallocate(fd, length)
        except OSError:
            self._io.close(fd)
            self._io.unlink(path)
            raise
        return fd, path

    def probe(self) -> None:
        """Writes one block and reads it back. Raises OSError when the disk is still sick."""
        fd = self._io.open(str(self.path / "probe"), self._flags() | os.O_CREAT)
        try:
            wanted, got = aligned_buffer(BLOCK), aligned_buffer(BLOCK)
            wanted[:8] = os.urandom(8)
            write_all(self._io, fd, [wanted], 0)
            self._io.fdatasync(fd)
            read_into(self._io, fd, [got], 0)
            if got != wanted:
                raise OSError("the probe block reads back as other bytes")
        finally:
            self._io.close(fd)

    def close(self) -> None:
        """Gives the lock back."""
        os.close(self._lock)
